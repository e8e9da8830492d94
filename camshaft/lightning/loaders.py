"""Open the loaders of a run: as they are on one process, dealt over the ranks on several."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from camshaft.batches import batch_size_of
from camshaft.checkpoint.capture import _write_streams, capture_streams, stream_tensors
from camshaft.errors import DataError
from camshaft.lightning.combined import combine, flatten
from camshaft.lightning.errors import MisconfigurationException
from camshaft.loader import START, MicroBatch, Placement, Position, Source, open_source
from camshaft.module import bind_step

if TYPE_CHECKING:
    from camshaft.lightning.trainer import Trainer

_METHODS = {
    "fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader",
}  # fmt: skip


class NativeSource:
    """A user's loader as one process reads it, drawing from the global random streams as a plain loop would.

    To go on inside an epoch, the epoch is read again from the streams that it began with.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.is_counted = _has_exact_length(loader)
        self._opened: Iterator[Any] | None = None
        self._began: dict[str, Any] | None = None

    def rounds(self, position: Position = START) -> int | None:
        """Return the batches that are left, where the loader has a length."""
        try:
            return max(0, len(self.loader) - position.batches)
        except (TypeError, NotImplementedError):
            return None

    def common_rounds(self) -> int:
        """Return the length, or 0 when there is none."""
        return self.rounds() or 0

    def open(self) -> None:
        """Make the iterator of the next epoch already."""
        self._began = _streams()
        self._opened = iter(self.loader)

    def iterate(self, epoch: int, position: Position = START) -> Iterator[MicroBatch]:
        """Yield batches from ``position.batches`` on; those before are read and dropped."""
        _set_epoch(self.loader, epoch)
        if position.batches:
            batches = self._replay(position.batches)
        else:
            if self._opened is None:
                self.open()
            assert self._opened is not None
            batches, self._opened = self._opened, None
        return (_counted(batch) for batch in batches)

    def save(self, position: Position) -> dict[str, Any] | None:
        """Return the streams that the running epoch began with, and the loader's own state if it has one."""
        return None if self._began is None or not position.batches else {"began": self._began}

    def load(self, saved: dict[str, Any] | None) -> None:
        """Take back what ``save`` returned, before the next ``iterate``."""
        self._began = None if saved is None else saved["began"]
        # Made before the streams of the run were given back.
        self._opened = None

    def _replay(self, count: int) -> Iterator[Any]:
        now = _streams()
        if self._began is not None:
            _give_back(self._began)
        batches = iter(self.loader)
        for _ in range(count):
            next(batches, None)
        if self._began is not None:
            _give_back(now)
        return batches


class Loaders:
    """The data of one stage, opened: one source for training, one or several for an evaluation."""

    def __init__(self, trainer: Trainer, stage: str, given: Any) -> None:
        self._trainer = trainer
        self._stage = stage
        self.original = given
        found = [combine(given)] if stage == "fit" else flatten(given)
        for loader in found:
            _require_iterable(loader, stage, trainer)
        self.sources: list[Source] = [self._open(loader) for loader in found]
        self._limit = trainer.batch_limit(stage)
        self._takes_index = _takes_loader_index(trainer, stage)
        if stage != "fit" and len(found) > 1 and not self._takes_index:
            name = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}[stage]
            raise MisconfigurationException(
                f"there are {len(found)} loaders, and {name} has no argument dataloader_idx.",
                why="It could not tell whose batch it gets.",
                fix=f"Write 'def {name}(self, batch, batch_idx, dataloader_idx=0)'.",
            )

    def rounds(self, number: int, limit: int | None = None) -> int | None:
        """Return how many batches of a loader are read; None is all of them."""
        counts = [c for c in (self.sources[number].rounds(), self.limit(number), limit) if c is not None]
        # What a stream says of its own length may be wrong.
        return min(counts) if counts and (self.sources[number].is_counted or len(counts) > 1) else None

    def limit(self, number: int = 0) -> int | None:
        """Return what ``limit_*_batches`` leaves of a loader, in batches; None is no limit.

        Raises:
            MisconfigurationException: a fraction of a loader without a length, or of which nothing is left.
        """
        wanted = self._limit
        if isinstance(wanted, int):
            return wanted
        if wanted == 1.0:
            return None
        length = self.sources[number].rounds()
        if wanted == 0.0:
            return 0
        if length is None:
            raise MisconfigurationException(
                f"the limit of batches is {wanted}, a fraction of a loader without a length.",
                fix="Give a number of batches.",
            )
        count = int(length * wanted)
        if not count:
            raise MisconfigurationException(
                f"the limit of batches is {wanted}, and leaves nothing of {length}.",
                fix=f"Give at least {1 / length:.3g}, or a number of batches.",
            )
        return count

    def indices(self, number: int) -> tuple[int, ...]:
        """Return what a step gets after the batch's index."""
        return (number,) if self._takes_index else ()

    def _open(self, loader: Any) -> Any:
        trainer = self._trainer
        strategy = trainer.engine
        if strategy.data_world_size == 1:
            return NativeSource(_in_order(loader) if trainer.overfit_batches and self._stage == "fit" else loader)
        pads = self._stage == "fit" or strategy.needs_equal_forwards
        where = Placement(strategy.data_rank, strategy.data_world_size, trainer.data_seed, pads=pads)
        return open_source(
            loader, where, name=_METHODS[self._stage],
            ordered=self._stage == "predict" or bool(trainer.overfit_batches),
        )  # fmt: skip


def request(trainer: Trainer, stage: str, given: Any) -> Loaders | None:
    """Ask for the loaders of a stage: those that were passed, the datamodule's, or the module's; None for none."""
    name = _METHODS[stage]
    if trainer.overfit_batches and stage == "validate":
        name, given = "train_dataloader", trainer.passed_train_loaders
    if given is None:
        for owner in (trainer.datamodule, trainer.lightning_module):
            if owner is not None and hasattr(owner, name):
                given = trainer.caller.call(name, getattr(owner, name))
            if given is not None:
                break
    if given is None or (isinstance(given, (list, tuple, dict)) and not given):
        return None
    return Loaders(trainer, stage, given)


def _require_iterable(loader: Any, stage: str, trainer: Trainer) -> None:
    try:
        iter_method: Callable[..., Any] | None = type(loader).__iter__
    except AttributeError:
        iter_method = getattr(type(loader), "__getitem__", None)
    if iter_method is None:
        raise DataError(
            f"{_METHODS[stage]} gave a {type(loader).__name__}.",
            why="It cannot be iterated for batches.",
            fix="Return a DataLoader, an iterable of batches, or a list or dict of them.",
        )


def _takes_loader_index(trainer: Trainer, stage: str) -> bool:
    """Say whether the step of a stage can be told its loader's index."""
    if stage == "fit":
        return False
    name = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}[stage]
    method = getattr(trainer.lightning_module, name)
    bind_step(trainer.lightning_module, name)
    parameters = inspect.signature(method).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    return "dataloader_idx" in (p.name for p in parameters) or len(parameters) > len(("batch", "batch_idx"))


def _has_exact_length(loader: Any) -> bool:
    if not hasattr(loader, "__len__"):
        return False
    if hasattr(loader, "combined"):
        return all(_has_exact_length(part) for part in loader.combined.flattened)
    return not (isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset))


def _in_order(loader: Any) -> Any:
    """Return a loader over the same data without shuffling."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return loader
    if isinstance(loader.sampler, torch.utils.data.SequentialSampler):
        return loader
    return DataLoader(
        loader.dataset, batch_size=loader.batch_size, collate_fn=loader.collate_fn, drop_last=loader.drop_last,
        num_workers=loader.num_workers,
    )  # fmt: skip


def _set_epoch(loader: Any, epoch: int) -> None:
    for part in loader.combined.flattened if hasattr(loader, "combined") else [loader]:
        samplers = (getattr(part, "sampler", None), getattr(getattr(part, "batch_sampler", None), "sampler", None))
        for sampler in dict.fromkeys(samplers):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)


def _counted(batch: Any) -> MicroBatch:
    size = batch_size_of(batch)
    return MicroBatch(batch, size, size)


def _streams() -> dict[str, Any]:
    tensors = {name: tensor.tolist() for name, tensor in stream_tensors().items()}
    return {"host": capture_streams(), "torch": tensors}


def _give_back(saved: dict[str, Any]) -> None:
    tensors = {name: torch.tensor(values, dtype=torch.uint8) for name, values in saved["torch"].items()}
    _write_streams(saved["host"], tensors)
