"""See which dtypes a step really uses, and hold them against what was promised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from camshaft.errors import StrategyError

if TYPE_CHECKING:
    from camshaft.strategies.base import Strategy

_HOMES = ("torch.nn.", "torchao.", "transformer_engine.")
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def short(dtypes: Iterable[torch.dtype]) -> str:
    """Return the names of dtypes, each once, joined by "/"; "none" when there are none."""
    return "/".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})) or "none"


def held_dtypes(parameters: Sequence[tuple[Tensor, bool]], optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return the dtypes of (parameter, whether it trains) pairs, of the gradients, and of the optimizers."""
    state = [t for o in optimizers for s in o.state.values() for t in s.values() if isinstance(t, Tensor) and t.ndim]
    held = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    return {
        "parameters": short(p.dtype for p, _ in parameters),
        "gradients": short(p.dtype for p, trains in parameters if trains),
        "optimizer": short(t.dtype for t in state or held),
    }


class Observed:
    """The dtypes seen during a step: what matrix products put out, and gradients.

    Attributes:
        compute: dtypes of the outputs of linear and convolutional layers; empty when there are none, or when
            they are compiled, which a hook would undo.
        gradients: dtypes of reduced gradients; empty where the strategy hides them.
    """

    def __init__(self) -> None:
        self.begun = False
        self.compute: set[torch.dtype] = set()
        self.gradients: set[torch.dtype] = set()
        self._hooks: list[Any] = []

    def begin(self, module: nn.Module, *, kept: Iterable[nn.Module]) -> None:
        """Watch the layers of a module, but for those in ``kept``."""
        self.begun = True
        inside = {id(m) for layer in kept for m in layer.modules()}
        if is_compiled(module):
            return
        self._hooks = [
            layer.register_forward_hook(self._see)
            for layer in module.modules()
            # Other libraries' layers, such as quantised ones, put out what they were given.
            if isinstance(layer, _PRODUCTS) and id(layer) not in inside and type(layer).__module__.startswith(_HOMES)
        ]

    def see_gradients(self, strategy: Strategy) -> None:
        """Note the gradients that are set."""
        self.gradients |= {p.grad.dtype for p in strategy.parameters() if p.grad is not None}

    def end(self) -> None:
        """Let go of the layers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _see(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        del layer, inputs
        if isinstance(output, Tensor):
            self.compute.add(output.dtype)


def is_compiled(module: nn.Module) -> bool:
    """Say whether a module, a layer of it or its step was handed to ``torch.compile``."""
    return "training_step" in module.__dict__ or any(
        m._compiled_call_impl is not None  # noqa: SLF001 - torch has no public way to ask
        for m in module.modules()
    )


def observe(observed: Observed, strategy: Strategy) -> dict[str, str]:
    """End the watch and return the table: what parameters, compute, reduce and optimizer have for dtypes."""
    observed.end()
    held = strategy.dtypes()
    return {
        "parameters": held["parameters"],
        "compute": short(observed.compute) if observed.compute else "not observed",
        "reduce": held["gradients"],
        "optimizer": held["optimizer"],
    }


def require_expected(table: dict[str, str], *, compute: torch.dtype, stored: torch.dtype | None, who: str) -> None:
    """Refuse a table that is not what the precision promises.

    Raises:
        StrategyError: no layer computed in ``compute``, or no parameter is stored in ``stored``.
    """
    expected = {"compute": compute, "parameters": stored}
    for column, dtype in expected.items():
        found = table[column].split("/")
        if dtype is not None and found != ["not observed"] and short([dtype]) not in found:
            raise StrategyError(
                f"precision is {who}, and the {column} of the first step are {table[column]}.",
                why="Something in between casts, and the run would be slower or less exact than it seems.",
                fix="Look for torch.autocast or .to(dtype) in the module, or name such layers in precision.keep_fp32.",
            )
