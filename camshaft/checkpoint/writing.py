"""Write one rank's files, hashing and flushing in other threads while the next bytes are written."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from camshaft.checkpoint import formats
from camshaft.checkpoint.manifest import FileRecord
from camshaft.checkpoint.places import Place, Sink

_BLOCK = 8 << 20
_FLUSH_EVERY = 64 << 20
_PENDING = 8


@dataclass(frozen=True, slots=True)
class Draft:
    """A file to write: bytes, then tensors whose bytes are taken one at a time."""

    name: str
    start: bytes
    tensors: Sequence[Tensor] = ()


def write_drafts(place: Place, folder: str, drafts: Sequence[Draft]) -> dict[str, FileRecord]:
    """Write ``drafts`` into ``folder``, durably, and return what each file must be from now on.

    Of tensors that are not in host memory one at a time is copied there.
    """
    # sha256 is about as fast as the disk, and both release the interpreter: side by side they cost one of the two.
    with ThreadPoolExecutor(1, "hash") as hasher, ThreadPoolExecutor(1, "flush") as flusher:
        writing = _Writing(hasher, flusher)
        files = {draft.name: writing.write(place.create(f"{folder}/{draft.name}"), draft) for draft in drafts}
        return {name: FileRecord(size, digest.result()) for name, (size, digest) in files.items()}


class _Writing:
    def __init__(self, hasher: ThreadPoolExecutor, flusher: ThreadPoolExecutor) -> None:
        self._hasher = hasher
        self._flusher = flusher
        self._pending: deque[Future[None]] = deque()

    def write(self, sink: Sink, draft: Draft) -> tuple[int, Future[str]]:
        digest, size, unflushed = hashlib.sha256(), 0, 0
        flush: Future[None] | None = None
        try:
            for block in _blocks(draft):
                self._pending.append(self._hasher.submit(digest.update, block))
                sink.write(block)
                size += len(block)
                unflushed += len(block)
                if unflushed >= _FLUSH_EVERY and (flush is None or flush.done()):
                    if flush is not None:
                        flush.result()
                    flush, unflushed = self._flusher.submit(sink.flush), 0
                # Bounds the memory of blocks that were copied for this only.
                if len(self._pending) > _PENDING:
                    self._pending.popleft().result()
            if flush is not None:
                flush.result()
        finally:
            if flush is not None:
                flush.exception()
            sink.close()
        return size, self._hasher.submit(digest.hexdigest)


def _blocks(draft: Draft) -> Iterator[memoryview]:
    """Yield the file's bytes in blocks that are neither tiny nor huge."""
    small = bytearray(draft.start)
    for tensor in draft.tensors:
        data = formats.as_bytes(tensor)
        if len(data) < _BLOCK:
            small += data
            if len(small) >= _BLOCK:
                yield memoryview(small)
                small = bytearray()
            continue
        if small:
            yield memoryview(small)
            small = bytearray()
        for start in range(0, len(data), _BLOCK):
            yield data[start : start + _BLOCK]
    if small:
        yield memoryview(small)
