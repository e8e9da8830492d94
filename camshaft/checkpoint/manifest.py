"""Describe a checkpoint: the file that is written last and makes it whole."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from camshaft.checkpoint import values
from camshaft.checkpoint.entries import Json
from camshaft.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file must be."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor in a file: a box at ``offsets``, or, with ``flat_start``, a range of the flattened tensor."""

    file: str
    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None = None
    flat_start: int | None = None


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor's global shape, dtype and pieces."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a reader needs to know before it opens another file.

    ``serial`` counts the checkpoints of a directory in the order they were committed; it, not ``step``,
    says which is newest, since a run may go back and pass the same steps again.
    """

    step: int
    serial: int
    world_size: int
    strategy: str
    created: str
    parent: str | None = None
    meta: dict[str, Json] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether a run resumed from here equals one that never stopped (``meta["exact"]``, true by default)."""
        return self.meta.get("exact", True) is not False

    def encode(self) -> bytes:
        """Return the file's bytes, which carry their own digest."""
        body: dict[str, Json] = {
            "format": FORMAT,
            "step": self.step,
            "serial": self.serial,
            "world_size": self.world_size,
            "strategy": self.strategy,
            "created": self.created,
            "parent": self.parent,
            "meta": self.meta,
            "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in self.files.items()},
            "tensors": {name: _compact(record) for name, record in self.tensors.items()},
        }
        raw = values.encode(body, where=MANIFEST)
        return values.encode({**body, "digest": hashlib.sha256(raw).hexdigest()}, where=MANIFEST)

    @classmethod
    def decode(cls, raw: bytes, *, where: str) -> Manifest:
        """Return the manifest in ``raw``; any changed byte is an error.

        Raises:
            CheckpointError: it is damaged, or of a format this version does not read.
        """
        body = values.decode(raw, where=where)
        digest = body.pop("digest", None)
        again = values.encode(body, where=where)
        if hashlib.sha256(again).hexdigest() != digest or values.encode({**body, "digest": digest}, where=where) != raw:
            raise _damaged(where, "its digest does not match")
        if body.pop("format", None) != FORMAT:
            raise CheckpointError(
                f"{where} has a format other than {FORMAT}.",
                why="This version of camshaft would misread it.",
                fix="Read it with the version that wrote it.",
            )
        try:
            return cls._from(cast("dict[str, object]", body))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(where, f"an entry is missing or of the wrong kind ({error})") from error

    @classmethod
    def _from(cls, body: dict[str, object]) -> Manifest:
        files = cast("dict[str, dict[str, object]]", body.pop("files"))
        tensors = cast("dict[str, dict[str, object]]", body.pop("tensors"))
        for name in files:
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no plain file name")
        return cls(
            files={name: FileRecord(**record) for name, record in files.items()},  # type: ignore[arg-type]
            tensors={name: _record(record, files) for name, record in tensors.items()},
            **body,  # type: ignore[arg-type]
        )


def _compact(record: TensorRecord) -> dict[str, Json]:
    pieces: list[dict[str, Json]] = []
    for piece in record.pieces:
        place: dict[str, Json] = {"file": piece.file, "key": piece.key, "shape": list(piece.shape)}
        if piece.offsets is not None:
            place["offsets"] = list(piece.offsets)
        if piece.flat_start is not None:
            place["flat_start"] = piece.flat_start
        pieces.append(place)
    return {"shape": list(record.shape), "dtype": record.dtype, "pieces": pieces}


def _record(record: Mapping[str, object], files: Mapping[str, object]) -> TensorRecord:
    pieces = []
    for raw in cast("list[dict[str, object]]", record["pieces"]):
        offsets = raw.get("offsets")
        piece = Piece(
            file=str(raw["file"]),
            key=str(raw["key"]),
            shape=tuple(cast("list[int]", raw["shape"])),
            offsets=None if offsets is None else tuple(cast("list[int]", offsets)),
            flat_start=cast("int | None", raw.get("flat_start")),
        )
        if piece.file not in files:
            raise ValueError(f"{piece.file!r} is not among the files")
        pieces.append(piece)
    return TensorRecord(tuple(cast("list[int]", record["shape"])), str(record["dtype"]), tuple(pieces))


def _damaged(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is damaged: {why}.", why="What the checkpoint holds is unknown.", fix="Use another checkpoint."
    )
