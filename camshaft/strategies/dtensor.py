"""Treat tensors that are sharded as DTensors by their local parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from camshaft.checkpoint.entries import Shard as Part


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory; a plain tensor is its own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def box_of(layout: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and the shape of this rank's part of a tensor laid out like ``layout``."""
    shape, offsets = compute_local_shape_and_global_offset(layout.shape, layout.device_mesh, layout.placements)
    # An empty part may be said to start behind the end.
    return tuple(min(o, s - n) for o, s, n in zip(offsets, layout.shape, shape, strict=True)), tuple(shape)


def layout_of(tensor: Tensor, parameter: Tensor | None) -> DTensor | None:
    """Return whose layout a tensor has: its own, its parameter's if it is as large as that one's part, or none."""
    if isinstance(tensor, DTensor):
        return tensor
    if isinstance(parameter, DTensor) and tensor.shape == parameter._local_tensor.shape:
        return parameter
    return None


def part_of(tensor: Tensor, layout: DTensor) -> Part | None:
    """Return what this rank saves of a tensor: its part, or None where another rank holds the same."""
    if not _is_first_copy(layout):
        return None
    offsets, _ = box_of(layout)
    return Part(local_of(tensor).detach(), shape=tuple(layout.shape), offsets=offsets)


def fill(tensor: Tensor, layout: DTensor, reader: Any, key: str) -> None:
    """Read this rank's part of a saved tensor into ``tensor``."""
    offsets, shape = box_of(layout)
    if torch.Size(shape).numel():
        local_of(tensor).copy_(reader.read(key, offsets, shape))


def total_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the L2 norm over all gradients and all ranks' parts of them, each element counted once.

    Gradients of one layout are summed locally and reduced together: one small reduction a layout.
    """
    groups: dict[tuple[Any, tuple[Placement, ...]], list[Tensor]] = {}
    for gradient in gradients:
        key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else (None, ())
        groups.setdefault(key, []).append(local_of(gradient))
    square = torch.zeros((), device=device)
    for (mesh, placements), parts in groups.items():
        norms = torch.stack([norm.to(device) for norm in torch._foreach_norm(parts, dtype=torch.float32)])
        own = norms.square().sum()
        for dim, placement in enumerate(placements):
            if not isinstance(placement, Replicate):
                dist.all_reduce(own, group=mesh.get_group(dim))
        square = square + own
    return square.sqrt()


def limit_norm(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their joint norm, which is ``norm``, is at most ``max_norm``."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    parts = [local_of(gradient) for gradient in gradients]
    if all(part.device == factor.device for part in parts):
        torch._foreach_mul_(parts, factor)
    else:
        for part in parts:
            part.mul_(factor.to(part.device))


def _is_first_copy(layout: DTensor) -> bool:
    coordinate = layout.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(c == 0 or isinstance(p, Shard) for c, p in zip(coordinate, layout.placements, strict=True))
