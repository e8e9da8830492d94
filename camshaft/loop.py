"""Run the loop: epochs, windows, boundaries, evaluation. Callbacks ask, the loop acts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from camshaft.agreement import SAVE, STOP, VALIDATE, asked, exchange, has_landed
from camshaft.checkpoint.capture import land, save, save_after
from camshaft.data import Window, windows
from camshaft.errors import DataError
from camshaft.evaluation import evaluate, isolated_streams
from camshaft.loader import MicroBatch, Position, Source, limit_rounds
from camshaft.loggers.base import Record, Sinks
from camshaft.metrics import missing_metric
from camshaft.step import train_step

if TYPE_CHECKING:
    from camshaft.hooks import Hooks
    from camshaft.state import State

Step: TypeAlias = Callable[["State", Window, "Hooks"], bool]


def fit(
    state: State, hooks: Hooks, *, step: Step = train_step, then: Callable[[], None] | None = None
) -> None:
    """Train until a limit is reached or a request stops the run. Every rank calls this.

    ``state`` is prepared and, where the run is resumed, restored. ``step`` makes one update. ``then`` is
    called once a limit was reached, before the run ends for its callbacks.
    """
    with session(state, hooks):
        if state.streams is not None:
            state.streams()
        if not state.restored:
            _check_validation(state)
            if state.validation.at_start:
                validate(state, hooks)
        if state.validation_pending:
            validate(state, hooks)
        while not is_done(state):
            train_epoch(state, hooks, step)
        state.status = "finished" if state.status == "running" else state.status
        if then is not None and state.status == "finished":
            then()


@contextmanager
def session(state: State, hooks: Hooks) -> Iterator[None]:
    """Fire ``on_fit_start`` before, ``on_fit_end`` after whatever happens, and ``on_exception`` when it fails."""
    try:
        hooks.on_fit_start(state)
        yield
    except BaseException as error:
        state.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        hooks.on_exception(state, error)
        save_after(state, hooks, error)
        raise
    finally:
        hooks.on_fit_end(state)


def train_epoch(state: State, hooks: Hooks, step: Step = train_step) -> None:
    """Train the rest of the running epoch, from the data position on."""
    progress, control, source = state.progress, state.control, state.train_data
    assert source is not None
    if progress.epoch_batches == 0:
        hooks.on_epoch_start(state)
    epoch = 0 if state.limits.overfit else progress.epoch
    batches, remaining = _rest_of_epoch(state, source, epoch)
    is_empty = True
    for window in windows(batches, state, first=progress.epoch_batches, remaining=remaining):
        is_empty = False
        state.at_epoch_end = window.is_last
        took = step(state, window, hooks)
        progress.epoch_samples += window.total
        progress.epoch_batches += len(window.batches)
        if (
            window.is_last
            or progress.step + progress.skipped_steps >= state.quiet_until
            or control.stopping or control.saving or control.validating
            or time.monotonic() > state.next_poll
        ) and boundary(state, hooks, took=took):  # fmt: skip
            return
        if window.is_last:
            # Also where the step said so: it may end an epoch early.
            return
    if is_empty and progress.epoch_batches:
        # The run was saved between the last step of its epoch and the epoch's end.
        state.at_epoch_end = True
        boundary(state, hooks, took=False)
    elif is_empty:
        raise DataError(
            f"the training loader gave nothing in epoch {progress.epoch}.",
            why="An epoch without a step never ends a run.",
            fix="Check that the loader starts again each epoch, and its dataset's filter.",
        )


def _rest_of_epoch(state: State, source: Source, epoch: int) -> tuple[Iterator[MicroBatch], int | None]:
    """Return the micro-batches from the data position on, and how many there are when that is certain."""
    progress = state.progress
    position = Position(progress.epoch_samples, progress.epoch_batches * state.strategy.data_world_size)
    batches = source.iterate(epoch, position)
    remaining = source.rounds(position)
    if state.limits.train_batches is not None:
        whole = limit_rounds(source.rounds(), state.limits.train_batches, "train")
        left = None if whole is None else max(0, whole - progress.epoch_batches)
        # A limit may exceed a stream whose length nobody knows, or that its __len__ got wrong.
        batches = itertools.islice(batches, left)
        remaining = left if remaining is None or left is None else min(remaining, left)
    return batches, remaining if source.is_counted else None


def boundary(state: State, hooks: Hooks, *, took: bool) -> bool:
    """Act on what is due between two steps, in a fixed order; say whether the run ends here.

    Agree, validate, close the epoch, log, save, stop. A checkpoint therefore holds the metrics of
    its own weights. After a skipped step nothing is due but the epoch's end and what was asked for.
    """
    progress, control, schedule = state.progress, state.control, state.validation.schedule
    epoch_end, count = state.at_epoch_end, progress.step + progress.skipped_steps
    _poll(state)
    acting = exchange(state, count)
    if acting & VALIDATE or (
        schedule is not None and (took or epoch_end) and schedule.due(progress, epoch_end=epoch_end)
    ):
        validate(state, hooks)
    if epoch_end:
        _end_epoch(state, hooks)
    if (took and progress.step % state.limits.log_every == 0) or epoch_end or is_done(state):
        flush(state)
    if epoch_end:
        progress.epoch += 1
        progress.epoch_samples = progress.epoch_batches = 0
    # Closing the epoch may have asked for more.
    acting |= asked(state, everywhere=state.strategy.world_size > 1)
    done = is_done(state) or bool(acting & STOP)
    if acting & SAVE or (done and state.save_at_end and state.saved_step != progress.step):
        tag = control.saving.reason if control.saving is not None else "end" if done else "requested"
        control.saving = None
        control.agreed &= ~SAVE
        save(state, hooks, tag, last=done)
    elif state.flight is not None and (done or has_landed(state)):
        land(state, hooks)
    if acting & STOP and state.status == "running":
        state.status = state.signal or "stopped"
        state.stop_reason = control.stopping.reason if control.stopping is not None else "another rank asked"
    state.quiet_until = count + _quiet_steps(state, count)
    return done


def _quiet_steps(state: State, count: int) -> int:
    """Return how many steps, counting skipped ones, until a boundary may have more to do than look at its requests."""
    step, limits = state.progress.step, state.limits
    quiet = limits.log_every - step % limits.log_every
    if limits.max_steps is not None:
        quiet = min(quiet, limits.max_steps - step)
    if state.validation.schedule is not None:
        quiet = min(quiet, state.validation.schedule.quiet_steps(step))
    if state.strategy.world_size > 1:
        quiet = min(quiet, limits.agree_every - count % limits.agree_every)
    return quiet if state.flight is None else min(quiet, 1)


def validate(state: State, hooks: Hooks) -> dict[str, float] | None:
    """Evaluate on the validation data inside a fit; None when a stop request cut it short."""
    state.control.validating = None
    state.control.agreed &= ~VALIDATE
    state.validation_pending = True
    run = state.evaluation or evaluate
    metrics = run(state, hooks, "validation_step", state.validation_data, limit=state.limits.validation_batches)
    if metrics is None:
        return None
    state.validation_pending = False
    emit(state, "validation", metrics)
    _require_monitored(state)
    _step_monitored(state, metrics)
    return metrics


def _step_monitored(state: State, values: dict[str, float]) -> None:
    """Step the schedulers whose metric was just produced; with manual optimization the module steps its own."""
    if state.module.automatic_optimization:
        for plan in state.plans:
            if plan.monitor in values:
                plan.scheduler.step(values[plan.monitor])


def _require_monitored(state: State) -> None:
    """Refuse, once a step has logged all that it does, a scheduler that waits for a metric nobody logs."""
    for plan in state.plans:
        if plan.monitor is not None and plan.strict and state.progress.step and not state.is_logged(plan.monitor):
            raise missing_metric(plan.monitor, state.logged_names(), "a learning-rate scheduler")


def emit(state: State, kind: Literal["step", "epoch", "validation", "test"], values: dict[str, float]) -> None:
    """Make a record of reduced values: callbacks read it from ``state.values``, loggers get it on the main process."""
    if not values:
        return
    progress = state.progress
    for name, value in values.items():
        state.values[name] = (value, progress.step)
    if state.strategy.is_main:
        seconds = time.monotonic() - state.started
        state.loggers.log_metrics(
            Record(kind, progress.step, progress.epoch, progress.samples, progress.tokens, seconds, values)
        )


def flush(state: State) -> None:
    """Reduce and emit what training steps logged since the last flush. Every rank calls this."""
    values = state.metrics.step.flush(state.strategy.gather_data)
    emit(state, "step", values)
    _step_monitored(state, values)


def _end_epoch(state: State, hooks: Hooks) -> None:
    values = state.metrics.epoch.flush(state.strategy.gather_data)
    emit(state, "epoch", values)
    _step_monitored(state, values)
    if state.validation.schedule is None:
        _require_monitored(state)
    hooks.on_epoch_end(state)
    if state.module.automatic_optimization:
        for plan in state.plans:
            if not plan.is_plateau and plan.interval == "epoch":
                plan.advance(state.progress.epoch + 1)


def is_done(state: State) -> bool:
    """Say whether a limit is reached, or something ended the run."""
    limits, progress = state.limits, state.progress
    if limits.max_steps is not None and progress.step >= limits.max_steps:
        return True
    finished = progress.epoch + (1 if state.at_epoch_end and progress.epoch_batches else 0)
    if limits.max_epochs is not None and finished >= limits.max_epochs:
        return True
    return state.status != "running"


def _poll(state: State) -> None:
    """Look, about once a second, at the time limit, and for a file ``SAVE`` in the run's directory."""
    now = time.monotonic()
    if now < state.next_poll:
        return
    limit = state.limits.max_secs
    if limit is not None and now - state.started > limit:
        state.control.stop(f"max_time of {limit:g} s is over")
    state.next_poll = min(now + 1.0, state.started + limit) if limit is not None else now + 1.0
    if state.run_dir is not None and state.strategy.is_main and (state.run_dir / "SAVE").exists():
        (state.run_dir / "SAVE").unlink(missing_ok=True)
        state.control.save("requested")


def _check_validation(state: State) -> None:
    """Run a few validation batches before training, so that a mistake there shows now; results are dropped."""
    if state.limits.sanity_batches and state.validation_data and state.validation.schedule is not None:
        loggers, state.loggers = state.loggers, Sinks({})
        try:
            with isolated_streams():
                evaluate(state, None, "validation_step", state.validation_data, limit=state.limits.sanity_batches)
        finally:
            state.loggers = loggers


def run_evaluation(
    state: State, hooks: Hooks, stage: Literal["validate", "test", "predict"], sources: Sequence[Any]
) -> dict[str, float] | None:
    """Evaluate once, outside a fit: ``validate``, ``test`` or ``predict``. Every rank calls this."""
    steps = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
    limits = state.limits
    limit = {"validate": limits.validation_batches, "test": limits.test_batches, "predict": limits.predict_batches}
    previous, state.stage = state.stage, stage
    try:
        metrics = evaluate(state, hooks, steps[stage], sources, limit=limit[stage])
    finally:
        state.stage = previous
    if metrics:
        emit(state, "test" if stage == "test" else "validation", metrics)
    return metrics
