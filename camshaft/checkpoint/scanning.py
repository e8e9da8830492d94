"""Look through a directory of checkpoints: the newest valid one, pointers, and what may be deleted."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from camshaft.checkpoint import values
from camshaft.checkpoint.checking import Found, PassedOver, read_manifest, size_problems
from camshaft.checkpoint.entries import Json
from camshaft.checkpoint.manifest import Manifest
from camshaft.checkpoint.places import Place
from camshaft.errors import CheckpointError

_NAME = re.compile(r"step_(\d{8,})(?:-[A-Za-z0-9_.-]+)?")
_TAG = re.compile(r"[A-Za-z0-9_.]+")
_POINTER = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A directory that looks like a checkpoint; ``why_not`` is empty when manifest and sizes are right."""

    name: str
    manifest: Manifest | None
    why_not: str = ""

    @property
    def age(self) -> tuple[int, int]:
        """Sort key, newest last. One without a readable manifest counts as newest: nobody knows."""
        if self.manifest is not None:
            return (0, self.manifest.serial)
        match = _NAME.fullmatch(self.name)
        return (1, int(match.group(1)) if match else 0)


def candidates(place: Place) -> list[Candidate]:
    """Return all checkpoints of a directory, newest first, looked at quickly."""
    found = []
    for name in place.names():
        if not _NAME.fullmatch(name):
            continue
        try:
            manifest = read_manifest(place, name)
        except CheckpointError as error:
            found.append(Candidate(name, None, error.what))
        else:
            found.append(Candidate(name, manifest, " ".join(size_problems(place, name, manifest))))
    return sorted(found, key=lambda candidate: candidate.age, reverse=True)


def new_name(place: Place, step: int, tag: str | None) -> str:
    """Return a name for a checkpoint of ``step`` that no other has, whole or not."""
    if tag is not None and not _TAG.fullmatch(tag):
        raise CheckpointError(
            f"{tag!r} cannot be a checkpoint's tag.",
            why="It becomes part of a directory's name.",
            fix="Use letters, digits, '_' and '.'.",
        )
    base, taken = f"step_{step:08d}{f'-{tag}' if tag else ''}", set(place.names())
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}-{count}"
    return name


def read_pointer(place: Place, pointer: str) -> str:
    """Return the name of the checkpoint that a pointer file names.

    Raises:
        CheckpointError: there is no such pointer, or it cannot be read.
    """
    try:
        target = values.decode(place.read(pointer), where=str(place.location(pointer))).get("checkpoint")
    except OSError as error:
        raise CheckpointError(
            f"{place.location(pointer)} does not exist.",
            why=f"No checkpoint of this directory was ever marked {pointer!r}.",
            fix="Give the path of a checkpoint, or use resume: auto.",
        ) from error
    if not isinstance(target, str) or not _NAME.fullmatch(target):
        raise CheckpointError(f"{place.location(pointer)} names no checkpoint: {target!r}.", fix="Give a path instead.")
    return target


def write_pointer(place: Place, pointer: str, target: str, meta: dict[str, Json]) -> None:
    """Make a small file ``pointer`` that names ``target``."""
    if not _POINTER.fullmatch(pointer) or _NAME.fullmatch(pointer):
        raise CheckpointError(f"{pointer!r} cannot be a pointer's name.", fix="Use a word such as 'best'.")
    place.put(pointer, values.encode({"checkpoint": target, "meta": meta}, where=pointer))


def pointed(place: Place) -> set[str]:
    """Return the names of the checkpoints that pointers name."""
    targets = set()
    for name in place.names():
        if _POINTER.fullmatch(name) and (place.size(name) or 0) > 0:
            try:
                targets.add(read_pointer(place, name))
            except CheckpointError:
                continue  # not a pointer, or a damaged one: it protects nothing
    return targets


def to_delete(
    found: Collection[Candidate], *, keep_last: int, keep: Collection[str], keep_every: int | None
) -> list[str]:
    """Return the names of what retention lets go, oldest first; never the newest whole one.

    Inexact checkpoints are not counted and go once a newer exact one exists; damaged ones likewise.
    """
    newest_first = sorted(found, key=lambda candidate: candidate.age, reverse=True)
    whole = [c for c in newest_first if c.manifest is not None and not c.why_not and c.manifest.exact]
    if not whole:
        return []
    kept = {c.name for c in whole[: max(1, keep_last)]} | set(keep)
    if keep_every:
        kept |= {c.name for c in whole if c.manifest is not None and c.manifest.step % keep_every == 0}
    newest = whole[0].age
    # A directory without a readable manifest has no known age. It is left to a person.
    return [c.name for c in reversed(newest_first) if c.name not in kept and c.manifest is not None and c.age < newest]


def passed_over(place: Place, candidate: Candidate, why: str) -> PassedOver:
    """Return the record of a checkpoint that was not used."""
    return PassedOver(place.location(candidate.name), why)


def found(place: Place, candidate: Candidate, skipped: list[PassedOver]) -> Found:
    """Return the record of the checkpoint that is used."""
    assert candidate.manifest is not None
    return Found(place.location(candidate.name), candidate.manifest, tuple(skipped))
