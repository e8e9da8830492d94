"""Show how far a run is: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from camshaft import terminal
from camshaft.callback import Callback, main_process_only
from camshaft.errors import RecipeError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from camshaft.state import Batch, State


class ProgressBar(Callback):
    """Show epoch, step, rate, time left and the values logged with ``prog_bar=True``, from the main process.

    On a terminal this is one bar, and a second one below it during validation, redrawn at most every
    ``refresh_secs``; elsewhere it is one line every log step. Values are the newest that were flushed:
    the device is never read for the bar, and the clock only every so many steps.
    """

    def __init__(self, refresh_secs: float = 0.2) -> None:
        if refresh_secs <= 0:
            raise RecipeError(f"ProgressBar.refresh_secs is {refresh_secs}.", fix="Use for example 0.2.")
        self.refresh_secs = refresh_secs
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._evaluation: TaskID | None = None
        self._batches = 0
        self._printed = -1
        self._pace = _Pace(refresh_secs)
        self._fitting = False

    @main_process_only
    def on_fit_start(self, state: State) -> None:
        """Open the bar, or begin to count for the lines."""
        if state.stage != "fit":
            return
        self._fitting = True
        self._printed = state.progress.step
        self._pace.start(state.progress.step)
        if terminal.console().is_terminal:
            self._progress = _open()
            total, step = _length(state), state.progress.step
            self._task = self._progress.add_task(_epoch(state), total=total, completed=step, **_fields(total))

    @main_process_only
    def on_epoch_start(self, state: State) -> None:
        """Name the epoch; the next drawing shows it."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=_epoch(state))

    @main_process_only
    def on_step_start(self, state: State, window: list[Batch]) -> None:
        """Show the step that was just finished, with what the boundary after it flushed."""
        del window
        pace = self._pace
        pace.left -= 1
        if self._progress is not None:
            if pace.left <= 0 and pace.is_due(state.progress.step):
                self._draw(state)
        elif state.progress.step % state.limits.log_every == 0 and state.progress.step != self._printed:
            pace.measure(state.progress.step)
            self._print(state)

    @main_process_only
    def on_validation_start(self, state: State) -> None:
        """Open the bar of an evaluation."""
        self._batches = 0
        if not terminal.console().is_terminal:
            return
        if self._progress is None:
            self._progress = _open()
        name = "validation" if state.stage == "fit" else state.stage
        total = _rounds(state)
        self._evaluation = self._progress.add_task(name, total=total, **_fields(total))
        self._pace.left = 1

    @main_process_only
    def on_validation_batch(self, state: State, output: Any) -> None:
        """Count a batch."""
        del state, output
        self._batches += 1
        pace = self._pace
        pace.left -= 1
        if (
            pace.left <= 0
            and self._progress is not None
            and self._evaluation is not None
            and pace.is_due(self._batches)
        ):
            self._progress.update(self._evaluation, completed=self._batches)
            self._progress.refresh()

    @main_process_only
    def on_validation_end(self, state: State, metrics: dict[str, float] | None) -> None:
        """Take the evaluation's bar away."""
        del metrics
        if self._progress is not None and self._evaluation is not None:
            self._progress.remove_task(self._evaluation)
            self._evaluation = None
            if not self._fitting:
                self._close()
        self._pace.start(state.progress.step)

    @main_process_only
    def on_exception(self, state: State, error: BaseException) -> None:
        """Leave the terminal as it was, so that the error can be read."""
        del state, error
        self._close()

    @main_process_only
    def on_fit_end(self, state: State) -> None:
        """Show where the run ended."""
        if self._fitting and self._progress is not None:
            self._pace.measure(state.progress.step)
            self._draw(state, is_end=True)
        elif self._fitting and state.progress.step != self._printed:
            self._pace.measure(state.progress.step)
            self._print(state)
        self._close()
        self._fitting = False

    def _draw(self, state: State, *, is_end: bool = False) -> None:
        assert self._progress is not None
        assert self._task is not None
        self._progress.update(
            self._task,
            description=_finished_epoch(state) if is_end else _epoch(state),
            completed=state.progress.step,
            rate=_rate(self._pace.rate),
            left=self._left(state),
            values=_values(state),
        )
        self._progress.refresh()

    def _print(self, state: State) -> None:
        self._printed = step = state.progress.step
        total = _length(state)
        count = f"step {step}/{total}" if total else f"step {step}"
        parts = (_finished_epoch(state), count, _rate(self._pace.rate), self._left(state), _values(state))
        terminal.say("  ".join(part for part in parts if part))

    def _left(self, state: State) -> str:
        total = _length(state)
        if not total or not self._pace.rate:
            return ""
        return f"{_clock(max(0, total - state.progress.step) / self._pace.rate)} left"

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = self._evaluation = None


class _Pace:
    """Measure a rate, and say when to look at the clock again: after about ``every`` seconds of counts."""

    def __init__(self, every: float) -> None:
        self.every = every
        self.left = 1
        self.rate = 0.0
        self._count = 0
        self._time = 0.0
        self._drawn = 0.0

    def start(self, count: int) -> None:
        """Measure from here on; time spent elsewhere does not count."""
        self._count, self._time, self.left = count, time.perf_counter(), 1

    def measure(self, count: int) -> None:
        """Take the rate since the last measurement, smoothed."""
        now = time.perf_counter()
        if count > self._count and now > self._time:
            new = (count - self._count) / (now - self._time)
            self.rate = new if self.rate == 0 else 0.7 * self.rate + 0.3 * new
            self._count, self._time = count, now

    def is_due(self, count: int) -> bool:
        """Look at the clock: whether it is time to draw, and in how many counts to look again."""
        now = time.perf_counter()
        if now - self._drawn < self.every:
            # Half as long again, so that a sudden slow-down is seen after one more interval at most.
            elapsed = max(now - self._drawn, 1e-6)
            self.left = max(1, int(self.left_rate(count, elapsed) * (self.every - elapsed) / 2))
            return False
        self._drawn = now
        self.measure(count)
        self.left = max(1, int(self.rate * self.every / 2))
        return True

    def left_rate(self, count: int, elapsed: float) -> float:
        """Return counts a second since the last drawing."""
        return max(0, count - self._count) / elapsed


def _open() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}{task.fields[of]}", markup=False),
        *(TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("rate", "left", "values")),
        console=terminal.console(),
        auto_refresh=False,
    )
    progress.start()
    return progress


def _fields(total: int | None) -> dict[str, Any]:
    """Return what a new bar shows beside its own columns; nobody knows how long some runs are."""
    return {"of": f"/{total}" if total is not None else "", "rate": "", "left": "", "values": ""}


def _length(state: State) -> int | None:
    return state.planned_steps if state.planned_steps is not None else state.limits.max_steps


def _rounds(state: State) -> int | None:
    """Return how many batches a validation inside a fit has on this rank, when that is known."""
    if state.stage != "fit":
        return None
    limit = state.limits.validation_batches
    counts = [source.rounds() for source in state.validation_data]
    if any(count is None for count in counts):
        return None
    known = [count for count in counts if count is not None]
    if isinstance(limit, float):
        return sum(max(1, round(count * limit)) for count in known)
    return sum(count if limit is None else min(count, limit) for count in known)


def _epoch(state: State) -> str:
    """Name the epoch that runs."""
    return _named(state.progress.epoch + 1, state.limits.max_epochs)


def _finished_epoch(state: State) -> str:
    """Name the epoch that the newest finished step belongs to."""
    progress = state.progress
    return _named(max(1, progress.epoch + bool(progress.epoch_batches)), state.limits.max_epochs)


def _named(number: int, last: int | None) -> str:
    return f"epoch {number}" if last is None else f"epoch {min(number, last)}/{last}"


def _rate(rate: float) -> str:
    if not rate:
        return ""
    return f"{rate:.3g} steps/s" if rate < 1000 else f"{rate:.0f} steps/s"


def _values(state: State) -> str:
    shown = ((name, pair[0]) for name, pair in state.values.items() if name in state.metrics.prog_bar)
    return "  ".join(f"{name} {value:.4g}" for name, value in shown)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
