"""Write a digest of everything that decides a run's future, step by step: what proves that a resume is exact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from camshaft.callback import Callback
from camshaft.checkpoint.capture import capture_streams, stream_tensors
from camshaft.errors import CallbackError

if TYPE_CHECKING:
    from camshaft.state import Batch, State


_START = b'{"step": '


class Digest(Callback):
    """Append one JSON line a step to ``path`` (and the rank, when there are several).

    A line holds hashes of this rank's weights, optimizer state, random streams and the samples of the
    step. Two runs are the same where their lines are. Reading the device each step is the price.
    """

    needs_host_sync = True

    def __init__(self, path: str) -> None:
        self.path = path
        self._samples = ""

    def on_fit_start(self, state: State) -> None:
        """Refuse to write into a file that holds something else."""
        path = self._file(state)
        if not path.parent.is_dir():
            raise CallbackError(
                f"callbacks.{self.name}.path is {str(path)!r}, and there is no directory {path.parent}.",
                fix="Make it, or give another path.",
            )
        if path.is_dir() or (path.is_file() and not _is_own(path)):
            raise CallbackError(
                f"callbacks.{self.name}.path is {str(path)!r}, which holds something else than digests.",
                why="Lines would be added to it.",
                fix="Give the name of a new file.",
            )

    def on_step_start(self, state: State, window: list[Batch]) -> None:
        """Hash the samples in hand."""
        self._samples = _hash(_tensors(window))

    def on_step(self, state: State) -> None:
        """Write the step's line; flushed, so that a kill loses at most the line being written."""
        strategy = state.strategy
        optimizer = [tensor for _, _, _, tensor in strategy.optimizer_tensors()]
        scalars = json.dumps(strategy.optimizer_data(), sort_keys=True, default=str)
        streams = json.dumps(capture_streams(), sort_keys=True)
        line = {
            "step": state.progress.step,
            "samples": self._samples,
            "weights": _hash([*(tensor for _, tensor in strategy.named_local()), *state.module.buffers()]),
            "optimizer": _hash((strategy.local(tensor) for tensor in optimizer), scalars),
            "streams": _hash(stream_tensors().values(), streams),
        }
        with self._file(state).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _file(self, state: State) -> Path:
        strategy = state.strategy
        return Path(self.path if strategy.world_size == 1 else f"{self.path}.{strategy.rank}")


def _is_own(path: Path) -> bool:
    """Say whether a file is empty or begins as this callback writes; a kill may have cut its only line."""
    with path.open("rb") as file:
        start = file.read(len(_START))
    return _START.startswith(start)


def _hash(tensors: Iterable[Tensor], text: str = "") -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
