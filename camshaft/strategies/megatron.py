"""Recognise Megatron-LM, and say what it would take."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from camshaft.errors import StrategyError
from camshaft.strategies.base import Strategy


class Megatron(Strategy):
    """Stand for Megatron-LM, which brings its own models, data and loop, so that no module here fits it."""

    name = "megatron"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def launch(self) -> None:
        """Refuse.

        Raises:
            StrategyError: always; it says what is missing on this machine and what to use instead.
        """
        missing = [package for package in ("megatron", "apex") if find_spec(package) is None]
        lacks = f"This machine lacks {' and '.join(missing)}. " if missing else ""
        raise StrategyError(
            "strategy megatron is recognised but not supported.",
            why=f"{lacks}Megatron-LM trains its own model classes in its own loop "
            "(pip install megatron-core, on NVIDIA GPUs).",
            fix="Use strategy: fsdp or deepspeed for large modules, or tensor_parallel for split matrices.",
        )
