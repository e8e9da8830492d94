"""Data with a state of its own goes on from it: the same samples, and none of those before are read again."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from camshaft import DataModule
from camshaft.callbacks.digest import Digest
from camshaft.checkpoint import Reader
from camshaft.loader import Placement, Position, open_source
from camshaft.testing import StopAt, TinyModule, tiny_run
from camshaft.testing.tiny import tiny_set
from camshaft.verify_resume import read_digest

STEPS, EPOCH = 14, 20


class Cursor:
    """Twenty samples an epoch from a tape of fifty, each epoch from where the last one ended, with noise."""

    def __init__(self):
        self.cursor, self.in_epoch, self.reads = 0, 0, 0

    def __iter__(self):
        while self.in_epoch < EPOCH:
            inputs, target = tiny_set(50)[self.cursor]
            self.cursor, self.in_epoch, self.reads = (self.cursor + 1) % 50, self.in_epoch + 1, self.reads + 1
            yield inputs + torch.randn(4) + random.random(), target
        self.in_epoch = 0

    def state_dict(self):
        return {"cursor": self.cursor, "in_epoch": self.in_epoch}

    def load_state_dict(self, state):
        self.cursor, self.in_epoch = state["cursor"], state["in_epoch"]


class Tape(Cursor, IterableDataset):
    def __init__(self):
        super().__init__()


class Batches(Cursor):
    """The same as an iterable of batches."""

    def __iter__(self):
        held = []
        for sample in super().__iter__():
            held.append(sample)
            if len(held) == 4:
                yield torch.stack([inputs for inputs, _ in held]), torch.stack([target for _, target in held])
                held = []


class Fading(Dataset):
    """Samples that fade each time one is read."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return EPOCH

    def __getitem__(self, index):
        self.reads += 1
        inputs, target = tiny_set(EPOCH)[index]
        return inputs / (1 + 0.01 * self.reads), target

    def state_dict(self):
        return {"reads": self.reads}

    def load_state_dict(self, state):
        self.reads = state["reads"]


class Unwritable(Cursor, IterableDataset):
    """A stream that begins again each epoch, and whose state no JSON can hold."""

    def __init__(self):
        super().__init__()

    def __iter__(self):
        self.cursor = self.in_epoch = 0
        return super().__iter__()

    def state_dict(self):
        return {"cursor": torch.tensor(self.cursor), "made_by": object()}


class Data(DataModule):
    def __init__(self, source):
        self.source = source

    def train_dataloader(self):
        if isinstance(self.source, Batches):
            return self.source
        return DataLoader(self.source, batch_size=4, shuffle=isinstance(self.source, Fading) or None)


def train(place, source, **more):
    place.mkdir(exist_ok=True)
    torch.manual_seed(0)
    callbacks = {"digest": Digest(str(place / "digest")), **more.pop("callbacks", {})}
    return tiny_run(
        TinyModule(dropout=0.2), Data(source), callbacks=callbacks, max_steps=STEPS, runs_dir=place,
        checkpoint={"every": None}, **more,
    )  # fmt: skip


def reads_of_rest(tmp_path, kind, stop, **settings):
    """Check that two parts are the whole; return how many samples the second part read."""
    train(tmp_path / "whole", kind(), **settings)
    first = train(tmp_path / "parts", kind(), callbacks={"stop": StopAt(stop)}, **settings)
    source = kind()
    train(tmp_path / "parts", source, resume=str(first.run_dir), **settings)
    assert read_digest(tmp_path / "parts" / "digest") == read_digest(tmp_path / "whole" / "digest")
    return source.reads, first


@pytest.mark.parametrize("stop", [3, 5, 7, 10], ids=lambda stop: f"after {stop} steps")
@pytest.mark.parametrize("kind", [Tape, Batches])
def test_a_stream_goes_on_from_its_state(tmp_path, kind, stop):
    reads, _ = reads_of_rest(tmp_path, kind, stop)
    # One batch is read ahead of the last step, and nothing is read that was trained on before.
    assert reads == 4 * (STEPS - stop) + 4


def test_a_stream_goes_on_from_its_state_inside_a_window(tmp_path):
    reads, _ = reads_of_rest(tmp_path, Tape, 4, accumulate=2)
    # Three micro-batches of the second epoch, two epochs, two windows and one read ahead; from its start, 80.
    assert reads == 4 * (3 + 10 + 4 + 1)


def test_a_map_style_dataset_goes_on_from_its_state(tmp_path):
    _, first = reads_of_rest(tmp_path, Fading, 7)
    (path,) = (first.run_dir / "checkpoints").glob("step_*")
    with Reader(path) as reader:
        assert reader.data("stream") == {"data": {"reads": 4 * STEPS}}


def test_a_stream_whose_state_is_no_json_is_read_again(tmp_path):
    reads, first = reads_of_rest(tmp_path, Unwritable, 8)
    (path,) = (first.run_dir / "checkpoints").glob("step_*")
    with Reader(path) as reader:
        assert reader.data("stream") == {"batches": STEPS % 5, "data": None, "streams": None}
    assert reads >= 4 * (STEPS - 8) + 4 * 3


class Numbered:
    """Batches that say which they are; a state is optional."""

    def __iter__(self):
        for index in range(12):
            yield torch.full((2,), index)


class NumberedWithState(Numbered):
    next = 0

    def __iter__(self):
        while self.next < 12:
            self.next += 1
            yield torch.full((2,), self.next - 1)
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def deal(kind, world_size, position, saved, rounds):
    """Deal so many rounds to all ranks, with one read ahead; return the batches and what each rank would save."""
    sources = [open_source(kind(), Placement(rank, world_size), name="data") for rank in range(world_size)]
    for source in sources:
        source.load(saved)
    ranks = [source.iterate(0, Position(batches=position)) for source in sources]
    dealt = [int(next(rank).data[0]) for _ in range(rounds) for rank in ranks]
    for rank in ranks:
        next(rank, None)
    states = [source.save(Position(batches=position + rounds * world_size)) for source in sources]
    assert all(state == states[0] for state in states)
    return dealt, states[0]


@pytest.mark.parametrize("kind", [Numbered, NumberedWithState])
def test_other_numbers_of_ranks_lose_no_batch_of_a_stream_and_see_none_twice(kind):
    alone, saved = deal(kind, 1, 0, None, 3)
    # Two ranks count whole rounds: of the three batches, two.
    by_two, saved = deal(kind, 2, 2, saved, 2)
    by_three, saved = deal(kind, 3, 6, saved, 1)
    rest, _ = deal(kind, 1, 9, saved, 2)
    assert alone + by_two + by_three + rest == list(range(12))
