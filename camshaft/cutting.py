"""Cut the micro-batches of a window smaller, and take back a window that ran out of memory."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from camshaft.batches import batch_size_of
from camshaft.data import Window
from camshaft.errors import DataError

if TYPE_CHECKING:
    from camshaft.metrics import Series
    from camshaft.state import State

_TEXTS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an exception means that an allocation failed, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def cut_window(window: Window, size: int | None) -> Window:
    """Return the same window in micro-batches of at most ``size`` samples, in order; None cuts nothing."""
    if size is None or all(count <= size for count in window.samples):
        return window
    batches: list[Any] = []
    samples: list[int] = []
    for batch, count in zip(window.batches, window.samples, strict=True):
        if count <= size:
            batches.append(batch)
            samples.append(count)
            continue
        sizes = [min(size, count - start) for start in range(0, count, size)]
        batches += cut_batch(batch, sizes)
        samples += sizes
    return Window(batches, samples, window.total, window.first, window.is_last)


def cut_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return a batch in parts of so many samples: tensors and arrays by their leading dim, lists by their items.

    What has no part for each sample, such as a number, goes into every part.

    Raises:
        DataError: nothing in the batch can be cut.
    """
    count = sum(sizes)
    if batch_size_of(batch) != count or not _is_cuttable(batch, count):
        raise DataError(
            f"a batch of type {type(batch).__name__} with {count} samples cannot be cut into smaller micro-batches.",
            why="No tensor, array or list in it has that length.",
            fix="Let the dataset yield tensors with a leading dim of samples, or use a smaller micro-batch.",
        )
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [_part(batch, count, slice(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


class Rewind:
    """Remember what a window's micro-batches change before their update, so that the window can be run again.

    These are random streams, buffers such as running statistics, what was logged, torchmetrics objects and
    the count of micro-batches. Gradients are forgotten by the next attempt itself.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._micro_step = state.progress.micro_step
        self._streams = (random.getstate(), np.random.get_state(), torch.get_rng_state())  # noqa: NPY002
        self._cuda = torch.cuda.get_rng_state() if state.strategy.device.type == "cuda" else None
        self._buffers = [(buffer, buffer.clone()) for buffer in state.module.buffers()]
        tables = (state.metrics.step, state.metrics.epoch)
        self._series = [(series, _copied(series)) for table in tables for series in table.series.values()]
        found: list[Any] = [m for m in state.module.modules() if hasattr(m, "_copy_state_dict")]
        self._objects: list[tuple[Any, Any, int]] = [
            (metric, metric._copy_state_dict(), metric._update_count)  # noqa: SLF001 - torchmetrics has no public way
            for metric in found
        ]

    def undo(self) -> None:
        """Put everything back."""
        state = self._state
        state.progress.micro_step = self._micro_step
        random.setstate(self._streams[0])
        np.random.set_state(self._streams[1])  # noqa: NPY002
        torch.set_rng_state(self._streams[2])
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        known = {id(series) for series, _ in self._series}
        for table in (state.metrics.step, state.metrics.epoch):
            for series in table.series.values():
                if id(series) not in known:
                    series.clear()
        for series, (total, weight, count, pending, weights) in self._series:
            series.total, series.weight, series.count = total, weight, count
            series.pending, series.pending_weights = list(pending), list(weights)
        for metric, values, count in self._objects:
            for name, value in values.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, None  # noqa: SLF001


def _copied(series: Series) -> tuple[Any, ...]:
    return series.total, series.weight, series.count, list(series.pending), list(series.pending_weights)


def _is_container(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, (Tensor, np.ndarray, Mapping, list, tuple)) or _is_record(item) for item in value)
    return isinstance(value, Mapping) or _is_record(value)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_cuttable(value: Any, count: int) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim > 0 and len(value) == count
    if isinstance(value, list) and not _is_container(value):
        return len(value) == count
    if not _is_container(value):
        return False
    if isinstance(value, Mapping):
        return any(_is_cuttable(item, count) for item in value.values())
    items = value if isinstance(value, (list, tuple)) else vars(value).values()
    return any(_is_cuttable(item, count) for item in items)


def _part(value: Any, count: int, where: slice) -> Any:
    if isinstance(value, (Tensor, np.ndarray)) or (isinstance(value, list) and not _is_container(value)):
        return value[where] if _is_cuttable(value, count) else value
    if isinstance(value, Mapping):
        return type(value)({key: _part(item, count, where) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_part(item, count, where) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_part(item, count, where) for item in value)
    if _is_record(value):
        fields = {f.name: _part(getattr(value, f.name), count, where) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value
