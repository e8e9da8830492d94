"""Relate parts of a tensor to each other: boxes, and ranges of the flattened tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from torch import Tensor

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape."""


def intersect(first: Box, second: Box) -> Box | None:
    """Return the box that both cover, or None."""
    starts, sizes = [], []
    for start_a, size_a, start_b, size_b in zip(*first, *second, strict=True):
        start = max(start_a, start_b)
        size = min(start_a + size_a, start_b + size_b) - start
        if size <= 0:
            return None
        starts.append(start)
        sizes.append(size)
    return tuple(starts), tuple(sizes)


def flat_boxes(shape: Sequence[int], start: int, length: int) -> Iterator[Box]:
    """Cut a range of the flattened tensor into boxes that are contiguous in it, in order.

    There are at most ``2 * len(shape) - 1`` of them.
    """
    if length <= 0:
        return
    if len(shape) <= 1:
        yield (((start,), (length,)) if shape else ((), ()))
        return
    row_size, end = math.prod(shape[1:]), start + length
    while start < end:
        row, within = divmod(start, row_size)
        rows = (end - start) // row_size
        if within == 0 and rows:
            yield (row, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
            start += rows * row_size
            continue
        count = min(end - start, row_size - within)
        for offsets, sizes in flat_boxes(shape[1:], within, count):
            yield (row, *offsets), (1, *sizes)
        start += count


def flat_bounds(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """Return the first position of a non-empty ``box`` in the flattened tensor, and the one after its last."""
    first = last = 0
    for size, offset, extent in zip(shape, *box, strict=True):
        first = first * size + offset
        last = last * size + offset + extent - 1
    return first, last + 1


def copy_flat(out: Tensor, shape: Sequence[int], offsets: Sequence[int], chunk: Tensor, start: int) -> None:
    """Copy into the box ``out``, at ``offsets`` of a tensor of ``shape``, what ``chunk`` has of it.

    ``chunk`` is the range of the flattened tensor that begins at ``start``.
    """
    if out.numel() == 0 or chunk.numel() == 0:
        return
    if not shape:
        out.copy_(chunk.view(()))
        return
    if len(shape) == 1:
        low = max(start, offsets[0])
        high = min(start + chunk.numel(), offsets[0] + out.shape[0])
        if low < high:
            out[low - offsets[0] : high - offsets[0]].copy_(chunk[low - start : high - start])
        return
    row_size, done = math.prod(shape[1:]), 0
    while done < chunk.numel():
        row, within = divmod(start + done, row_size)
        rows = (chunk.numel() - done) // row_size
        if within == 0 and rows:
            _copy_rows(out, offsets, chunk[done : done + rows * row_size].view(rows, *shape[1:]), row)
            done += rows * row_size
            continue
        count = min(chunk.numel() - done, row_size - within)
        if offsets[0] <= row < offsets[0] + out.shape[0]:
            copy_flat(out[row - offsets[0]], shape[1:], offsets[1:], chunk[done : done + count], within)
        done += count


def _copy_rows(out: Tensor, offsets: Sequence[int], block: Tensor, row: int) -> None:
    low = max(row, offsets[0])
    high = min(row + block.shape[0], offsets[0] + out.shape[0])
    if low >= high:
        return
    inner = tuple(slice(start, start + size) for start, size in zip(offsets[1:], out.shape[1:], strict=True))
    out[low - offsets[0] : high - offsets[0]].copy_(block[(slice(low - row, high - row), *inner)])
