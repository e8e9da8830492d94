"""Write a checkpoint beside training: a copy of the state, one thread per rank, no collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

import torch
from torch import Tensor

from camshaft.checkpoint.manifest import Manifest
from camshaft.checkpoint.places import Place
from camshaft.errors import CheckpointError

T = TypeVar("T")
_POLL_S = 0.02


class HostBuffers:
    """Host memory for one copy of this rank's state, reused from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._devices: set[torch.device] = set()

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy of ``tensor`` in host memory; from a GPU it is complete after ``synchronize``."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        return buffer

    def synchronize(self) -> None:
        """Wait until all copies are complete."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._devices.clear()


class Flight(Generic[T]):
    """Run ``act`` in a thread and keep its outcome until it is asked for."""

    def __init__(self, act: Callable[[threading.Event], T]) -> None:
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._results: list[T] = []
        # A daemon: after a crash elsewhere the process must be able to end. `Store.wait` is the way to keep the write.
        self._thread = threading.Thread(target=self._run, args=(act,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def result(self) -> T:
        """Wait for the end, then return what ``act`` returned or raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def abandon(self, grace_s: float) -> None:
        """Give it ``grace_s`` to end, then tell it to wait for no one."""
        self._thread.join(grace_s)
        self._stop.set()

    def _run(self, act: Callable[[threading.Event], T]) -> None:
        try:
            self._results.append(act(self._stop))
        except Exception as error:  # noqa: BLE001, kept for `result`
            self._error = error


def leave_record(place: Place, folder: str, rank: int, part: Manifest) -> None:
    """Tell the main process that ``rank`` is done, by a file in ``folder``."""
    place.put(_record(folder, rank), part.encode())


def collect_records(
    place: Place, folder: str, ranks: Collection[int], *, stop: threading.Event, patience_s: float
) -> list[Manifest]:
    """Wait for the records of ``ranks``, delete them and return their content.

    Raises:
        CheckpointError: a rank recorded an error, or did not answer within ``patience_s``.
    """
    parts: dict[int, Manifest] = {}
    deadline = time.monotonic() + patience_s
    while len(parts) < len(ranks):
        for rank in ranks:
            name = _record(folder, rank)
            if rank not in parts and place.size(name) is not None:
                parts[rank] = Manifest.decode(place.read(name), where=name)
                place.drop(name)
                if error := parts[rank].meta.get("error"):
                    raise CheckpointError(f"Rank {rank} failed at a checkpoint: {error}")
        missing = sorted(set(ranks) - parts.keys())
        if missing and (stop.wait(_POLL_S) or time.monotonic() > deadline):
            raise CheckpointError(
                f"Ranks {missing} did not finish writing {place.location(folder)}.",
                why="Without their parts the checkpoint is incomplete and was not committed.",
                fix="Look for their failure; the checkpoint before stands.",
            )
    return [parts[rank] for rank in sorted(parts)]


def _record(folder: str, rank: int) -> str:
    return f"{folder}/done-{rank + 1:05d}.json"
