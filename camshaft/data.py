"""Declare ``DataModule``, and cut micro-batches into the windows of optimizer steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from camshaft.errors import DataError
from camshaft.loader import MicroBatch
from camshaft.state import Batch


class DataModule:
    """Own the data of a run: override the loaders, and ``setup`` for what they need.

    Loaders are plain: batch size, shuffling and workers as on one device. The engine deals samples
    to ranks, orders them by (seed, epoch) and resumes inside an epoch.
    """

    def prepare_data(self) -> None:
        """Download or convert, once on each machine, before any ``setup``. Do not set attributes here."""

    def setup(self, stage: str) -> None:
        """Open and split the data on every rank. ``stage`` is fit, validate, test or predict."""

    def train_dataloader(self) -> Any:
        """Return the training loader."""
        return None

    def val_dataloader(self) -> Any:
        """Return one validation loader, or a list of them."""
        return None

    def test_dataloader(self) -> Any:
        """Return one test loader, or a list of them."""
        return None

    def predict_dataloader(self) -> Any:
        """Return one loader to predict, or a list of them."""
        return None

    def teardown(self, stage: str) -> None:
        """Close what ``setup`` opened, on every rank, after an exception too."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to know of the data: plain JSON data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""


@dataclass(slots=True)
class Window:
    """The micro-batches of one optimizer step, on the host.

    Attributes:
        batches: one a micro-batch, of this rank.
        samples: how many samples each holds; 0 for one that only keeps step with other ranks.
        total: samples of the whole window over all ranks.
        first: index of its first micro-batch in the epoch.
        is_last: whether the epoch ends with it.
    """

    batches: list[Batch]
    samples: list[int]
    total: int
    first: int
    is_last: bool


class Accumulates(Protocol):
    """Whoever says how many micro-batches the next window has."""

    accumulate: int


def windows(
    batches: Iterator[MicroBatch], knobs: Accumulates, *, first: int = 0, remaining: int | None = None
) -> Iterator[Window]:
    """Yield windows of ``knobs.accumulate`` micro-batches, asked anew for each; the last may be shorter.

    With ``remaining`` known nothing is read ahead of the window that is handed out, so that data
    drawn from the global random stream is drawn in the same order as in a resumed run. Without it
    one micro-batch is read ahead, to know where the epoch ends.
    """
    index = first
    head = next(batches, None) if remaining is None else None
    while head is not None or remaining:
        count = knobs.accumulate if remaining is None else min(knobs.accumulate, remaining)
        if count < 1:
            raise _no_micro_batch(count)
        taken: list[Any] = [head if remaining is None else next(batches, None)]
        if count > 1:
            taken.extend(itertools.islice(batches, count - 1))
        if remaining is None:
            head = next(batches, None)
        elif taken[0] is None or len(taken) < count:
            held = 0 if taken[0] is None else len(taken)
            raise _too_short(index + held, remaining - held)
        else:
            remaining -= count
        yield _window(taken, index, is_last=head is None and not remaining)
        index += len(taken)


def _window(taken: list[MicroBatch], first: int, *, is_last: bool) -> Window:
    if len(taken) == 1:
        only = taken[0]
        return Window([only.data], [only.samples], only.total, first, is_last)
    return Window([m.data for m in taken], [m.samples for m in taken], sum(m.total for m in taken), first, is_last)


def _no_micro_batch(accumulate: int) -> DataError:
    return DataError(
        f"accumulate is {accumulate}.",
        why="A step without a micro-batch has no gradient.",
        fix="Accumulate over 1 or more micro-batches.",
    )


def _too_short(count: int, missing: int) -> DataError:
    return DataError(
        f"the training loader ended after {count} micro-batches and announced {missing} more.",
        why="The end of the epoch would be missed, with all that is due there.",
        fix="Make what the loader yields agree with its sampler, or hand its batches over as a plain iterable.",
    )
