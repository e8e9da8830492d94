"""Tell a whole checkpoint from one that is incomplete or damaged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from camshaft.checkpoint.manifest import MANIFEST, Manifest
from camshaft.checkpoint.places import Location, Place
from camshaft.errors import CheckpointError

Check: TypeAlias = Literal["quick", "full"]
"""How well to look: ``quick`` reads the manifest and compares sizes, ``full`` also hashes every byte."""

_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that was not used, and why, in a sentence."""

    path: Location
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """A valid checkpoint, and newer ones that were passed over for it."""

    path: Location
    manifest: Manifest
    passed_over: tuple[PassedOver, ...] = ()


def read_manifest(place: Place, folder: str) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    where = str(place.location(f"{folder}/{MANIFEST}"))
    try:
        raw = place.read(f"{folder}/{MANIFEST}")
    except OSError as error:
        raise CheckpointError(
            f"{where} cannot be read ({type(error).__name__}).",
            why="It is written last, so a directory without it was never completed, or is no checkpoint.",
            fix="Give a directory that has one, or use resume: auto.",
        ) from error
    return Manifest.decode(raw, where=where)


def size_problems(place: Place, folder: str, manifest: Manifest) -> list[str]:
    """Return a sentence for each file that is missing or has another size."""
    problems = []
    for name, record in manifest.files.items():
        size = place.size(f"{folder}/{name}")
        if size is None:
            problems.append(f"{name} is missing.")
        elif size != record.size:
            problems.append(f"{name} has {size} bytes instead of {record.size}.")
    return problems


def hash_problems(place: Place, folder: str, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Return a sentence for each of the files ``names`` whose content changed."""
    problems = []
    for name in names:
        try:
            digest = _digest(place, f"{folder}/{name}")
        except OSError as error:
            problems.append(f"{name} cannot be read ({error}).")
            continue
        if digest != manifest.files[name].sha256:
            problems.append(f"{name} was changed after it was written: its sha256 differs from the manifest's.")
    return problems


def require_valid(place: Place, folder: str, check: Check) -> Manifest:
    """Return the manifest of a checkpoint that passes ``check``.

    Raises:
        CheckpointError: it does not; every file at fault is named.
    """
    manifest = read_manifest(place, folder)
    problems = size_problems(place, folder, manifest)
    if check == "full" and not problems:
        problems = hash_problems(place, folder, manifest, manifest.files)
    if problems:
        raise CheckpointError(
            f"{place.location(folder)} is damaged: {' '.join(problems)}",
            why="A run resumed from it would not be the run that was saved.",
            fix="Use another checkpoint; resume: auto finds the newest valid one.",
        )
    return manifest


def _digest(place: Place, name: str) -> str:
    digest, buffer, start = hashlib.sha256(), memoryview(bytearray(_BLOCK)), 0
    source = place.open(name)
    try:
        while count := source.read_into(start, buffer):
            digest.update(buffer[:count])
            start += count
    finally:
        source.close()
    return digest.hexdigest()
