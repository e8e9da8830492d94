"""Seed the global random streams of a process, and keep data that draws from them apart from the model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch

HostStreams: TypeAlias = tuple[Any, Any, torch.Tensor]


def seed_streams(seed: int) -> None:
    """Seed the global streams of python, numpy and torch (all devices) of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global stream is what user code draws from
    torch.manual_seed(seed)


class OwnStreams:
    """Host streams that only some code draws from: the global ones are lent to it, and put back after.

    Two of the same seed give the same numbers, on every rank and in a resumed run, whatever the model
    draws in between. Streams of devices are left alone.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: HostStreams | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from these streams inside the context, on from where the last one ended."""
        outer = _read()
        if self._own is None:
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)  # noqa: NPY002
            torch.default_generator.manual_seed(self._seed)
        else:
            _write(self._own)
        try:
            yield
        finally:
            self._own = _read()
            _write(outer)

    @property
    def state(self) -> HostStreams | None:
        """Where these streams stand; None when nothing was drawn yet. It is never changed in place."""
        return self._own

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a state that was made JSON."""
        version, internal, gauss = saved["python"]
        kind, keys, *rest = saved["numpy"]
        torch_state = torch.frombuffer(bytearray.fromhex(saved["torch"]), dtype=torch.uint8)
        self._own = ((version, tuple(internal), gauss), (kind, np.array(keys, dtype=np.uint32), *rest), torch_state)

    def draw(self, values: Iterator[Any]) -> Iterator[Any]:
        """Yield ``values``, each made with these streams."""
        while True:
            with self.active():
                try:
                    value = next(values)
                except StopIteration:
                    return
            yield value


def list_sampler(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """Let a user's own sampler draw its epoch, from (seed, epoch) and not from the global streams."""
    reseed(sampler, seed, epoch)
    with OwnStreams(seed).active():
        return list(sampler)


def reseed(loader: Any, seed: int, epoch: int) -> None:
    """Tell a loader and its parts the epoch, and seed the generators of their own."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, batch_sampler, getattr(loader, "sampler", None), getattr(loader, "dataset", None)]
    owners = {id(owner): owner for owner in [*parts, getattr(batch_sampler, "sampler", None)]}
    for owner in owners.values():
        set_epoch: Callable[[int], None] | None = getattr(owner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)


def streams_to_json(state: HostStreams) -> dict[str, Any]:
    """Return the state of host streams as plain JSON data."""
    (version, internal, gauss), (kind, keys, *rest), torch_state = state
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tolist(), *rest],
        "torch": torch_state.numpy().tobytes().hex(),
    }


def _read() -> HostStreams:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def _write(streams: HostStreams) -> None:
    random.setstate(streams[0])
    np.random.set_state(streams[1])  # noqa: NPY002
    torch.set_rng_state(streams[2])
