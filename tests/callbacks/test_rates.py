"""The learning rate that is logged is the one the update used; rates of progress count what was trained."""

import time

import pytest
import torch

from camshaft.callback import Callback
from camshaft.callbacks.lr import LRMonitor
from camshaft.callbacks.throughput import Throughput
from camshaft.loggers.base import Logger
from camshaft.testing import TinyData, TinyModule, tiny_run


class Keep(Logger):
    def __init__(self):
        self.values = {}

    def log_metrics(self, record):
        if record.kind == "step":
            self.values[record.step] = record.values


class Used(Callback):
    """Note the rate just before each update."""

    def __init__(self):
        self.rates = []

    def on_gradients(self, state):
        self.rates.append([group["lr"] for optimizer in state.optimizers for group in optimizer.param_groups])


def stepped(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"},
    }


def test_the_rate_is_that_of_the_update():
    keep, used = Keep(), Used()
    monitor = LRMonitor(momentum=True, weight_decay=True)
    callbacks = {"lr_monitor": monitor, "used": used}
    tiny_run(TinyModule(configure=stepped), callbacks=callbacks, loggers={"keep": keep}, log_every=2)
    assert {step: values["lr"] for step, values in keep.values.items()} == {
        step: used.rates[step - 1][0] for step in (2, 4, 6)
    }
    assert keep.values[2]["momentum"] == 0.9
    assert keep.values[2]["weight_decay"] == pytest.approx(0.01)


def test_groups_have_a_rate_each_through_all_optimizers():
    def two(module):
        layers = [module.net[0], module.net[3]]
        return [torch.optim.SGD(layer.parameters(), lr=lr) for layer, lr in zip(layers, (0.1, 0.2), strict=True)]

    keep = Keep()
    tiny_run(TinyModule(configure=two), callbacks={"lr_monitor": LRMonitor()}, loggers={"keep": keep}, log_every=3)
    found = {name: value for name, value in keep.values[3].items() if name.startswith("lr")}
    assert found == {"lr/0": 0.1, "lr/1": 0.2}


class Slow(TinyModule):
    """Take a known time a step, and far more in validation."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        time.sleep(0.2)
        super().validation_step(batch, batch_idx)

    def batch_weight(self, batch):
        return 3.0 * len(batch[0])


def test_rates_count_all_that_was_trained_and_leave_validation_out():
    keep = Keep()
    tiny_run(
        Slow(), TinyData(24), callbacks={"throughput": Throughput()}, loggers={"keep": keep}, log_every=6,
        validate="3 steps", max_epochs=2,
    )  # fmt: skip
    for values in keep.values.values():
        # With validation counted it could not pass 5, and without the pauses in a step it could.
        assert 6 < values["speed/steps_per_s"] < 100
        assert values["speed/samples_per_s"] == pytest.approx(4 * values["speed/steps_per_s"])
        assert values["speed/tokens_per_s"] == pytest.approx(12 * values["speed/steps_per_s"])
