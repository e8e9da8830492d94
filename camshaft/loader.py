"""Turn whatever a user hands over as data into micro-batches with known counts, from any position."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from camshaft.batches import batch_size_of
from camshaft.errors import DataError
from camshaft.sampler import Order, RoundSampler, derive_seed
from camshaft.state import Batch
from camshaft.stateful import Stateful, StreamState
from camshaft.streams import OwnStreams, list_sampler, reseed, seed_streams


@dataclass(slots=True)
class MicroBatch:
    """A host batch of this rank, with how many samples it and its round hold.

    ``samples`` is 0 for a batch that only keeps this rank in step with the others.
    """

    data: Batch
    samples: int
    total: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this rank stands among those that share the data, and how it draws."""

    rank: int = 0
    world_size: int = 1
    seed: int = 0
    pads: bool = True


@dataclass(frozen=True, slots=True)
class Position:
    """Where an epoch stands: samples handed out to all ranks, and batches handed out to all ranks."""

    samples: int = 0
    batches: int = 0


START = Position()


class Source(Protocol):
    """One loader, seen as rounds of micro-batches."""

    is_counted: bool
    """Whether ``rounds`` is exact, and not only what a user's own ``__len__`` claims."""

    def rounds(self, position: Position = START) -> int | None:
        """Return the micro-batches of this rank from there to the epoch's end; None when nobody knows."""

    def common_rounds(self) -> int:
        """Return how many rounds every rank is sure to have."""

    def iterate(self, epoch: int, position: Position = START) -> Iterator[MicroBatch]:
        """Yield an epoch's micro-batches from there on."""

    def save(self, position: Position) -> dict[str, Any] | None:
        """Return what the data itself knows of that position, the newest one; None when it knows nothing."""

    def load(self, saved: dict[str, Any] | None) -> None:
        """Take back what ``save`` returned, before the next ``iterate``."""


def open_source(
    loader: Any, placement: Placement, *, name: str, micro_batch: int | None = None, ordered: bool = False
) -> Source:
    """Choose how to read ``loader``: a DataLoader, or any iterable of batches.

    ``micro_batch`` replaces the loader's own batch size. ``ordered`` ignores shuffling. A loader of
    map-style data is resharded over the ranks sample by sample; any other is dealt batch by batch.

    Raises:
        DataError: the loader is empty or no iterable, or its batch size cannot be replaced.
    """
    if isinstance(loader, DataLoader) and _is_plain(loader):
        if _length(loader.dataset) == 0 or _length(loader.sampler) == 0:
            raise _empty(name)
        return MapSource(loader, placement, micro_batch=micro_batch, ordered=ordered)
    if not isinstance(loader, Iterable):
        raise DataError(
            f"{name} returned a {type(loader).__name__}.",
            why="It cannot be iterated for batches.",
            fix="Return a torch DataLoader or an iterable of batches.",
        )
    if micro_batch is not None and _own_batch_size(loader, micro_batch) != micro_batch:
        raise DataError(
            f"{name} makes its own batches of {_own_batch_size(loader, micro_batch)}, and this recipe's batch_size "
            f"asks for {micro_batch} a rank and micro-batch.",
            why="Iterable data cannot be batched again.",
            fix="Build the loader with that batch size, or leave batch_size out of the recipe.",
        )
    if isinstance(loader, Sequence) and not loader:
        raise _empty(name)
    return StreamSource(loader, placement, name=name)


class MapSource:
    """A DataLoader of map-style data, resampled in rounds: position and order are ours, the rest is the user's."""

    is_counted = True

    def __init__(
        self, loader: DataLoader[Any], placement: Placement, *, micro_batch: int | None, ordered: bool
    ) -> None:
        self._placement = placement
        self._ordered = ordered
        self._user_sampler = loader.sampler
        self.sampler = RoundSampler(
            micro_batch=micro_batch or loader.batch_size or 1,
            rank=placement.rank,
            world_size=placement.world_size,
            drop_last=loader.drop_last,
            pads=placement.pads,
        )
        self.dataset = loader.dataset
        # Workers have copies, whose states this process does not see.
        self._owner = self.dataset if loader.num_workers == 0 and isinstance(self.dataset, Stateful) else None
        self._loader = self._rebuild(loader)
        self.sampler.order = self._order(0)
        if self.sampler.order.length == 0:
            raise DataError("a sampler gave nothing.", why="There is nothing to iterate.", fix="Check what it picks.")
        if len(self.sampler) == 0:
            count, size = self.sampler.order.length, self.sampler.round_size
            raise DataError(
                f"drop_last leaves nothing of {count} samples in batches of {size} over all ranks.",
                fix="Make batch_size smaller, or set drop_last=False.",
            )

    def rounds(self, position: Position = START) -> int | None:
        """Return the rounds that are left; a rank without a share of the last one has one less."""
        count = self.sampler.rounds(position.samples)
        is_whole = self.sampler.pads or not count or self.sampler.counts(count - 1, position.samples)[0]
        return count if is_whole else count - 1

    def common_rounds(self) -> int:
        """Return the rounds of an epoch, without a last one that some ranks have no share of."""
        full = self.sampler.order.length // self.sampler.round_size
        return self.sampler.rounds() if self.sampler.pads else full

    def iterate(self, epoch: int, position: Position = START) -> Iterator[MicroBatch]:
        """Yield from ``position.samples`` on, at no cost for what is skipped."""
        self.sampler.order = self._order(epoch)
        self.sampler.position = position.samples
        placement = self._placement
        self._loader.generator.manual_seed(derive_seed(placement.seed, "workers", placement.rank, epoch))
        if isinstance(self._loader.batch_sampler, _EpochTags):
            self._loader.batch_sampler.epoch = epoch
        return self._read()

    def save(self, position: Position) -> dict[str, Any] | None:
        """Return the state of a dataset that has one and is read in this process."""
        return None if self._owner is None else {"data": self._owner.state_dict()}

    def load(self, saved: dict[str, Any] | None) -> None:
        """Give the dataset its state back."""
        if saved is not None and saved["data"] is not None and self._owner is not None:
            self._owner.load_state_dict(saved["data"])

    def _read(self) -> Iterator[MicroBatch]:
        for index, data in enumerate(self._loader):
            samples, total = self.sampler.counts(index)
            yield MicroBatch(data, samples, total)

    def _rebuild(self, loader: DataLoader[Any]) -> Any:
        """Copy the user's loader, of whatever subclass, with our sampler in it."""
        clone = copy.copy(loader)
        put = object.__setattr__  # DataLoader refuses to have these changed after construction
        put(clone, "batch_sampler", self.sampler)
        # An own generator: making an iterator would otherwise draw from the global stream.
        put(clone, "generator", torch.Generator())
        put(clone, "_iterator", None)
        if loader.num_workers > 0:
            put(clone, "batch_sampler", _EpochTags(self.sampler))
            put(clone, "dataset", _SeededDataset(loader.dataset, self._placement.seed))
        return clone

    def _order(self, epoch: int) -> Order:
        sampler, seed = self._user_sampler, derive_seed(self._placement.seed, "epoch", epoch)
        count = _length(self.dataset)
        if type(sampler) is SequentialSampler and count is not None:
            return Order(count)
        is_whole = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == count
        if (is_whole or isinstance(sampler, DistributedSampler)) and count is not None:
            shuffles = not self._ordered and getattr(sampler, "shuffle", True)
            return Order(count, seed=seed if shuffles else None)
        # What an own sampler picks is the user's choice of samples, in an ordered pass too.
        listed = list_sampler(sampler, seed, epoch)
        return Order(len(listed), listed=listed)


class StreamSource:
    """Data of unknown length or with batches of its own: every rank reads the stream and keeps its turn.

    Each rank sees which batches the others get, so an epoch that ends in the middle of a round still
    gives every rank the same number of micro-batches, and weights are exact. What the stream draws from
    the global random streams while it is read depends on (seed, epoch) alone, so ranks see one stream.
    """

    is_counted = False

    def __init__(self, loader: Iterable[Any], placement: Placement, *, name: str) -> None:
        self._loader = loader
        self._placement = placement
        self._name = name
        self._begun = False
        self._state = StreamState(loader)
        self._streams: OwnStreams | None = None

    def rounds(self, position: Position = START) -> int | None:
        """Return the rounds that are left when the loader has a length."""
        try:
            count = max(0, len(self._loader) - position.batches)  # type: ignore[arg-type]
        except TypeError:
            return None
        full, rest = divmod(count, self._placement.world_size)
        return full + (1 if rest and (self._placement.pads or self._placement.rank < rest) else 0)

    def common_rounds(self) -> int:
        """Return the full rounds when the loader has a length, else 0."""
        try:
            return len(self._loader) // self._placement.world_size  # type: ignore[arg-type]
        except TypeError:
            return 0

    def iterate(self, epoch: int, position: Position = START) -> Iterator[MicroBatch]:
        """Yield this rank's batches from ``position.batches`` on.

        Those before are read and dropped, unless the stream has a state to go on from.
        """
        placement = self._placement
        batches, dropped = self._begin(epoch, position)
        for _ in itertools.islice(batches, dropped):
            pass
        for at in itertools.count(position.batches, placement.world_size):
            self._state.note(at, self._streams)
            turn = list(itertools.islice(batches, placement.world_size))
            if not turn:
                return
            counts = [batch_size_of(data) for data in turn]
            if placement.rank < len(turn):
                yield MicroBatch(turn[placement.rank], counts[placement.rank], sum(counts))
            elif placement.pads:
                yield MicroBatch(turn[0], 0, sum(counts))
            if len(turn) < placement.world_size:
                return

    def save(self, position: Position) -> dict[str, Any] | None:
        """Return where the stream stands, without what was read ahead."""
        return self._state.save(position.batches)

    def load(self, saved: dict[str, Any] | None) -> None:
        """Go on from there in the next ``iterate``."""
        self._state.load(saved)

    def _begin(self, epoch: int, position: Position) -> tuple[Iterator[Any], int]:
        """Return the stream's batches, and how many of them were trained on before."""
        seed = derive_seed(self._placement.seed, "epoch", epoch)
        reseed(self._loader, seed, epoch)
        dropped, drawn = self._state.begin(position.batches)
        if isinstance(self._loader, Sequence):
            return iter(self._loader), dropped
        self._streams = streams = OwnStreams(seed)
        with streams.active():
            batches = iter(self._loader)
        if drawn is not None:
            streams.load(drawn)
        is_used = batches is self._loader and (epoch > 0 or self._begun)
        self._begun = True
        batches = streams.draw(batches)
        return (_not_exhausted(batches, self._name) if is_used and position.batches == 0 else batches), dropped


class _EpochTags(BatchSampler):
    """Send the epoch along with every index, for workers that outlive an epoch."""

    def __init__(self, sampler: RoundSampler) -> None:
        self._inner = sampler
        self.epoch = 0

    def __iter__(self) -> Iterator[list[Any]]:
        for indices in self._inner:
            yield [(self.epoch, index) for index in indices]

    def __len__(self) -> int:
        return len(self._inner)


class _SeededDataset(Dataset[Any]):
    """Seed every random stream by (seed, epoch, sample) before a worker reads it.

    Augmentation is then a function of the sample, whichever worker, rank or resumed run draws it.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    # A dataset that reads many samples in one call would draw them all from one seed.
    __getitems__ = None

    def __getitem__(self, tagged: tuple[int, Any]) -> Any:
        epoch, index = tagged
        seed_streams(derive_seed(self._seed, "sample", epoch, index))
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # Workers' init functions reach for attributes of the dataset they know.
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def limit_rounds(rounds: int | None, limit: float | None, name: str) -> int | None:
    """Apply ``limit_*_batches``: a count, or, as a float, a fraction of a loader that has a length."""
    if limit is None:
        return rounds
    if limit < 0 or (isinstance(limit, float) and limit > 1 and not limit.is_integer()):
        raise DataError(
            f"limit_{name}_batches is {limit}.",
            why="It is neither a number of batches nor a share of them.",
            fix="Give a whole number, or a share between 0.0 and 1.0.",
        )
    if isinstance(limit, float) and limit > 1:
        limit = int(limit)
    if isinstance(limit, float):
        if rounds is None:
            raise DataError(
                f"limit_{name}_batches is {limit}, a fraction of a loader without a length.",
                fix="Give a number of batches instead.",
            )
        return min(rounds, max(1, round(rounds * limit))) if limit > 0 else 0
    return limit if rounds is None else min(rounds, limit)


def _is_plain(loader: DataLoader[Any]) -> bool:
    return (
        not isinstance(loader.dataset, IterableDataset)
        and loader.batch_size is not None
        and type(loader.batch_sampler) is BatchSampler
    )


def _own_batch_size(loader: Any, wanted: int) -> Any:
    """Return the batch size of a loader that says it; a DataLoader with batches of its own has none to change."""
    if isinstance(loader, DataLoader):
        return loader.batch_size if loader.batch_size is not None else "a size of their own"
    return wanted if (size := getattr(loader, "batch_size", None)) is None else size


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None


def _not_exhausted(batches: Iterator[Any], name: str) -> Iterator[Any]:
    """Refuse to begin an epoch on an iterator that has nothing left."""
    try:
        first = next(batches)
    except StopIteration:
        raise DataError(
            f"{name} is an iterator that the first epoch used up.",
            why="Later epochs would train on nothing.",
            fix="Return an object with __iter__ that starts again, or train by max_steps within one epoch.",
        ) from None
    return itertools.chain([first], batches)


def _empty(name: str) -> DataError:
    return DataError(f"{name} is empty.", why="There is nothing to iterate.", fix="Check the dataset and its split.")
