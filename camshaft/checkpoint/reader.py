"""Read a checkpoint of any strategy and world size, whole or in any parts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from camshaft.checkpoint import checking, formats, layout, values
from camshaft.checkpoint.entries import Json
from camshaft.checkpoint.manifest import Piece, TensorRecord
from camshaft.checkpoint.places import Location, Source, split_location
from camshaft.checkpoint.planning import STATE, rank_file, rank_prefix
from camshaft.errors import CheckpointError

_CHUNK = 32 << 20


@dataclass(frozen=True, slots=True)
class Spec:
    """What a tensor is."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Reader:
    """Open one checkpoint. Any process may, alone; nothing is communicated and no code in it is run.

    Tensors are read when asked for, into host memory: what is asked, plus at most 32 MiB or one row.

    Raises:
        CheckpointError: the checkpoint does not pass ``check``; the files at fault are named.
    """

    def __init__(self, path: Location, *, check: checking.Check = "quick") -> None:
        self.path = path
        self._place, self._folder = split_location(path)
        self.manifest = checking.require_valid(self._place, self._folder, check)
        self._files: dict[str, tuple[Source, dict[str, formats.Slot]]] = {}
        self._jsons: dict[str, dict[str, Json]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        for source, _ in self._files.values():
            source.close()
        self._files.clear()

    def names(self, group: str | None = None) -> list[str]:
        """Return the names of all tensors, or of those in ``group``, as ``group/name``."""
        groups = ((name, name.partition("/")[0]) for name in self.manifest.tensors)
        return [name for name, own in groups if (own == group if group is not None else not own.startswith("rank-"))]

    def spec(self, name: str) -> Spec:
        """Return the global shape and the dtype of a tensor."""
        record = self._record(name)
        return Spec(record.shape, formats.dtype_of(record.dtype))

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor."""
        shape = self._record(name).shape
        return self.read(name, (0,) * len(shape), shape)

    def read(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the box of ``shape`` at ``offsets``."""
        spec = self.spec(name)
        self._require_inside(name, spec, offsets, shape)
        out = torch.empty(tuple(shape), dtype=spec.dtype)
        if out.numel():
            for piece in self._record(name).pieces:
                self._copy(piece, spec, out, (tuple(offsets), tuple(shape)))
        return out

    def read_flat(self, name: str, start: int, length: int) -> Tensor:
        """Return ``length`` elements of the flattened tensor, from ``start``, as a 1-D tensor."""
        spec = self.spec(name)
        self._require_inside(name, Spec((math.prod(spec.shape),), spec.dtype), (start,), (length,))
        out = torch.empty(length, dtype=spec.dtype)
        done = 0
        for offsets, shape in layout.flat_boxes(spec.shape, start, length):
            part = out[done : done + math.prod(shape)].view(shape)
            for piece in self._record(name).pieces:
                self._copy(piece, spec, part, (offsets, shape))
            done += part.numel()
        return out

    def data(self, name: str) -> Json:
        """Return a value of ``Entries.data``."""
        known = self._json(STATE)
        if name not in known:
            raise self._unknown("value", name, list(known))
        return known[name]

    def data_names(self) -> list[str]:
        """Return the names of all values of ``Entries.data``."""
        return list(self._json(STATE))

    def rank_data(self, name: str, rank: int) -> Json:
        """Return what ``rank`` kept in ``Entries.rank_data``; None when that rank did not exist or kept nothing."""
        file = rank_file(rank, "json")
        return self._json(file).get(name) if file in self.manifest.files else None

    def rank_tensors(self, rank: int) -> dict[str, Tensor]:
        """Return what ``rank`` kept in ``Entries.rank_tensors``; empty when that rank did not exist."""
        prefix = rank_prefix(rank)
        return {n.removeprefix(prefix): self.tensor(n) for n in self.manifest.tensors if n.startswith(prefix)}

    def _copy(self, piece: Piece, spec: Spec, out: Tensor, box: layout.Box) -> None:
        """Copy into ``out``, which is ``box`` of the tensor, what ``piece`` has of it."""
        slot = self._file(piece.file)[1].get(piece.key)
        if slot is None or slot.end - slot.start != math.prod(piece.shape) * spec.dtype.itemsize:
            where = self._place.location(f"{self._folder}/{piece.file}")
            raise CheckpointError(
                f"{where} does not hold {piece.key!r} as the manifest says.",
                why="The file is damaged.",
                fix="Use another checkpoint.",
            )
        if piece.offsets is not None:
            self._copy_box(piece, slot, out, box)
        else:
            self._copy_range(piece, slot, spec.shape, out, box)

    def _copy_box(self, piece: Piece, slot: formats.Slot, out: Tensor, box: layout.Box) -> None:
        common = layout.intersect((piece.offsets or (), piece.shape), box)
        if common is None:
            return
        starts, sizes = common
        target = out[_slices(starts, box[0], sizes)]
        if not starts:
            self._fill(piece.file, slot.start, target)
            return
        inside = [start - offset for start, offset in zip(starts, piece.offsets or (), strict=True)]
        row = math.prod(piece.shape[1:])
        if sizes[1:] == piece.shape[1:] and target.is_contiguous():
            self._fill(piece.file, slot.start + inside[0] * row * out.itemsize, target)
            return
        step = max(1, _CHUNK // (row * out.itemsize))
        inner = tuple(slice(start, start + size) for start, size in zip(inside[1:], sizes[1:], strict=True))
        for first in range(0, sizes[0], step):
            rows = torch.empty((min(step, sizes[0] - first), *piece.shape[1:]), dtype=out.dtype)
            self._fill(piece.file, slot.start + (inside[0] + first) * row * out.itemsize, rows)
            target[first : first + rows.shape[0]].copy_(rows[(slice(None), *inner)])

    def _copy_range(
        self, piece: Piece, slot: formats.Slot, whole: tuple[int, ...], out: Tensor, box: layout.Box
    ) -> None:
        begin = piece.flat_start or 0
        low, high = layout.flat_bounds(whole, box)
        low, high = max(low, begin), min(high, begin + piece.shape[0])
        step = max(1, _CHUNK // out.itemsize)
        for start in range(low, high, step):
            chunk = torch.empty(min(step, high - start), dtype=out.dtype)
            self._fill(piece.file, slot.start + (start - begin) * out.itemsize, chunk)
            layout.copy_flat(out, whole, box[0], chunk, start)

    def _fill(self, file: str, start: int, out: Tensor) -> None:
        if out.numel() == 0:
            return
        buffer = out.view(-1).view(torch.uint8).numpy().data
        if self._file(file)[0].read_into(start, buffer) != len(buffer):
            raise CheckpointError(
                f"{self._place.location(f'{self._folder}/{file}')} ended while it was read.",
                why="It was changed or deleted.",
                fix="Use another checkpoint.",
            )

    def _file(self, name: str) -> tuple[Source, dict[str, formats.Slot]]:
        if name not in self._files:
            path = f"{self._folder}/{name}"
            where, size = str(self._place.location(path)), self.manifest.files[name].size
            source = self._place.open(path)
            start = bytearray(8)
            source.read_into(0, memoryview(start))
            text = bytearray(formats.header_length(bytes(start), where=where, size=size))
            source.read_into(8, memoryview(text))
            self._files[name] = source, formats.parse_header(bytes(text), where=where, size=size)
        return self._files[name]

    def _json(self, name: str) -> dict[str, Json]:
        if name not in self._jsons:
            path = f"{self._folder}/{name}"
            self._jsons[name] = values.decode(self._place.read(path), where=str(self._place.location(path)))
        return self._jsons[name]

    def _record(self, name: str) -> TensorRecord:
        record = self.manifest.tensors.get(name)
        if record is None:
            raise self._unknown("tensor", name, list(self.manifest.tensors))
        return record

    def _unknown(self, kind: str, name: str, known: list[str]) -> CheckpointError:
        near = difflib.get_close_matches(name, known, 1)
        fix = f"Did you mean {near[0]!r}?" if near else f"It has {len(known)} others, such as {known[:3]}."
        return CheckpointError(f"{self.path} has no {kind} {name!r}.", fix=fix)

    def _require_inside(self, name: str, spec: Spec, offsets: Sequence[int], shape: Sequence[int]) -> None:
        if len(offsets) == len(shape) == len(spec.shape) and all(
            start >= 0 and size >= 0 and start + size <= whole
            for start, size, whole in zip(offsets, shape, spec.shape, strict=True)
        ):
            return
        raise CheckpointError(
            f"{self.path}: a part of shape {tuple(shape)} at {tuple(offsets)} does not lie inside "
            f"{name!r} of shape {spec.shape}.",
            fix="Ask for a part of the tensor as it was saved, or change its shape before training.",
        )


def _slices(starts: Sequence[int], base: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - b, a - b + size) for a, b, size in zip(starts, base, sizes, strict=True))
