"""Show the loops of a trainer under the names that reach into Lightning's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from camshaft.lightning.facade import Facade


class EpochLoopView:
    """What ``trainer.fit_loop.epoch_loop`` gives: counters of batches."""

    is_surface = True

    def __init__(self, trainer: Facade) -> None:
        self._trainer = trainer

    @property
    def batch_idx(self) -> int:
        """Index of the newest batch in its epoch; -1 before the first."""
        index: int = self._trainer.batch_idx
        return index

    @property
    def total_batch_idx(self) -> int:
        """Index of the newest batch over the whole run; -1 before the first."""
        state = self._trainer.loop_state
        return -1 if state is None else state.progress.micro_step - 1

    @property
    def global_step(self) -> int:
        """Optimizer steps taken, summed over optimizers."""
        return self._trainer.global_step

    @property
    def batch_progress(self) -> Any:
        """Counters of the running epoch's batches."""
        ready = self._trainer.batch_idx + 1
        current = SimpleNamespace(ready=ready, started=ready, processed=ready, completed=ready)
        return SimpleNamespace(current=current, is_last_batch=self._trainer.is_last_batch)


class FitLoopView:
    """What ``trainer.fit_loop`` gives: limits, which may be set, and counters."""

    is_surface = True
    _SETTABLE = frozenset({"max_epochs", "min_epochs", "max_steps", "min_steps"})

    def __init__(self, trainer: Facade) -> None:
        object.__setattr__(self, "_trainer", trainer)

    def __getattr__(self, name: str) -> Any:
        if name in self._SETTABLE:
            return getattr(self._trainer, name)
        raise AttributeError(
            f"trainer.fit_loop has no {name!r} here: ask the trainer, or listen to a hook. It has "
            f"{', '.join(sorted(self._SETTABLE))}, epoch_loop, epoch_progress and total_batch_idx."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._SETTABLE:
            raise AttributeError(f"trainer.fit_loop.{name} cannot be set here.")
        setattr(self._trainer, name, value)

    @property
    def epoch_loop(self) -> EpochLoopView:
        """Counters of batches."""
        return EpochLoopView(self._trainer)

    @property
    def epoch_progress(self) -> Any:
        """Counters of epochs."""
        done = self._trainer.current_epoch
        current = SimpleNamespace(ready=done, started=done, processed=done, completed=done)
        return SimpleNamespace(current=current, total=current)

    @property
    def total_batch_idx(self) -> int:
        """Index of the newest batch over the whole run."""
        return self.epoch_loop.total_batch_idx

    @property
    def global_step(self) -> int:
        """Optimizer steps taken, summed over optimizers."""
        return self._trainer.global_step
