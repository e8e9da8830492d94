"""Evaluate a module: every sample of every rank counted once, and nothing left changed behind."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from camshaft.agreement import URGENT, exchange
from camshaft.loader import Source, limit_rounds

if TYPE_CHECKING:
    from camshaft.hooks import Hooks
    from camshaft.module import Module
    from camshaft.state import State

_NAMES = {"validation_step": "validation", "test_step": "test", "predict_step": "predict"}


def evaluate(
    state: State, hooks: Hooks | None, step: str, sources: Sequence[Source], *, limit: int | float | None = None
) -> dict[str, float] | None:
    """Run ``step`` over all sources in eval mode without gradients, and return the reduced metrics.

    Every rank calls this and gets the same metrics: sums and weights over all samples, in float64.
    ``hooks`` None fires no event and drops the results. None is returned when a stop request cut the
    run short: it is then abandoned, and ``on_validation_end`` fires with None.
    """
    metrics = state.metrics
    was_training, metrics.training = metrics.training, False
    with evaluating(state.module), torch.no_grad():
        try:
            if hooks is not None:
                hooks.on_validation_start(state)
            finished = _run(state, hooks, step, sources, limit)
        finally:
            metrics.training, metrics.suffix, metrics.muted = was_training, "", False
        values = metrics.evaluation.flush(state.strategy.gather_data)
        if hooks is None:
            _reset_metrics(state.module)
        result = values if finished else None
        if hooks is not None:
            hooks.on_validation_end(state, result)
    return result


def _run(state: State, hooks: Hooks | None, step: str, sources: Sequence[Source], limit: int | float | None) -> bool:
    strategy, metrics = state.strategy, state.metrics
    interruptible = hooks is not None and state.stage == "fit"
    strategy.micro_step(sync=True, precision=state.precision)
    for number, source in enumerate(sources):
        metrics.suffix = f"/dataloader_idx_{number}" if len(sources) > 1 else ""
        rounds = limit_rounds(source.rounds(), limit, _NAMES[step])
        for index, micro in enumerate(source.iterate(0)):
            if rounds is not None and index >= rounds:
                break
            if interruptible and _must_stop(state, index, source.common_rounds()):
                return False
            metrics.weight, metrics.muted = micro.samples, micro.samples == 0
            with _unchanged_metrics(state.module, active=metrics.muted):
                output = strategy.run(step, strategy.to_device(micro.data), index, number)
            if hooks is not None and not metrics.muted:
                hooks.on_validation_batch(state, output)
    return True


def _must_stop(state: State, index: int, common: int) -> bool:
    """Say whether a signal asks to stop, alike on every rank: they exchange in rounds that all of them have."""
    if index >= common and state.strategy.world_size > 1:
        return False
    return bool(exchange(state, index) & URGENT)


@contextmanager
def evaluating(module: Module) -> Iterator[None]:
    """Put a module in eval mode, and give every submodule its own train/eval flag back afterwards."""
    flags = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in flags:
            submodule.training = training


@contextmanager
def isolated_streams() -> Iterator[None]:
    """Give the random streams of python, numpy and torch back as they were."""
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - the stream user code draws from
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy_state)  # noqa: NPY002


@contextmanager
def _unchanged_metrics(module: Module, *, active: bool) -> Iterator[None]:
    """Undo what a padding batch adds to torchmetrics objects that the module updates itself."""
    if not active:
        yield
        return
    kept = [(metric, metric._copy_state_dict(), metric._update_count) for metric in _metric_objects(module)]  # noqa: SLF001
    yield
    for metric, values, count in kept:
        for name, value in values.items():
            setattr(metric, name, value)
        metric._update_count, metric._computed = count, None  # noqa: SLF001 - torchmetrics has no public undo


def _reset_metrics(module: Module) -> None:
    for metric in _metric_objects(module):
        metric.reset()


def _metric_objects(module: Module) -> list[Any]:
    return [submodule for submodule in module.modules() if hasattr(submodule, "_copy_state_dict")]
