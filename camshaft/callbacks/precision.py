"""Choose what forward passes compute in, for the whole run or by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from camshaft.callback import Callback
from camshaft.errors import RecipeError, StrategyError

if TYPE_CHECKING:
    from camshaft.state import State

NAMES = ("fp32", "tf32", "bf16", "fp16")


class Precision(Callback):
    """Compute in ``fp32``, ``tf32``, ``bf16`` or ``fp16``; weights and optimizer state stay float32.

    A mapping switches while training: ``{0: bf16, 900: fp32}`` computes in bf16 until 900 updates
    are done, and in fp32 from then on. fp16 scales the loss. tf32 is fp32 with faster matrix products
    on devices that have them. Source of mixed precision: Micikevicius et al. (2018).
    """

    def __init__(self, precision: str | Mapping[int, str] = "fp32") -> None:
        schedule = {0: precision} if isinstance(precision, str) else {int(k): v for k, v in precision.items()}
        for step, name in schedule.items():
            if name not in NAMES or step < 0:
                raise RecipeError(
                    f"Precision has {name!r} from step {step}.", fix=f"Use {', '.join(NAMES)}, from step 0 on."
                )
        if 0 not in schedule:
            raise RecipeError("Precision's schedule does not say what step 0 computes in.", fix="Add an entry for 0.")
        self.schedule = dict(sorted(schedule.items()))
        self._switches = len(self.schedule) > 1
        self._matmul: str | None = None

    def at(self, step: int) -> str:
        """Return the precision of the update after ``step`` updates."""
        return next(name for start, name in reversed(self.schedule.items()) if start <= step)

    def on_fit_start(self, state: State) -> None:
        """Check that the strategy can do all of it, and set the first."""
        strategy = state.strategy
        for name in self.schedule.values():
            if _compute(name) not in strategy.precisions:
                raise StrategyError(
                    f"strategy {strategy.name} cannot compute in {name}.",
                    fix=f"Use one of {', '.join(sorted(strategy.precisions))}.",
                )
        if self._switches and not strategy.switches_precision:
            raise StrategyError(
                f"a precision schedule cannot run under {strategy.name}: it fixes the dtype when it is set up.",
                fix="Give one precision for the whole run.",
            )
        self._set(state)

    def on_step_start(self, state: State, window: list[object]) -> None:
        """Set what this step computes in."""
        del window
        if self._switches:
            self._set(state)

    def on_fit_end(self, state: State) -> None:
        """Give torch its own matrix products back."""
        del state
        if self._matmul is not None:
            torch.set_float32_matmul_precision(self._matmul)
            self._matmul = None

    def _set(self, state: State) -> None:
        name = self.at(state.progress.step)
        state.precision = _compute(name)
        if name == "tf32" and self._matmul is None:
            self._matmul = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
        elif name != "tf32" and self._matmul is not None:
            torch.set_float32_matmul_precision(self._matmul)
            self._matmul = None


def _compute(name: str) -> str:
    return "fp32" if name == "tf32" else name
