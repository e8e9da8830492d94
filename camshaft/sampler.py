"""Order the samples of an epoch as a function of (seed, epoch), from any position, without a list of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

_CHUNK = 8192
_ROUNDS = 6


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that is a fixed, well-mixed function of ``parts``; the same on every machine."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class Permutation:
    """A pseudo-random order of ``range(length)`` that is computed where it is read.

    Any slice costs time and memory of its own length only, so that an epoch of 10^7 samples starts,
    and resumes in its middle, at once.

    Source: a balanced Feistel network (Luby and Rackoff, 1988) on the smallest even number of bits
    that holds ``length``, walked until it falls inside the range (Black and Rogaway, 2002).
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        bits = max(2, (max(1, length - 1)).bit_length())
        self._half = np.uint64((bits + 1) // 2)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = np.array([derive_seed(seed, "order", i) for i in range(_ROUNDS)], dtype=np.uint64)

    def slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the entries from ``start`` to ``stop`` of the order, as int64."""
        values = self._network(np.arange(start, min(stop, self.length), dtype=np.uint64))
        while (outside := values >= self.length).any():
            values[outside] = self._network(values[outside])
        return values.astype(np.int64)

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64 bits. Source: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


class Order:
    """The order of one epoch: a permutation, the natural order, or a list that a user's sampler made."""

    def __init__(self, length: int, *, seed: int | None = None, listed: list[int] | None = None) -> None:
        self.length = length
        self._permutation = Permutation(length, seed) if seed is not None else None
        self._listed = listed

    def slice(self, start: int, stop: int) -> list[int]:
        """Return sample indices from position ``start`` to ``stop`` of the epoch."""
        if self._listed is not None:
            return self._listed[start:stop]
        if self._permutation is not None:
            picked: list[int] = self._permutation.slice(start, stop).tolist()
            return picked
        return list(range(start, min(stop, self.length)))


def shares(count: int, world_size: int) -> list[tuple[int, int]]:
    """Cut ``count`` samples into one contiguous share a rank, as even as possible: (start, stop) of each."""
    base, extra = divmod(count, world_size)
    stops = [(rank + 1) * base + min(rank + 1, extra) for rank in range(world_size)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


class RoundSampler(Sampler[list[int]]):
    """Yield this rank's indices for every round: one micro-batch on each rank at once.

    A round takes ``micro_batch * world_size`` samples in order and hands each rank a contiguous
    share. Only the last round may be short; its samples are spread evenly, and a rank left with none
    gets one sample to run with zero weight when ``pads`` is set, and no micro-batch otherwise.
    """

    def __init__(
        self, *, micro_batch: int, rank: int, world_size: int, drop_last: bool = False, pads: bool = True
    ) -> None:
        self.micro_batch = micro_batch
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.pads = pads
        self.order = Order(0)
        self.position = 0

    @property
    def round_size(self) -> int:
        """Samples of a full round, over all ranks."""
        return self.micro_batch * self.world_size

    def __len__(self) -> int:
        """Return the rounds from ``position`` to the end of the epoch."""
        return self.rounds(self.position)

    def rounds(self, position: int = 0) -> int:
        """Return the rounds from sample ``position`` to the end of the epoch."""
        full, rest = divmod(max(0, self.order.length - position), self.round_size)
        return full + (1 if rest and not self.drop_last else 0)

    def counts(self, index: int, position: int | None = None) -> tuple[int, int]:
        """Return how many samples the ``index``-th round from there has on this rank, and on all ranks."""
        start_at = self.position if position is None else position
        total = min(self.round_size, self.order.length - start_at - index * self.round_size)
        if total == self.round_size:
            return self.micro_batch, total
        start, stop = shares(total, self.world_size)[self.rank]
        return stop - start, total

    def __iter__(self) -> Iterator[list[int]]:
        """Yield from sample ``position`` of the epoch on; nothing is computed for what comes before it.

        A position counts samples of all ranks, so that another number of ranks, or another batch size,
        goes on exactly where the run stood.
        """
        size, rounds = self.round_size, len(self)
        per_chunk = max(1, _CHUNK // size)
        for first in range(0, rounds, per_chunk):
            begin_at = self.position + first * size
            chunk = self.order.slice(begin_at, begin_at + min(per_chunk, rounds - first) * size)
            for begin in range(0, len(chunk), size):
                samples = chunk[begin : begin + size]
                if len(samples) == size:
                    begin_own = self.rank * self.micro_batch
                    yield samples[begin_own : begin_own + self.micro_batch]
                else:
                    start, stop = shares(len(samples), self.world_size)[self.rank]
                    if stop > start or self.pads:
                        yield samples[start:stop] or samples[:1]
