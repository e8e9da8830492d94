"""Say what a trainer does, with the names that Lightning gives it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TrainerFn(StrEnum):
    """What was called."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(StrEnum):
    """What goes on inside it."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether a module is evaluated."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)


@dataclass(slots=True)
class TrainerState:
    """What was called (``fn``), what goes on (``stage``), and how the last run ended (``status``)."""

    fn: TrainerFn | None = None
    stage: RunningStage | None = None
    status: str = "initializing"

    def enter(self, stage: str, *, is_inner: bool) -> None:
        """Note that a stage begins; inside a fit only ``stage`` changes."""
        self.status = "running"
        self.stage = RunningStage("train" if stage == "fit" else stage)
        if not is_inner:
            self.fn = TrainerFn(stage)

    @property
    def finished(self) -> bool:
        """Whether the last run came to its end."""
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        """Whether nothing runs."""
        return self.status in ("finished", "interrupted")
