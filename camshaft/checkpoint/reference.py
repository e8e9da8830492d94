"""Leave frozen base weights out of checkpoints, and check on resume that the base is the one that was left out."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from camshaft.errors import CheckpointError

if TYPE_CHECKING:
    from camshaft.checkpoint.reader import Reader
    from camshaft.state import Checkpoint

_KEY = "left_out"


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 over names, shapes, dtypes and bytes, whatever the order."""
    running = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        running.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        running.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return running.hexdigest()


def leave_out(checkpoint: Checkpoint, names: Iterable[str], *, owner: str, base: str, digest: str) -> None:
    """Drop the weights of these names from a checkpoint that is being filled, and put a reference in their place.

    Every rank calls this with the same names. ``owner`` is the callback that keeps them as they are, ``base``
    says in words where they come from.
    """
    kept = sorted(names)
    for name in kept:
        checkpoint.tensors.pop(f"model/{name}", None)
    checkpoint.data.setdefault(_KEY, {})[owner] = {"names": kept, "base": base, "digest": digest}


def left_out(reader: Reader) -> Collection[str]:
    """Return the names of the weights that a checkpoint leaves to the module that is built."""
    if _KEY not in reader.data_names():
        return ()
    entries: Any = reader.data(_KEY)
    return {name for entry in entries.values() for name in entry["names"]}


def require_base(checkpoint: Checkpoint, *, owner: str, digest: str) -> None:
    """Refuse a base that is not the one a checkpoint refers to.

    Raises:
        CheckpointError: the weights that it left out are others here.
    """
    saved = checkpoint.data.get(_KEY, {}).get(owner)
    if saved is not None and saved["digest"] != digest:
        raise CheckpointError(
            f"callbacks.{owner} froze the weights of {saved['base']}, and those of this run are others "
            f"({digest[:12]} instead of {saved['digest'][:12]}).",
            why="What was trained belongs to those weights, which the checkpoint refers to and does not hold.",
            fix="Build the module from the same pretrained weights, or from the same seed.",
        )
