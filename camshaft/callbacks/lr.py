"""Log the learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from camshaft.callback import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from camshaft.state import Batch, State


class LRMonitor(Callback):
    """Log the rate that an update used, at log steps: ``lr``, or ``lr/0``, ``lr/1`` ... one a parameter group.

    Groups count through all optimizers. ``momentum`` and ``weight_decay`` log those too, where a
    group has them.
    """

    def __init__(self, *, momentum: bool = False, weight_decay: bool = False) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        self._used: list[tuple[str, Any]] = []

    def on_step_start(self, state: State, window: list[Batch]) -> None:
        """Note the rates: after the update the schedulers have moved them on."""
        del window
        if (state.progress.step + 1) % state.limits.log_every == 0:
            self._used = self._read(state.optimizers)

    def on_step(self, state: State) -> None:
        """Log what was noted."""
        if self._used:
            for name, value in self._used:
                state.metrics.log(name, value, batch_size=1)
            self._used = []

    def _read(self, optimizers: list[Optimizer]) -> list[tuple[str, Any]]:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        found = []
        for index, group in enumerate(groups):
            suffix = f"/{index}" if len(groups) > 1 else ""
            found.append((f"lr{suffix}", group["lr"]))
            if self.momentum and ("momentum" in group or "betas" in group):
                found.append((f"momentum{suffix}", group["betas"][0] if "betas" in group else group["momentum"]))
            if self.weight_decay and "weight_decay" in group:
                found.append((f"weight_decay{suffix}", group["weight_decay"]))
        return found
