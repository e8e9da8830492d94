"""Save checkpoints on a schedule, and keep the last and the best."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from camshaft.callback import Callback
from camshaft.errors import RecipeError
from camshaft.metrics import missing_metric
from camshaft.schedule import Schedule, ScheduleLike

if TYPE_CHECKING:
    from camshaft.state import Checkpoint as Record
    from camshaft.state import State


class Checkpoint(Callback):
    """Ask for a checkpoint ``every`` interval, when the run ends, and when it stops by a signal or an exception.

    ``monitor`` names a validation metric that ranks checkpoints: a checkpoint counts only with a value
    that its own weights produced. ``keep_last`` newest and ``keep_best`` best are kept, and every
    ``keep_every``-th step for good; the rest is deleted once a newer one is durable. ``background``
    writes while training goes on. ``last`` and ``best`` in the directory point at checkpoints.
    """

    def __init__(
        self,
        every: ScheduleLike | None = "1 epoch",
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep_last: int = 1,
        keep_best: int = 1,
        keep_every: int | None = None,
        at_end: bool = True,
        on_exception: bool = True,
        background: bool = False,
    ) -> None:
        if mode not in ("min", "max"):
            raise RecipeError(f"Checkpoint.mode is {mode!r}.", fix="Use min or max.")
        if keep_last < 1:
            raise RecipeError(
                f"Checkpoint.keep_last is {keep_last}.",
                why="Nothing would be left to resume from.",
                fix="Keep at least one, or switch checkpoints off with checkpoint: false.",
            )
        for name, count in (("keep_best", keep_best), ("keep_every", keep_every)):
            if count is not None and count < 1:
                raise RecipeError(
                    f"Checkpoint.{name} is {count}.", why="It would keep nothing.", fix=f"Leave {name} out for that."
                )
        self.every = None if every is None else Schedule.parse(every)
        self.monitor = monitor
        self.mode = mode
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.keep_every = keep_every
        self.at_end = at_end
        self.save_on_exception = on_exception
        self.background = background
        self.ranked: list[tuple[float, int, str]] = []

    @property
    def best(self) -> tuple[float, int, str] | None:
        """The best (value, step, directory name) so far."""
        return self.ranked[0] if self.ranked else None

    def on_fit_start(self, state: State) -> None:
        """Tell the loop what to save at its end; refuse a schedule that cannot fire."""
        state.save_at_end, state.save_on_exception = self.at_end, self.save_on_exception
        state.save_in_background = self.background
        limits = state.limits
        length = limits.max_steps if limits.max_steps is not None else state.planned_steps
        can_fire = self.every is None or self.every.can_fire(max_steps=length, max_epochs=limits.max_epochs)
        if not can_fire and not self.at_end:
            raise RecipeError(
                f"Checkpoint.every is '{self.every}', and the run has {length} steps.",
                why="No checkpoint would ever be written.",
                fix="Save more often, or set at_end: true.",
            )

    def on_step(self, state: State) -> None:
        """Ask for a checkpoint when a number of steps, or a time, is due."""
        if self.every is not None and self.every.due(state.progress):
            state.control.save("step", everywhere=self.every.is_same_on_all_ranks)

    def on_epoch_end(self, state: State) -> None:
        """Ask for a checkpoint when a number of epochs is due; refuse a monitored name that will never come."""
        if self.monitor is not None and state.validation.schedule is None and not state.is_logged(self.monitor):
            raise missing_metric(self.monitor, state.logged_names(), f"callbacks.{self.name}")
        if self.every is not None and self.every.due(state.progress, epoch_end=True):
            state.control.save("epoch", everywhere=True)

    def on_validation_end(self, state: State, metrics: dict[str, float] | None) -> None:
        """Refuse a monitored name that nothing produces."""
        if metrics is None or self.monitor is None or state.stage != "fit":
            return
        if self.monitor not in metrics and not state.is_logged(self.monitor):
            raise missing_metric(self.monitor, {*metrics, *state.logged_names()}, f"callbacks.{self.name}")

    def on_checkpoint_saved(self, state: State, path: Path) -> None:
        """Rank the new checkpoint by the metric its own weights produced, and delete those that nothing keeps."""
        saved = state.saved
        if saved is None or state.store is None:
            return
        if self._rank(saved, path.name) and self.ranked[0][1] == saved.step:
            meta = {"metric": self.monitor, "value": self.ranked[0][0], "step": saved.step}
            state.store.point("best", path, meta)
        kept = [name for _, _, name in self.ranked]
        state.store.prune(keep_last=self.keep_last, keep=kept, keep_every=self.keep_every)

    def on_restore(self, state: State, checkpoint: Record) -> None:
        """Rank the checkpoint that the run continues from: what it holds was written before it was ranked."""
        if checkpoint.reader is not None:
            checkpoint.metrics = {name: (pair[0], pair[1]) for name, pair in checkpoint.data["values"].items()}
            self._rank(checkpoint, Path(str(checkpoint.reader.path)).name)

    def _rank(self, checkpoint: Record, name: str) -> bool:
        value, step = checkpoint.metrics.get(self.monitor or "", (math.nan, -1))
        if math.isnan(value) or step != checkpoint.step or any(entry[2] == name for entry in self.ranked):
            return False
        self.ranked.append((value, step, name))
        self.ranked.sort(key=lambda entry: -entry[0] if self.mode == "max" else entry[0])
        del self.ranked[max(1, self.keep_best) :]
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the ranking. The checkpoint that holds it is not yet in it."""
        return {"ranked": [list(entry) for entry in self.ranked]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the ranking back."""
        self.ranked = [(float(value), int(step), str(name)) for value, step, name in state["ranked"]]
