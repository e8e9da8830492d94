"""Lay tensors out as safetensors files, and find them there again.

The layout is public (https://huggingface.co/docs/safetensors): eight bytes of header length, a JSON
header, the bytes. It is written here, not by the library, so that a file can be streamed, hashed
while it is written, and read in parts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from camshaft.errors import CheckpointError

_CODES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# Dtypes without a code every reader knows are stored as what they are made of; the manifest has the true one.
_STORED_AS: dict[torch.dtype, torch.dtype] = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_CODES, *_STORED_AS)}
_MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor's bytes lie in a file."""

    code: str
    shape: tuple[int, ...]
    start: int
    end: int


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return the name the manifest has for ``dtype``.

    Raises:
        CheckpointError: tensors of that dtype cannot be saved; ``name`` is the tensor's.
    """
    short = str(dtype).removeprefix("torch.")
    if short not in _DTYPES:
        raise CheckpointError(
            f"Tensor {name!r} has dtype {short}, which cannot be saved.",
            why="The file format has no place for it.",
            fix=f"Convert it to one of {', '.join(_DTYPES)}.",
        )
    return short


def dtype_of(short: str) -> torch.dtype:
    """Return the dtype that ``dtype_name`` named."""
    if short not in _DTYPES:
        raise CheckpointError(
            f"The checkpoint has a tensor of dtype {short!r}, which this version does not know.",
            fix="Read it with the version of camshaft that wrote it, or a newer one.",
        )
    return _DTYPES[short]


def header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return the start of a file that holds ``tensors`` (key, dtype, shape), in that order, without gaps."""
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for key, dtype, shape in tensors:
        stored = _STORED_AS.get(dtype, dtype)
        shape = (*shape, 2) if dtype.is_complex else shape  # noqa: PLW2901
        size = math.prod(shape) * stored.itemsize
        table[key] = {"dtype": _CODES[stored], "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_length(start: bytes, *, where: str, size: int) -> int:
    """Return how many bytes the header of a file of ``size`` bytes takes, given its first eight."""
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
        raise _damaged(where, "its header length is impossible")
    return length


def parse_header(text: bytes, *, where: str, size: int) -> dict[str, Slot]:
    """Return each tensor's slot, with positions counted from the start of the file of ``size`` bytes."""
    try:
        table = json.loads(text.decode())
        slots = {key: _slot(record, 8 + len(text)) for key, record in table.items() if key != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(where, f"its header cannot be read ({error})") from error
    for key, slot in slots.items():
        if not 8 + len(text) <= slot.start <= slot.end <= size:
            raise _damaged(where, f"{key!r} lies outside it")
    return slots


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of ``tensor``, copied only when it is not contiguous or not in host memory."""
    host = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if host.numel() == 0:
        return memoryview(b"")
    return host.reshape(-1).view(torch.uint8).numpy().data


def _slot(record: Mapping[str, object], base: int) -> Slot:
    shape, offsets, code = record["shape"], record["data_offsets"], record["dtype"]
    if not (isinstance(shape, list) and isinstance(offsets, list) and isinstance(code, str)):
        raise TypeError("wrong kind of entry")
    start, end = offsets
    if not all(isinstance(number, int) and number >= 0 for number in (start, end, *shape)):
        raise ValueError("a size is not a count")
    return Slot(code, tuple(shape), base + start, base + end)


def _damaged(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is damaged: {why}.", why="Its tensors cannot be trusted.", fix="Use another checkpoint."
    )
