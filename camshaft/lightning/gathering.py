"""Gather tensors over ranks, and map functions over the tensors of any batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from camshaft.strategies.base import Strategy


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a copy of nested containers with ``function`` applied to every tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return type(value)({key: map_tensors(item, function) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: map_tensors(getattr(value, field.name), function)
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **changed)
    return value


def all_gather(data: Any, strategy: Strategy, *, sync_grads: bool = False) -> Any:
    """Return every tensor in ``data`` of all ranks, stacked along a new first dim. Every rank calls this.

    Shapes must be the same on every rank. With ``sync_grads`` gradients flow back to the rank they came from.
    On one process tensors come back as they are.
    """
    if strategy.world_size == 1:
        return map_tensors(data, lambda tensor: tensor)

    def gather(tensor: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and sync_grads):
            if sync_grads and tensor.requires_grad:
                from torch.distributed.nn.functional import all_gather as gather_with_gradients

                return torch.stack(list(gather_with_gradients(tensor.contiguous())))
            parts = [torch.empty_like(tensor) for _ in range(strategy.world_size)]
            torch.distributed.all_gather(parts, tensor.contiguous())
            return torch.stack(parts)

    return map_tensors(_as_tensors(data, strategy.device), gather)


def _as_tensors(data: Any, device: torch.device) -> Any:
    if isinstance(data, (int, float)):
        return torch.tensor(data, device=device)
    if isinstance(data, Mapping):
        return {key: _as_tensors(value, device) for key, value in data.items()}
    if isinstance(data, (list, tuple)) and not hasattr(data, "_fields"):
        return type(data)(_as_tensors(value, device) for value in data)
    return data
