"""Stop a run whose metric no longer improves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from camshaft.callback import Callback
from camshaft.errors import CallbackError, RecipeError
from camshaft.metrics import missing_metric

if TYPE_CHECKING:
    from camshaft.state import State


class EarlyStopping(Callback):
    """Stop after ``patience`` evaluations of ``monitor`` in a row that did not improve it by ``min_delta``.

    It counts the validations of a fit, not steps or epochs. ``threshold`` stops as soon as the metric
    is that good. Before ``min_steps`` updates it counts, and stops nothing. A NaN is no improvement.
    The count is saved: a resumed run goes on with it.

    Source: early stopping as in Prechelt (1998).
    """

    def __init__(
        self,
        monitor: str,
        *,
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
        threshold: float | None = None,
        min_steps: int = 0,
    ) -> None:
        if mode not in ("min", "max"):
            raise RecipeError(f"EarlyStopping.mode is {mode!r}.", fix="Use min or max.")
        if patience < 1 or min_delta < 0:
            raise RecipeError(
                f"EarlyStopping has patience={patience} and min_delta={min_delta}.",
                why="It would stop at once, or call a worse value an improvement.",
                fix="Give a patience of at least 1 and a min_delta of at least 0.",
            )
        self.monitor = monitor
        self.patience = patience
        self.mode = mode
        self.min_delta = min_delta
        self.threshold = threshold
        self.min_steps = min_steps
        self.best = math.nan
        self.best_step = 0
        self.waited = 0

    def on_fit_start(self, state: State) -> None:
        """Refuse a run that never evaluates."""
        if state.stage == "fit" and state.validation.schedule is None:
            raise CallbackError(
                f"callbacks.{self.name} monitors {self.monitor!r}, and this run never validates.",
                why="It would never stop anything.",
                fix="Set validate: 1 epoch, and give the module a validation_step and the data a val_dataloader.",
            )

    def on_validation_end(self, state: State, metrics: dict[str, float] | None) -> None:
        """Count an evaluation, and ask to stop when enough of them brought nothing."""
        if metrics is None or state.stage != "fit":
            return
        if self.monitor not in metrics and self.monitor not in state.values:
            if state.is_logged(self.monitor):
                # A mean over the epoch that is still to come.
                return
            raise missing_metric(self.monitor, {*state.logged_names(), *metrics}, f"callbacks.{self.name}")
        value = metrics[self.monitor] if self.monitor in metrics else state.value(self.monitor)
        step = state.progress.step
        if self._improves(value):
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1
        if step < self.min_steps:
            return
        # All ranks see the same metrics, so all of them ask at this same step.
        if self.threshold is not None and self._is_better(value, self.threshold):
            state.control.stop(f"{self.monitor} is {value:.4g}, past {self.threshold:g}", everywhere=True)
        elif self.waited >= self.patience:
            reason = f"{self.monitor} has not improved on {self.best:.4g} since step {self.best_step}"
            state.control.stop(reason, everywhere=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its step and how many evaluations brought nothing since."""
        best = None if math.isnan(self.best) else self.best
        return {"best": best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        self.best = math.nan if state["best"] is None else float(state["best"])
        self.best_step = int(state["best_step"])
        self.waited = int(state["waited"])

    def _improves(self, value: float) -> bool:
        if math.isnan(self.best):
            return not math.isnan(value)
        margin = self.min_delta if self.mode == "max" else -self.min_delta
        return value > self.best + margin if self.mode == "max" else value < self.best + margin

    def _is_better(self, value: float, bound: float) -> bool:
        return value >= bound if self.mode == "max" else value <= bound
