"""Iterate several loaders together: in step, in turn, or over and over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch.utils.data import DataLoader

from camshaft.errors import DataError

Mode = Literal["min_size", "max_size", "max_size_cycle", "sequential"]


class CombinedLoader:
    """Yield ``(batch, batch_idx, dataloader_idx)`` over a collection of loaders.

    ``batch`` has the shape of the collection: a list or dict with one batch each. ``min_size`` ends with
    the shortest; ``max_size`` gives None for those that ended; ``max_size_cycle`` starts those again;
    ``sequential`` reads one after the other.
    """

    is_surface = True

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        if mode not in ("min_size", "max_size", "max_size_cycle", "sequential"):
            raise DataError(
                f"CombinedLoader's mode is {mode!r}.", fix="Use min_size, max_size, max_size_cycle or sequential."
            )
        self.iterables = iterables
        self.mode = mode
        self.limits: list[int | None] | None = None

    @property
    def flattened(self) -> list[Any]:
        """The loaders in the order of the collection."""
        return list(_leaves(self.iterables))

    @property
    def sampler(self) -> Any:
        """The samplers in the shape of the collection."""
        return _build(self.iterables, iter([getattr(loader, "sampler", None) for loader in self.flattened]))

    @property
    def batch_sampler(self) -> Any:
        """The batch samplers in the shape of the collection."""
        return _build(self.iterables, iter([getattr(loader, "batch_sampler", None) for loader in self.flattened]))

    def __len__(self) -> int:
        lengths = [self._length(number, loader) for number, loader in enumerate(self.flattened)]
        if self.mode == "sequential":
            return sum(lengths)
        return (min if self.mode == "min_size" else max)(lengths, default=0)

    def _length(self, number: int, loader: Any) -> int:
        limit = self.limits[number] if self.limits is not None else None
        length = len(loader)
        return length if limit is None else min(length, limit)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        if self.mode == "sequential":
            return self._in_turn()
        # Made here and not at the first batch: making an iterator draws from the random stream.
        return self._in_step([iter(loader) for loader in self.flattened])

    def _in_turn(self) -> Iterator[tuple[Any, int, int]]:
        for number, loader in enumerate(self.flattened):
            limit = self.limits[number] if self.limits is not None else None
            for index, batch in enumerate(loader):
                if limit is not None and index >= limit:
                    break
                yield batch, index, number

    def _in_step(self, iterators: list[Iterator[Any]]) -> Iterator[tuple[Any, int, int]]:
        ended = [False] * len(iterators)
        index = 0
        while iterators:
            batches: list[Any] = []
            for number in range(len(iterators)):
                try:
                    batches.append(next(iterators[number]))
                except StopIteration:
                    ended[number] = True
                    if self.mode == "min_size" or all(ended):
                        return
                    batches.append(self._again(iterators, number))
            yield _build(self.iterables, iter(batches)), index, 0
            index += 1

    def _again(self, iterators: list[Iterator[Any]], number: int) -> Any:
        if self.mode == "max_size":
            iterators[number] = iter(())
            return None
        iterators[number] = iter(self.flattened[number])
        return next(iterators[number])


class Batches:
    """The batches of a CombinedLoader alone, as training reads them."""

    def __init__(self, combined: CombinedLoader) -> None:
        self.combined = combined

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.combined)
        return (batch for batch, _, _ in iterator)

    def __len__(self) -> int:
        return len(self.combined)


def combine(loaders: Any) -> Any:
    """Return training data as one iterable: a lone loader as it is, a collection in step with the longest."""
    if isinstance(loaders, CombinedLoader):
        if loaders.mode == "sequential":
            raise DataError(
                "the training data is a CombinedLoader with mode='sequential'.",
                why="An epoch needs one batch of each loader in every step.",
                fix="Use min_size, max_size or max_size_cycle, or a torch ConcatDataset in one loader.",
            )
        return Batches(loaders)
    if _is_collection(loaders):
        return Batches(CombinedLoader(loaders, "max_size_cycle"))
    return loaders


def flatten(loaders: Any) -> list[Any]:
    """Return the loaders of an evaluation, one after the other."""
    if isinstance(loaders, CombinedLoader):
        return loaders.flattened if loaders.mode == "sequential" else [Batches(loaders)]
    return list(_leaves(loaders)) if _is_collection(loaders) else [loaders]


def _is_collection(loaders: Any) -> bool:
    """Say whether it is a list, tuple or dict of loaders, and not a list of batches."""
    if isinstance(loaders, Mapping):
        return True
    return isinstance(loaders, (list, tuple)) and bool(loaders) and all(_is_loader(entry) for entry in _leaves(loaders))


def _is_loader(entry: Any) -> bool:
    from torch import Tensor

    if isinstance(entry, (DataLoader, CombinedLoader)):
        return True
    return hasattr(entry, "__iter__") and not isinstance(entry, (Tensor, str, bytes, int, float))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _build(shape: Any, values: Iterator[Any]) -> Any:
    """Return the values in the shape of a collection."""
    if isinstance(shape, Mapping):
        return {key: _build(item, values) for key, item in shape.items()}
    if isinstance(shape, (list, tuple)):
        return [_build(item, values) for item in shape]
    return next(values)
