"""Put batches and optimizer state on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from camshaft.state import Batch


def move(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to ``device`` without waiting: tensors, containers, and objects that have ``to``."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({key: move(value, device) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(value, device) for value in batch)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    return batch


def move_state(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Move the state that optimizers brought along; scalars, such as step counts, stay on the host."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[key] = value.to(device)
