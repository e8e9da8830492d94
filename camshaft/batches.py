"""Count the samples of a batch, whatever it is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor


def batch_size_of(batch: Any) -> int:
    """Return the leading dim of the first tensor in ``batch`` that has one, searched depth first.

    Without such a tensor it is the length of the first list of other things, such as texts; else 1.
    """
    first = batch
    while type(first) in (tuple, list) and first:
        first = first[0]
    # The common batch, (inputs, targets), without a search: this runs every micro-batch.
    if type(first) is Tensor and first.ndim:
        return first.size(0) or _listed(batch) or 1
    return _leading(batch) or _listed(batch) or 1


def _leading(batch: Any) -> int | None:
    if isinstance(batch, (Tensor, np.ndarray)):
        return int(batch.shape[0]) if batch.ndim else None
    return next((size for item in _items(batch) if (size := _leading(item)) is not None), None)


def _listed(batch: Any) -> int | None:
    if isinstance(batch, list) and batch and not any(True for item in batch for _ in _items(item)):
        return len(batch)
    return next((size for item in _items(batch) if (size := _listed(item)) is not None), None)


def _items(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, (list, tuple)):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return ()
