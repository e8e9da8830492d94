"""Keep checkpoints wherever fsspec reaches: ``s3://``, ``gs://``, ``hf://``, ``memory://``."""

from __future__ import annotations

import contextlib
import json
import time
from typing import BinaryIO

from typing_extensions import override

from camshaft.checkpoint.manifest import MANIFEST
from camshaft.checkpoint.places import Place, Sink, Source
from camshaft.errors import CheckpointError

_MARK = "writing.json"
_STALE_S = 24 * 3600.0


class _RemoteSink:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: memoryview) -> None:
        self._file.write(data)

    def close(self) -> None:
        self._file.close()


class _RemoteSource:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read_into(self, start: int, buffer: memoryview) -> int:
        self._file.seek(start)
        done = 0
        while done < len(buffer):
            data = self._file.read(len(buffer) - done)
            if not data:
                break
            buffer[done : done + len(data)] = data
            done += len(data)
        return done

    def close(self) -> None:
        self._file.close()


class RemotePlace(Place):
    """A prefix in an object store, which has no rename: a checkpoint counts once its manifest is there.

    There is no lock: give every run a prefix of its own. What a dead run left half-written is passed
    over at once, and deleted when it is a day old.
    """

    def __init__(self, root: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise CheckpointError(
                f"{root} needs fsspec, which is not installed.",
                fix="Install fsspec and its package for that protocol, such as s3fs, or use a local directory.",
            ) from error
        try:
            self._fs, path = url_to_fs(root)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{root} cannot be reached: {error}.", fix="Install the package it names.") from error
        self._path = str(path).rstrip("/")
        self._root = root.rstrip("/")

    @override
    def location(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @override
    def names(self, folder: str = "") -> list[str]:
        self._fs.invalidate_cache()
        try:
            return sorted(
                str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._at(folder), detail=False)
            )
        except (FileNotFoundError, NotADirectoryError):
            return []

    @override
    def size(self, name: str) -> int | None:
        try:
            info = self._fs.info(self._at(name))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    @override
    def read(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(self._at(name)))

    @override
    def put(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._at(name), data)

    @override
    def drop(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))

    @override
    def create(self, name: str) -> Sink:
        return _RemoteSink(self._fs.open(self._at(name), "wb"))

    @override
    def open(self, name: str) -> Source:
        return _RemoteSource(self._fs.open(self._at(name), "rb"))

    @override
    def begin(self, final: str) -> str:
        self._fs.makedirs(self._at(final), exist_ok=True)
        self.put(f"{final}/{_MARK}", json.dumps({"since": time.time()}).encode())
        return final

    @override
    def commit(self, folder: str, final: str, name: str, manifest: bytes) -> None:
        self.put(f"{final}/{name}", manifest)
        self.drop(f"{final}/{_MARK}")

    @override
    def discard(self, folder: str) -> None:
        self.drop(f"{folder}/{MANIFEST}")
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._at(folder), recursive=True)

    @override
    def sweep(self) -> None:
        for folder in self.names():
            if self.size(f"{folder}/{_MARK}") is None:
                continue
            if self.size(f"{folder}/{MANIFEST}") is not None:
                self.drop(f"{folder}/{_MARK}")
            elif time.time() - float(json.loads(self.read(f"{folder}/{_MARK}"))["since"]) > _STALE_S:
                self.discard(folder)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path
