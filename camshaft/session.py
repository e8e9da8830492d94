"""Run a whole session: processes, directory, restore, the loop, the test split, and the last words."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from camshaft import loop
from camshaft.assembly import Assembled, Parts, assemble
from camshaft.callback import Callback
from camshaft.callbacks.checkpoint import Checkpoint
from camshaft.callbacks.clip import ClipGradients
from camshaft.checkpoint.capture import restore_for_evaluation
from camshaft.checkpoint.reader import Reader
from camshaft.checkpoint.store import Store
from camshaft.choosing import choose_directory, find_for_all
from camshaft.data import DataModule
from camshaft.errors import CallbackError, DataError
from camshaft.loggers.base import Logger, Run, Sinks
from camshaft.module import Module
from camshaft.redact import redact
from camshaft.resuming import resume
from camshaft.rundir import RunDirectory
from camshaft.schedule import seconds
from camshaft.signals import EXIT_CODES, heeding
from camshaft.state import Stage, State
from camshaft.step import train_step
from camshaft.terminal import say


@dataclass(slots=True)
class Result:
    """How a run ended.

    Attributes:
        status: finished, stopped, interrupted or terminated.
        step: optimizer updates taken.
        metrics: the newest value of every name that was logged.
        best: (value, step, checkpoint) of the monitored metric, when one is monitored.
        module: the trained module.
    """

    status: str
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    run_dir: Path | None = None
    best: tuple[float, int, str] | None = None
    module: Module | None = None

    @property
    def exit_code(self) -> int:
        """The code a process ends with: 0, 1, 130 or 143."""
        return EXIT_CODES.get(self.status, 1)


def run(
    module: Module,
    data: DataModule | Any | None = None,
    *,
    val_data: Any | None = None,
    test_data: Any | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    loggers: Mapping[str, Logger] | None = None,
    strategy: Any = "single",
    num_processes: int | None = None,
    name: str | None = None,
    **settings: Any,
) -> Result:
    """Train a module from Python or a notebook, as a recipe would.

    ``strategy`` is a short name, a mapping of ``name`` and options as in a recipe, or an object of one's own.
    ``num_processes`` starts so many processes for the strategy, unless a launcher started this one; the
    trained weights come back into ``module``. Everything else that the run changes stays in them.

    ``data`` is a DataModule, or a training loader with ``val_data`` and ``test_data`` beside it: plain
    PyTorch loaders, whose batch size is per rank. ``settings`` are the top-level keys of a recipe
    (``max_epochs=10``, ``precision="bf16"``, ``batch_size=64``, ``device="cpu"``, ``runs_dir=...``).
    Without a recipe nothing says that an earlier run was the same: ``resume`` is "never" here, unless
    it names the run to continue or is "auto" for the newest of this name that did not finish.

    Raises:
        CamshaftError: anything is wrong that could be seen before training; or what training raised.
    """
    from camshaft.direct import direct_parts, run_in_processes

    given: dict[str, Any] = {
        "strategy": strategy, "name": name or type(module).__name__.lower(), "callbacks": callbacks or {},
        "loggers": loggers or {}, "settings": settings,
    }  # fmt: skip
    source = _as_data(data, val_data, test_data)
    if num_processes is not None and "RANK" not in os.environ:
        return run_in_processes(module, source, num_processes=num_processes, **given)
    return execute(direct_parts(module, source, **given))


class PlainData(DataModule):
    """Loaders that were passed from Python, as a data module."""

    def __init__(self, train: Any, val: Any = None, test: Any = None) -> None:
        self._train, self._val, self._test = train, val, test

    def train_dataloader(self) -> Any:
        """Return the training loader."""
        return self._train

    def val_dataloader(self) -> Any:
        """Return the validation loaders."""
        return self._val

    def test_dataloader(self) -> Any:
        """Return the test loaders."""
        return self._test


def _as_data(data: Any, val_data: Any, test_data: Any) -> DataModule | None:
    if data is None or isinstance(data, DataModule):
        return data
    return PlainData(data, val_data, test_data)


def execute(parts: Parts, stage: Stage = "fit", checkpoint: str | None = None) -> Result:
    """Run a composed session on this rank; every rank calls this.

    ``checkpoint`` is where an evaluation gets its weights: a path, "last" or "best" of the newest run.
    """
    strategy = parts.strategy
    strategy.recipe = _facts(parts)
    strategy.hang_timeout_s = seconds(parts.settings.launch.hang_timeout)
    strategy.launch()
    try:
        directory, message = choose_directory(parts, stage) if not parts.settings.fast_dev_run else (None, "")
        if message and strategy.is_main:
            say(message)
        if stage == "fit":
            return _fit(parts, directory)
        return _evaluate(parts, stage, checkpoint or "best", directory)
    finally:
        strategy.teardown()


def _facts(parts: Parts) -> dict[str, Any]:
    """Return what a back end with settings of its own must agree with."""
    settings = parts.settings
    clip = next((c.max_norm for c in parts.callbacks.values() if isinstance(c, ClipGradients)), None)
    return {"batch_size": settings.batch_size, "accumulate": settings.accumulate, "max_norm": clip}


def explain(parts: Parts) -> str:
    """Return every event with its listeners in the order they run, without building anything."""
    from camshaft.hooks import Hooks

    return Hooks(parts.callbacks).explain()


def _fit(parts: Parts, directory: RunDirectory | None) -> Result:
    run_dir = directory.path if directory is not None else None
    if parts.settings.fast_dev_run:
        parts.callbacks = {n: c for n, c in parts.callbacks.items() if not isinstance(c, Checkpoint)}
        parts.loggers = {}
    assembled = assemble(parts, "fit", run_dir)
    state, hooks = assembled.state, assembled.hooks
    step = _step(state)
    with _store(assembled, directory), _reporting(assembled, directory), heeding(state):
        resume(assembled, directory)
        _open_loggers(assembled, directory)
        loop.fit(state, hooks, step=step, then=lambda: _test(assembled))
        state.loggers.log_hparams(dict(state.module.hparams), _newest(state))
    return _finish(assembled, directory)


def _step(state: State) -> Any:
    """Return what makes the updates: a callback, the module's own driver when it optimizes by hand, or the engine."""
    own = [callback for callback in state.callbacks.values() if callback.train_step is not None]
    if len(own) > 1:
        raise CallbackError(
            f"callbacks {' and '.join(callback.name for callback in own)} both make the updates.",
            why="A step is made once.",
            fix="Remove one of them.",
        )
    if own:
        return own[0].train_step
    if state.module.automatic_optimization:
        return train_step
    return state.module._attached.driver  # type: ignore[attr-defined]  # noqa: SLF001 - the link of this very run


@contextmanager
def _store(assembled: Assembled, directory: RunDirectory | None) -> Iterator[None]:
    wanted = any(isinstance(callback, Checkpoint) for callback in assembled.parts.callbacks.values())
    if directory is None or not wanted:
        yield
        return
    strategy = assembled.parts.strategy
    with Store(directory.checkpoints, peers=strategy, strategy=strategy.name) as store:
        assembled.state.store = store
        yield


@contextmanager
def _reporting(assembled: Assembled, directory: RunDirectory | None) -> Iterator[None]:
    """Keep ``status.json`` true, and close data and loggers whatever happens."""
    state = assembled.state
    report: Callable[..., None] = directory.report if directory and state.strategy.is_main else _silent
    report(state="running", name=assembled.parts.name)
    try:
        yield
    except BaseException as error:
        status, reason = "failed" if state.status == "running" else state.status, f"{type(error).__name__}: {error}"
        report(state=status, error=redact(reason), step=state.progress.step, epoch=state.progress.epoch)
        if directory is not None and state.strategy.is_main and assembled.parts.recipe:
            _say_where(assembled, directory)
        raise
    finally:
        state.loggers.close(state.status)
        state.module.attach(None)
        if assembled.data is not None:
            assembled.data.teardown("fit")


def _say_where(assembled: Assembled, directory: RunDirectory) -> None:
    """Say where a run that failed lies, and how to go on with it, before its error is shown."""
    state, path = assembled.state, directory.path
    say(f"{state.status.capitalize()} after {state.progress.step} steps. Run directory: {path}")
    if (directory.checkpoints / "last").exists():
        say(f"Continue it from its last checkpoint: python -m camshaft.fit {path / 'recipe.yaml'} resume={path}")


def _silent(**_changes: Any) -> None:
    """Report nothing: there is no directory, or this rank does not write."""


def _open_loggers(assembled: Assembled, directory: RunDirectory | None) -> None:
    state, parts = assembled.state, assembled.parts
    if not state.strategy.is_main:
        return
    state.loggers = Sinks(parts.loggers)
    path = directory.path if directory is not None else None
    state.loggers.open(Run(parts.name, path, parts.recipe, dict(state.module.hparams), state.progress.step))


def _test(assembled: Assembled) -> None:
    """Report the test split that training never saw, when there is one and the recipe does not forbid it."""
    state, wanted = assembled.state, assembled.parts.settings.test
    has_step = state.module.overrides("test_step") or state.module.overrides("validation_step")
    if wanted is False or not has_step:
        return
    sources = assembled.sources("test")
    if sources:
        loop.run_evaluation(state, assembled.hooks, "test", sources)
    elif wanted is True:
        raise DataError("test is true, and there is no test_dataloader.", fix="Write one, or set test: auto.")


def _newest(state: State) -> dict[str, float]:
    return {name: value for name, (value, _) in state.values.items()}


def _finish(assembled: Assembled, directory: RunDirectory | None) -> Result:
    state = assembled.state
    metrics = _newest(state)
    keeper = next((c for c in state.callbacks.values() if isinstance(c, Checkpoint)), None)
    best = keeper.best if keeper is not None else None
    result = Result(state.status, state.progress.step, metrics, state.run_dir, best, state.module)
    if not state.strategy.is_main:
        return result
    if directory is not None:
        record = {"value": best[0], "step": best[1], "checkpoint": best[2]} if best is not None else None
        named = {"name": keeper.monitor, **record} if record is not None and keeper is not None else None
        directory.report(
            state=state.status, step=state.progress.step, epoch=state.progress.epoch, best=named, metrics=metrics
        )
    _say_last(assembled, keeper, result)
    return result


def _say_last(assembled: Assembled, keeper: Checkpoint | None, result: Result) -> None:
    """Say where the run lies, what its best value was, and how to go on."""
    state = assembled.state
    reason = f" ({state.stop_reason})" if state.stop_reason else ""
    say(f"{result.status.capitalize()} after {result.step} steps, {state.progress.epoch} epochs{reason}.")
    tests = {name: value for name, value in result.metrics.items() if name.startswith("test")}
    if tests:
        say("Test split: " + ", ".join(f"{name} {value:.4g}" for name, value in sorted(tests.items())))
    if result.best is not None and keeper is not None:
        say(f"Best {keeper.monitor}: {result.best[0]:.4g} at step {result.best[1]}, in {result.best[2]}.")
    if result.run_dir is not None:
        say(f"Run directory: {result.run_dir}")
        if state.store is not None:
            _say_how_to_go_on(assembled, result)


def _say_how_to_go_on(assembled: Assembled, result: Result) -> None:
    """Say how to continue a run that stopped, or how to use one that finished and how to train it further."""
    limits = assembled.state.limits
    further = ""
    if result.status == "finished":
        name, value = ("max_epochs", limits.max_epochs) if limits.max_epochs is not None else ("max_steps", result.step)
        further = f"{name}={2 * (value or 1)}"
    if not assembled.parts.recipe:
        call = f"camshaft.run(..., resume={str(result.run_dir)!r}"
        say(f"Train it further: {call}, {further})" if further else f"Continue it: {call})")
        return
    assert result.run_dir is not None
    recipe = result.run_dir / "recipe.yaml"
    if further:
        stage = "test" if any(name.startswith("test") for name in result.metrics) else "validate"
        say(f"Use it: python -m camshaft.{stage} {recipe} --checkpoint {'best' if result.best else 'last'}")
    command = f"python -m camshaft.fit {recipe} resume={result.run_dir}"
    say(f"Train it further: {command} {further}" if further else f"Continue it: {command}")


def _evaluate(parts: Parts, stage: Stage, checkpoint: str, directory: RunDirectory | None) -> Result:
    """Evaluate a checkpoint once: validate, test or predict."""
    assembled = assemble(parts, stage, directory.path if directory is not None else None)
    state, hooks = assembled.state, assembled.hooks
    try:
        path = find_for_all(checkpoint, directory, state.strategy)
        with Reader(path) as reader:
            restore_for_evaluation(state, hooks, reader)
        with loop.session(state, hooks):
            metrics = loop.run_evaluation(state, hooks, stage, _require_sources(assembled, stage)) or {}  # type: ignore[arg-type]
        state.status = "finished"
    finally:
        state.module.attach(None)
        if assembled.data is not None:
            assembled.data.teardown(stage)
    if state.strategy.is_main:
        say(f"{stage} of {path} (step {state.progress.step})")
        for name, value in sorted(metrics.items()):
            say(f"  {name}: {value:.6g}")
    return Result(state.status, state.progress.step, metrics, state.run_dir, module=state.module)


def _require_sources(assembled: Assembled, stage: Stage) -> list[Any]:
    sources = assembled.sources(stage)
    if not sources:
        raise DataError(
            f"there is no data to {stage}: neither the data nor the module has such a loader.",
            fix="Write val_dataloader, test_dataloader or predict_dataloader.",
        )
    return sources
