"""Reach the files of a directory, and make a finished checkpoint appear in it at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeAlias

from typing_extensions import override

from camshaft.errors import CheckpointError

Location: TypeAlias = Path | str
"""Where a checkpoint is: a ``Path`` on a file system, a ``str`` with ``://`` elsewhere."""

TMP = ".tmp-"
TRASH = ".trash-"


class Sink(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview) -> None:
        """Append all of ``data``."""

    def close(self) -> None:
        """End the file; its content is durable when this returns."""


class Source(Protocol):
    """A file that is being read, at any position."""

    def read_into(self, start: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from position ``start``; return how many bytes there were."""

    def close(self) -> None:
        """Let go of the file."""


class Place(Protocol):
    """A directory of checkpoints. File names are relative to it, with '/' between parts."""

    def location(self, name: str) -> Location:
        """Return what a user calls ``name``."""

    def names(self, folder: str = "") -> list[str]:
        """Return the names directly inside ``folder``; none when it does not exist."""

    def size(self, name: str) -> int | None:
        """Return the size of a file, or None when there is none."""

    def read(self, name: str) -> bytes:
        """Return a small file's content."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small file so that it is there whole or not at all, and durable."""

    def drop(self, name: str) -> None:
        """Delete a file if it exists."""

    def create(self, name: str) -> Sink:
        """Begin a file that must not exist."""

    def open(self, name: str) -> Source:
        """Open a file for reading."""

    def begin(self, final: str) -> str:
        """Make the folder in which the checkpoint ``final`` is prepared, and return its name."""

    def commit(self, folder: str, final: str, name: str, manifest: bytes) -> None:
        """Write the manifest as ``name``, the last file, and make the folder visible as ``final``, durably."""

    def discard(self, folder: str) -> None:
        """Delete a folder so that it never looks like a whole checkpoint on the way."""

    def sweep(self) -> None:
        """Delete what dead processes left behind. Only the holder of the directory's lock may."""


class _FileSink:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class _FileSource:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY)

    def read_into(self, start: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], start + done)
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class LocalPlace(Place):
    """A directory on a file system that all ranks share."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @override
    def location(self, name: str) -> Path:
        return self.root / name

    @override
    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(path.name for path in (self.root / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    @override
    def size(self, name: str) -> int | None:
        path = self.root / name
        return path.stat().st_size if path.is_file() else None

    @override
    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    @override
    def put(self, name: str, data: bytes) -> None:
        path = self.root / name
        draft = path.with_name(f"{TMP}{path.name}-{uuid.uuid4().hex[:8]}")
        try:
            _write_durably(draft, data)
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)

    @override
    def drop(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    @override
    def create(self, name: str) -> Sink:
        return _FileSink(self.root / name)

    @override
    def open(self, name: str) -> Source:
        return _FileSource(self.root / name)

    @override
    def begin(self, final: str) -> str:
        # Not parents=True: a run directory that vanished must not be made anew on whatever lies below its mount.
        folder = f"{TMP}{final}-{uuid.uuid4().hex[:8]}"
        (self.root / folder).mkdir()
        return folder

    @override
    def commit(self, folder: str, final: str, name: str, manifest: bytes) -> None:
        _write_durably(self.root / folder / name, manifest)
        sync_folder(self.root / folder)
        (self.root / folder).rename(self.root / final)
        sync_folder(self.root)

    @override
    def discard(self, folder: str) -> None:
        path = self.root / folder
        if not folder.startswith((TMP, TRASH)):
            trash = self.root / f"{TRASH}{folder}-{uuid.uuid4().hex[:8]}"
            path.rename(trash)
            sync_folder(self.root)
            path = trash
        shutil.rmtree(path, ignore_errors=True)

    @override
    def sweep(self) -> None:
        for path in self.root.iterdir():
            if path.name.startswith((TMP, TRASH)):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def place_of(directory: Location) -> Place:
    """Return the place for ``directory``; one with ``://`` needs fsspec and its package for that protocol."""
    if "://" in str(directory):
        from camshaft.checkpoint.remote import RemotePlace

        return RemotePlace(str(directory))
    return LocalPlace(Path(directory))


def split_location(location: Location) -> tuple[Place, str]:
    """Return the directory a checkpoint is in, as a place, and the checkpoint's name there."""
    if "://" in str(location):
        parent, _, name = str(location).rstrip("/").rpartition("/")
        return place_of(parent), name
    path = Path(os.path.abspath(location))  # noqa: PTH100, resolve() would follow a link that the user put there
    return place_of(path.parent), path.name


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turn an ``OSError`` into a ``CheckpointError`` that says what was being done."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{what} failed: {error}.",
            why="Checkpoints committed before are untouched.",
            fix="Check that the disk has room and the directory still exists and can be written.",
        ) from error


def sync_folder(path: Path) -> None:
    """Make renames in and into a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems refuse to sync a directory; there renames are durable or nobody's to fix.
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def _write_durably(path: Path, data: bytes) -> None:
    sink = _FileSink(path)
    try:
        sink.write(memoryview(data))
    finally:
        sink.close()
