"""A run is as long as it was told to be, over data of any kind."""

import time

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from camshaft import run
from camshaft.callback import Callback
from camshaft.callbacks.seed import Seed
from camshaft.errors import DataError, RecipeError
from camshaft.testing import Recorder, StopAt, TinyData, TinyIterable, TinyModule, tiny_run


class Seen(Callback):
    """Keep the batches of every step, by epoch."""

    def __init__(self):
        self.batches, self.progress, self.planned = [], None, None

    def on_fit_start(self, state):
        self.progress, self.planned = state.progress, state.planned_steps

    def on_epoch_start(self, state):
        self.batches.append([])

    def on_batch(self, state, batch):
        self.batches[-1].append(batch[0])


def seen(data=None, module=None, **settings):
    watch = Seen()
    callbacks = {"seen": watch, **settings.pop("callbacks", {})}
    result = tiny_run(module, TinyData() if data is None else data, callbacks=callbacks, **settings)
    return watch, result


@pytest.mark.parametrize(
    ("settings", "steps", "epochs"),
    [
        ({"max_epochs": 3}, 18, 3), ({"max_steps": 4}, 4, 0), ({"max_steps": 6}, 6, 1), ({"max_steps": 8}, 8, 1),
        ({"max_epochs": 2, "max_steps": 100}, 12, 2), ({"max_epochs": 2, "accumulate": 4}, 4, 2),
        ({"max_epochs": 2, "limit_train_batches": 2}, 4, 2), ({"max_epochs": 2, "limit_train_batches": 0.5}, 6, 2),
        ({"max_epochs": 1, "limit_train_batches": 99}, 6, 1), ({"max_epochs": 2, "limit_train_batches": 1.0}, 12, 2),
    ],
    ids=str,
)  # fmt: skip
def test_a_run_takes_the_steps_it_was_given(settings, steps, epochs):
    watch, result = seen(**settings)
    assert (result.status, result.step, watch.progress.epoch) == ("finished", steps, epochs)
    assert watch.planned == steps


@pytest.mark.parametrize(
    ("settings", "steps", "planned"),
    [({"max_epochs": 2}, 8, None), ({"max_steps": 7}, 7, 7), ({"max_epochs": 2, "limit_train_batches": 3}, 6, 6)],
    ids=str,
)
def test_data_without_a_length_trains_as_long(settings, steps, planned):
    watch, result = seen(TinyIterable(), **settings)
    assert (result.step, watch.planned) == (steps, planned)
    assert all(torch.equal(a, b) for a, b in zip(watch.batches[0], watch.batches[1], strict=False))


def test_epochs_end_where_the_data_does_however_long_each_is():
    class Varies:
        def __init__(self):
            self.epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(TinyIterable((4,) * (self.epoch + 2)))

    recorder = Recorder(only=["on_epoch_end", "on_validation_end"])
    watch, _ = seen(Varies(), max_epochs=3, callbacks={"record": recorder})
    assert [len(epoch) for epoch in watch.batches] == [2, 3, 4]
    assert [step for _, step in recorder.events] == [2, 5, 9]


def test_a_loader_of_an_iterable_dataset_with_workers_needs_no_length():
    watch, result = seen(DataLoader(Stream(), batch_size=3, num_workers=1), max_epochs=2)
    assert (result.step, watch.progress.samples) == (6, 16)


class Stream(IterableDataset):
    """Eight samples, one after the other."""

    def __iter__(self):
        for inputs, targets in TinyIterable((1,) * 8):
            yield inputs[0], targets[0]


def test_time_ends_a_run_and_finishes_the_step():
    class Slow(TinyModule):
        def training_step(self, batch, batch_idx):
            time.sleep(0.02)
            return super().training_step(batch, batch_idx)

    start = time.monotonic()
    watch, result = seen(module=Slow(), max_time=0.4)
    assert (result.status, watch.progress.step > 3) == ("stopped", True)
    assert 0.3 < time.monotonic() - start < 3


def test_a_run_that_nothing_ends_is_refused():
    with pytest.raises(RecipeError) as caught:
        run(TinyModule(), TinyData())
    assert str(caught.value) == (
        "camshaft.run: none of max_epochs, max_steps and max_time is given.\n"
        "  The run would never end. Add for example 'max_epochs: 10'."
    )


@pytest.mark.parametrize("count", [True, 3])
def test_a_fast_run_tries_a_few_batches_of_everything_and_leaves_nothing(count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder()
    watch, result = seen(
        TinyData(test=True), fast_dev_run=count, accumulate=2, checkpoint={}, runs_dir=tmp_path / "runs",
        callbacks={"record": recorder},
    )  # fmt: skip
    assert (result.status, result.step, len(watch.batches[0])) == ("finished", int(count), 2 * int(count))
    assert recorder.names.count("on_validation_batch") == 2 * int(count), "validation and test"
    assert {"val/loss", "test/loss"} <= result.metrics.keys()
    assert list(tmp_path.iterdir()) == []


def test_overfitting_trains_on_the_same_batches_in_the_same_order_and_validates_on_them():
    recorder = Recorder(only=["on_validation_batch"])
    watch, result = seen(overfit_batches=2, max_epochs=3, callbacks={"record": recorder})
    assert [len(epoch) for epoch in watch.batches] == [2, 2, 2]
    assert all(torch.equal(a, b) for epoch in watch.batches[1:] for a, b in zip(watch.batches[0], epoch, strict=True))
    assert (result.step, len(recorder.events)) == (6, 6)


def test_shuffling_gives_every_epoch_an_order_of_its_own_with_every_sample():
    watch, _ = seen(max_epochs=2)
    first, second = (torch.cat(epoch) for epoch in watch.batches)
    assert not torch.equal(first, second)
    assert torch.equal(first.sort(0).values, second.sort(0).values)


def test_the_order_follows_the_seed():
    def order(seed):
        return torch.cat(seen(seed=seed)[0].batches[0])

    assert torch.equal(order(1), order(1))
    assert not torch.equal(order(1), order(2))


def test_a_seed_callback_orders_the_samples_as_the_setting_does():
    by_setting = seen(seed=5)[0].batches[0]
    by_callback = seen(callbacks={"seed": Seed(5)})[0].batches[0]
    assert torch.equal(torch.cat(by_setting), torch.cat(by_callback))


def test_a_stop_ends_the_run_after_the_step():
    watch, result = seen(max_epochs=3, callbacks={"stop": StopAt(7)})
    assert (result.status, result.step, watch.progress.epoch) == ("stopped", 7, 1)


def test_an_iterator_that_is_used_up_is_refused_in_its_second_epoch():
    with pytest.raises(DataError, match="train_dataloader is an iterator that the first epoch used up"):
        seen(iter(TinyIterable()), max_epochs=2)


def test_a_loader_that_gives_nothing_is_refused():
    class Empty:
        def __iter__(self):
            return iter(())

    with pytest.raises(DataError, match="the training loader gave nothing in epoch 0"):
        seen(Empty(), max_epochs=1)
