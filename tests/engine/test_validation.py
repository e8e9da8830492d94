"""Validation counts every sample once, comes when it should, and leaves nothing changed behind."""

import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from camshaft.callback import Callback
from camshaft.callbacks.ema import EMA
from camshaft.checkpoint import Store
from camshaft.errors import MetricError
from camshaft.loggers.base import Logger
from camshaft.testing import Recorder, StopAt, TinyData, TinyModule, tiny_run
from camshaft.testing.tiny import tiny_set


def steps_of(event, **settings):
    recorder = Recorder(only=[event])
    tiny_run(data=TinyData(16), callbacks={"record": recorder}, **settings)
    return [step for _, step in recorder.events]


@pytest.mark.parametrize(
    ("validate", "steps"),
    [
        ("1 epoch", [4, 8, 12]), ("2 epochs", [8]), ("5 steps", [5, 10]), (7, [7]), (None, []),
        ({"every": "1 epoch", "at": [1, 6]}, [1, 4, 6, 8, 12]), ({"every": "3 steps", "after": 6}, [6, 9, 12]),
        ({"every": "1 epoch", "at_start": True}, [0, 4, 8, 12]),
    ],
)  # fmt: skip
def test_validation_comes_on_its_schedule_over_epochs(validate, steps):
    assert steps_of("on_validation_start", validate=validate, max_epochs=3) == steps


def test_validation_on_request_comes_at_the_next_boundary():
    class Ask(Callback):
        def on_step(self, state):
            if state.progress.step == 2:
                state.control.validate(everywhere=True)

    recorder = Recorder(only=["on_validation_end"])
    tiny_run(data=TinyData(16), callbacks={"ask": Ask(), "record": recorder})
    assert [step for _, step in recorder.events] == [2, 4]


# -- what it measures


class Three(TinyModule):
    """The mean over samples of unequal batches, a metric object, and what a step logs on request."""

    def __init__(self):
        super().__init__()
        self.means = nn.ModuleList(MeanMetric() for _ in range(2))

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = mse_loss(self(batch[0]), batch[1])
        self.means[dataloader_idx].update(loss, len(batch[0]))
        self.log("val/loss", loss)
        self.log("val/object", self.means[dataloader_idx])
        self.log("val/largest", batch[1].max(), reduce="max")
        self.log("val/count", len(batch[0]), reduce="sum")


class Loaders(TinyData):
    """Several validation loaders, of any sizes."""

    def __init__(self, *sizes):
        super().__init__(8)
        self.sizes = sizes

    def val_dataloader(self):
        return [DataLoader(tiny_set(size, seed), batch_size=4) for seed, size in enumerate(self.sizes, start=1)]


def expected(module, samples, seed):
    inputs, targets = tiny_set(samples, seed).tensors
    with torch.no_grad():
        loss = mse_loss(module(inputs), targets).item()
    return {"loss": loss, "object": loss, "largest": targets.max().item(), "count": samples}


@pytest.mark.parametrize("sizes", [(9,), (9, 6)])
def test_metrics_are_over_all_samples_of_each_loader(sizes):
    torch.manual_seed(0)
    result = tiny_run(Three(), Loaders(*sizes))
    for index, size in enumerate(sizes):
        suffix = f"/dataloader_idx_{index}" if len(sizes) > 1 else ""
        wanted = expected(result.module, size, index + 1)
        found = {name: result.metrics[f"val/{name}{suffix}"] for name in wanted}
        assert found == pytest.approx(wanted, rel=1e-6)


def test_one_metric_object_for_several_loaders_is_refused():
    class Mixed(Three):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            super().validation_step(batch, batch_idx, 0)

    with pytest.raises(MetricError, match="'val/object' is one metric object that several loaders log"):
        tiny_run(Mixed(), Loaders(4, 4))


def test_a_limit_takes_the_first_batches_and_shares_are_of_the_loader():
    limits = [1, 3, 0.5, 1.0]
    runs = [tiny_run(Three(), Loaders(16), limit_validation_batches=limit) for limit in limits]
    assert [run.metrics["val/count"] for run in runs] == [4, 12, 8, 16]


# -- what it leaves behind


class Moody(TinyModule):
    """Note the mode of every part at each forward; one of them stays in eval mode."""

    def __init__(self):
        super().__init__(dropout=0.3)
        self.norm, self.frozen = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.frozen.eval()
        self.seen = []

    def forward(self, inputs):
        self.seen.append((torch.is_grad_enabled(), [m.training for m in self.modules()]))
        return super().forward(self.frozen(self.norm(inputs)))


def train_moody(**settings):
    torch.manual_seed(0)
    return tiny_run(Moody(), TinyData(16), max_epochs=2, **settings).module


def test_modes_come_back_module_by_module():
    module = train_moody(validate="1 step")
    training = [(grad, modes) for grad, modes in module.seen if grad]
    assert len(training) == 8
    assert all(modes == training[0][1] for _, modes in training)
    assert False in training[0][1], "the frozen part stays in eval mode"
    assert not any(mode for grad, modes in module.seen if not grad for mode in modes)


class Drawing(Moody):
    """Draw from every random stream in validation."""

    def validation_step(self, batch, batch_idx):
        torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002 - the global stream
        super().validation_step(batch, batch_idx)


def test_the_batches_tried_before_training_change_nothing():
    class Metrics(Logger):
        def __init__(self):
            self.steps = []

        def log_metrics(self, record):
            self.steps.append((record.kind, record.step))

    def train(sanity):
        torch.manual_seed(0)
        module, log, streams = Drawing(), Metrics(), []

        class Streams(Callback):
            def on_epoch_start(self, state):
                streams.extend([random.random(), np.random.rand(), torch.get_rng_state().tolist()])  # noqa: NPY002

        settings = {"every": "1 epoch", "sanity_batches": sanity}
        callbacks = {"streams": Streams()}
        tiny_run(module, TinyData(16), validate=settings, loggers={"log": log}, callbacks=callbacks)
        return module, log.steps, streams

    (with_it, steps, streams), (without, others, expected_streams) = train(2), train(0)
    assert sum(not grad for grad, _ in with_it.seen) == sum(not grad for grad, _ in without.seen) + 2
    assert (steps, streams) == (others, expected_streams)
    for name, value in with_it.state_dict().items():
        assert torch.equal(value, without.state_dict()[name]), name


def test_a_mistake_in_validation_shows_before_training():
    class Wrong(TinyModule):
        def validation_step(self, batch):
            raise ArithmeticError("as asked")

    recorder = Recorder(only=["on_step"])
    with pytest.raises(ArithmeticError):
        tiny_run(Wrong(), callbacks={"record": recorder})
    assert recorder.events == []


# -- the metric of a checkpoint


class Measured(TinyModule):
    """Its validation metric is a number that only these very weights have."""

    def validation_step(self, batch):
        self.log("val/sum", fingerprint(self.state_dict()))


def fingerprint(state):
    return sum(float(value.double().abs().sum()) for name, value in state.items() if name.startswith("net"))


@pytest.mark.parametrize("ema", [False, True], ids=["weights", "averages"])
def test_the_metric_of_a_checkpoint_was_produced_by_its_own_weights(ema, tmp_path):
    callbacks = {"ema": EMA(0.5)} if ema else {}
    result = tiny_run(
        Measured(), TinyData(16), callbacks=callbacks, runs_dir=tmp_path, max_epochs=3, validate="2 steps",
        checkpoint={"every": {"every": "2 steps", "at": [3]}, "monitor": "val/sum", "keep_last": 99},
    )  # fmt: skip
    found = Store(result.run_dir / "checkpoints").checkpoints()
    assert sorted(entry.manifest.step for entry in found) == [2, 3, 4, 6, 8, 10, 12]
    for entry in found:
        metrics = entry.manifest.meta["metrics"]
        if entry.manifest.step == 3:
            assert "val/sum" not in metrics, "an older model's value is not this one's"
            continue
        weights = load_file(entry.path / ("ema.safetensors" if ema else "model.safetensors"))
        assert metrics["val/sum"] == {"value": pytest.approx(fingerprint(weights)), "step": entry.manifest.step}
    best = min(entry.manifest.meta["metrics"]["val/sum"]["value"] for entry in found if entry.manifest.step != 3)
    assert result.best[0] == best


def test_a_checkpoint_that_monitors_what_nothing_logs_is_refused_at_the_first_validation():
    with pytest.raises(MetricError) as caught:
        tiny_run(checkpoint={"monitor": "val/los"})
    assert str(caught.value) == (
        "callbacks.checkpoint monitors 'val/los', which nothing logs.\n"
        "  The names that exist are train/loss, val/loss. Did you mean 'val/loss'?"
    )


def test_a_checkpoint_that_monitors_what_nothing_logs_is_refused_without_validation_too():
    with pytest.raises(MetricError, match="checkpoint monitors 'val/loss', which nothing logs"):
        tiny_run(checkpoint={"monitor": "val/loss"}, validate=None)


def test_a_checkpoint_may_monitor_the_mean_of_a_training_epoch(tmp_path):
    class Logs(TinyModule):
        def training_step(self, batch, batch_idx):
            self.log("train/own", batch_idx, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    result = tiny_run(Logs(), TinyData(16), checkpoint={"monitor": "train/own"}, runs_dir=tmp_path, max_epochs=2)
    assert result.best[:2] == (1.5, 4)


# -- a signal in validation


class Interrupt(Callback):
    """Ask to stop at once inside the validation of step ``step``, as a signal would."""

    def __init__(self, step):
        self.step = step

    def on_validation_batch(self, state, output):
        if state.progress.step == self.step:
            state.control.stop("a signal", urgent=True)


class Ends(Callback):
    def __init__(self):
        self.metrics = []

    def on_validation_end(self, state, metrics):
        self.metrics.append((state.progress.step, metrics is not None))


def test_a_validation_that_a_signal_cuts_short_is_made_up_for(tmp_path):
    settings = {"max_epochs": 2, "runs_dir": tmp_path, "checkpoint": {"monitor": "val/loss"}}
    ends = Ends()
    first = tiny_run(data=TinyData(16), callbacks={"interrupt": Interrupt(4), "ends": ends}, **settings)
    assert (first.status, first.step, ends.metrics) == ("stopped", 4, [(4, False)])
    ends = Ends()
    second = tiny_run(data=TinyData(16), callbacks={"ends": ends}, resume=str(first.run_dir), **settings)
    assert (second.step, ends.metrics) == (8, [(4, True), (8, True)])
    whole = tiny_run(data=TinyData(16), **settings)
    for own, other in zip(second.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(own, other)
    assert second.metrics["val/loss"] == whole.metrics["val/loss"]


def test_an_ordinary_stop_lets_the_validation_end():
    ends = Ends()
    stopped = tiny_run(data=TinyData(16), callbacks={"stop": StopAt(4), "ends": ends}, max_epochs=2)
    assert (stopped.step, ends.metrics) == (4, [(4, True)])
