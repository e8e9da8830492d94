"""Decide which files a rank writes, and how the ranks' pieces make whole tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from camshaft.checkpoint import formats, layout, values
from camshaft.checkpoint.entries import Entries, Shard, require_plain, split_name
from camshaft.checkpoint.manifest import Piece, TensorRecord
from camshaft.checkpoint.writing import Draft
from camshaft.errors import CheckpointError

STATE = "state.json"
_PAIRWISE = 64


@dataclass(slots=True)
class Plan:
    """One rank's part of a checkpoint, checked and laid out; nothing in it is written yet."""

    groups: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    records: dict[str, TensorRecord] = field(default_factory=dict)
    rank_tensors: dict[str, Tensor] = field(default_factory=dict)
    jsons: dict[str, bytes] = field(default_factory=dict)

    def snapshot(self, copy: Callable[[str, Tensor], Tensor]) -> None:
        """Replace every tensor by ``copy(name, tensor)``."""
        for group, tensors in self.groups.items():
            for key, tensor in tensors.items():
                tensors[key] = copy(f"{group}/{key}", tensor)
        for key, tensor in self.rank_tensors.items():
            self.rank_tensors[key] = copy(f"rank/{key}", tensor)

    def drafts(self, rank: int, world_size: int, spread: set[str]) -> list[Draft]:
        """Return the files to write; groups in ``spread`` have tensors on several ranks."""
        drafts = []
        for group, tensors in self.groups.items():
            name = file_name(group, rank, world_size, several=group in spread)
            drafts.append(_draft(name, tensors, self.tied.get(group, {})))
        if self.rank_tensors:
            drafts.append(_draft(rank_file(rank, "safetensors"), self.rank_tensors, {}))
        drafts += [Draft(name, data) for name, data in self.jsons.items()]
        return drafts

    def index(self, rank: int, world_size: int, spread: set[str]) -> dict[str, TensorRecord]:
        """Return this rank's pieces, with the names of the files they go to."""
        index = {}
        for name, record in self.records.items():
            group, _ = split_name(name)
            file = file_name(group, rank, world_size, several=group in spread)
            pieces = tuple(Piece(file, p.key, p.shape, p.offsets, p.flat_start) for p in record.pieces)
            index[name] = TensorRecord(record.shape, record.dtype, pieces)
        for key, tensor in self.rank_tensors.items():
            shape, dtype = tuple(tensor.shape), formats.dtype_name(key, tensor.dtype)
            piece = Piece(rank_file(rank, "safetensors"), key, shape, (0,) * len(shape))
            index[f"{rank_prefix(rank)}{key}"] = TensorRecord(shape, dtype, (piece,))
        return index


def make_plan(entries: Entries, *, rank: int, is_main: bool) -> Plan:
    """Check ``entries`` and lay them out.

    Raises:
        CheckpointError: an entry cannot be saved; it is named.
    """
    plan, seen = Plan(), dict[tuple[object, ...], str]()
    for name, entry in entries.tensors.items():
        _add(plan, seen, name, entry)
    for name, tensor in entries.rank_tensors.items():
        formats.dtype_name(name, tensor.dtype)
        plan.rank_tensors[name] = require_plain(name, tensor)
    if is_main:
        plan.jsons[STATE] = values.encode(entries.data, where="data")
    if entries.rank_data:
        plan.jsons[rank_file(rank, "json")] = values.encode(entries.rank_data, where=f"rank_data of rank {rank}")
    return plan


def file_name(group: str, rank: int, world_size: int, *, several: bool) -> str:
    """Return the name of the file in which a rank keeps a group."""
    return f"{group}-{rank + 1:05d}-of-{world_size:05d}.safetensors" if several else f"{group}.safetensors"


def rank_file(rank: int, ending: str) -> str:
    """Return the name of a file that every rank has one of."""
    return f"rank-{rank + 1:05d}.{ending}"


def rank_prefix(rank: int) -> str:
    """Return what the manifest puts before the names of a rank's own tensors; no group can be called so."""
    return f"rank-{rank + 1:05d}/"


def merge(indexes: Sequence[Mapping[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """Join the pieces of all ranks, and check that they make every tensor exactly once.

    Raises:
        CheckpointError: a tensor has gaps, is there twice, or its ranks disagree on what it is.
    """
    merged: dict[str, TensorRecord] = {}
    for rank, index in enumerate(indexes):
        for name, record in index.items():
            known = merged.get(name)
            if known is None:
                merged[name] = record
                continue
            if (known.shape, known.dtype) != (record.shape, record.dtype):
                raise CheckpointError(
                    f"Tensor {name!r} is {record.dtype} {record.shape} on rank {rank} "
                    f"but {known.dtype} {known.shape} on a rank before it.",
                    why="The parts cannot be of one tensor.",
                    fix="Give every shard the shape of the whole tensor, the same on all ranks.",
                )
            merged[name] = TensorRecord(known.shape, known.dtype, known.pieces + record.pieces)
    for name, record in merged.items():
        _check_cover(name, record)
    return merged


def _add(plan: Plan, seen: dict[tuple[object, ...], str], name: str, entry: Tensor | Shard) -> None:
    group, key = split_name(name)
    tensor = require_plain(name, entry.tensor if isinstance(entry, Shard) else entry)
    dtype, shape = formats.dtype_name(name, tensor.dtype), tuple(tensor.shape)
    if isinstance(entry, Shard):
        whole, offsets, flat_start = tuple(entry.shape), entry.offsets, entry.flat_start
    else:
        whole, offsets, flat_start = shape, (0,) * len(shape), None
    pieces: tuple[Piece, ...] = ()
    if tensor.numel() or not math.prod(whole):
        # Tied tensors are one storage under two names: written once, found under both.
        identity = (group, tensor.device, tensor.data_ptr(), shape, tensor.stride(), dtype)
        first = seen.setdefault(identity, key) if tensor.numel() else key
        if first == key:
            plan.groups.setdefault(group, {})[key] = tensor
        else:
            plan.tied.setdefault(group, {})[key] = first
        pieces = (Piece("", first, shape, offsets, flat_start),)
    plan.records[name] = TensorRecord(whole, dtype, pieces)


def _draft(name: str, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> Draft:
    # Wide elements first: every tensor then starts at a multiple of its element's size, as readers that map need.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    metadata = {"format": "pt", **{f"tied:{key}": first for key, first in tied.items()}}
    start = formats.header(((key, t.dtype, tuple(t.shape)) for key, t in ordered), metadata)
    return Draft(name, start, [tensor for _, tensor in ordered])


def _check_cover(name: str, record: TensorRecord) -> None:
    whole = math.prod(record.shape)
    covered = sum(math.prod(piece.shape) for piece in record.pieces)
    places = {(piece.offsets, piece.flat_start) for piece in record.pieces}
    twice = len(places) < len(record.pieces) or _overlaps(record.pieces)
    if covered != whole or (twice and whole):
        files = ", ".join(sorted({piece.file for piece in record.pieces}))
        raise CheckpointError(
            f"The pieces of tensor {name!r} hold {covered} of its {whole} elements"
            f"{', some of them twice' if twice else ''} (in {files or 'no file'}).",
            why="The tensor could not be put together again.",
            fix="Hand over every part on exactly one rank; of a replicated tensor, on the main process only.",
        )


def _overlaps(pieces: Sequence[Piece]) -> bool:
    boxes = [(piece.offsets, piece.shape) for piece in pieces if piece.offsets is not None]
    ranges = sorted((p.flat_start, p.shape[0]) for p in pieces if p.flat_start is not None)
    if any(start + size > after for (start, size), (after, _) in itertools.pairwise(ranges)):
        return True
    if len(boxes) > _PAIRWISE:  # pairs would be too many; equal volumes and distinct offsets were checked
        return False
    return any(layout.intersect(a, b) for index, a in enumerate(boxes) for b in boxes[:index])
