"""Define the contract of a logger: a sink on the main process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from camshaft.errors import RecipeError
from camshaft.redact import redact


@dataclass(frozen=True, slots=True)
class Record:
    """Values that belong to one step. ``step`` is the x axis; the rest goes along.

    ``kind`` says what flushed them: "step" (training, every ``log_every``), "epoch" (means over an
    epoch), "validation" or "test".
    """

    kind: Literal["step", "epoch", "validation", "test"]
    step: int
    epoch: int
    samples: int
    tokens: float
    seconds: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """What a logger may know of its run. ``resumed_step`` is the step it continues from, 0 for a new run."""

    name: str
    directory: Path | None
    recipe: str = ""
    hparams: Mapping[str, Any] = field(default_factory=dict)
    resumed_step: int = 0


class Logger:
    """Write what a run logs somewhere. Only the main process has loggers; none of these is a collective.

    Attributes:
        on_error: ``"disable"`` warns once and drops a logger that raises, so that a dead tracker
            never kills a run; ``"raise"`` ends the run.
    """

    name: str = ""
    on_error: Literal["raise", "disable"] = "disable"

    def open(self, run: Run) -> None:
        """Start writing; called before the first record."""

    def log_metrics(self, record: Record) -> None:
        """Take a record of values."""

    def log_text(self, name: str, text: str, step: int) -> None:
        """Take text, such as a generated sample."""

    def log_image(self, name: str, image: Tensor, step: int) -> None:
        """Take an image on the CPU: (C, H, W), float32 in [0, 1]."""

    def log_hparams(self, hparams: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Take the hyper-parameters with the final metrics; called once, at the end."""

    def flush(self) -> None:
        """Make everything so far readable by others."""

    def close(self, status: str) -> None:
        """Finish: ``status`` is finished, stopped, interrupted, terminated or failed."""


def file_name(name: str, owner: str) -> str:
    """Return the name of a file in a run's directory.

    Raises:
        RecipeError: it is a path, which could lead to a file of somebody's and empty it.
    """
    if not name or name in (".", "..") or set(name) & set("/\\\0"):
        raise RecipeError(
            f"{owner}.filename is {name!r}.",
            why="The file lies in the run's directory, and replaces what has its name.",
            fix="Give a name without a folder, such as metrics.jsonl.",
        )
    return name


class Sinks:
    """Fan out to all loggers of the main process; on other ranks there are none, and nothing happens."""

    def __init__(self, loggers: Mapping[str, Logger]) -> None:
        self.loggers = dict(loggers)
        for name, logger in self.loggers.items():
            logger.name = logger.name or name

    def open(self, run: Run) -> None:
        """Open every logger."""
        self._each(lambda logger: logger.open(run))

    def log_metrics(self, record: Record) -> None:
        """Hand a record to every logger."""
        self._each(lambda logger: logger.log_metrics(record))

    def log_text(self, name: str, text: str, step: int) -> None:
        """Hand text to every logger."""
        self._each(lambda logger: logger.log_text(name, text, step))

    def log_image(self, name: str, image: Tensor, step: int) -> None:
        """Copy an image to the host once and hand it to every logger."""
        if self.loggers:
            host = image.detach().float().cpu()
            self._each(lambda logger: logger.log_image(name, host, step))

    def log_hparams(self, hparams: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Hand the hyper-parameters and final metrics to every logger."""
        self._each(lambda logger: logger.log_hparams(hparams, metrics))

    def flush(self) -> None:
        """Flush every logger."""
        self._each(lambda logger: logger.flush())

    def close(self, status: str) -> None:
        """Close every logger."""
        self._each(lambda logger: logger.close(status))

    def _each(self, call: Callable[[Logger], None]) -> None:
        for name, logger in list(self.loggers.items()):
            try:
                call(logger)
            except Exception as error:
                if logger.on_error == "raise":
                    raise
                del self.loggers[name]
                reason = redact(f"{type(error).__name__}: {error}")
                warnings.warn(f"logger {name!r} failed and is off from here on: {reason}", stacklevel=2)
