"""Memory does not grow with steps, and predictions are not kept."""

import gc
import tracemalloc
import weakref

import torch

from camshaft import Module
from camshaft.callback import Callback
from camshaft.callbacks.clip import ClipGradients
from camshaft.callbacks.ema import EMA
from camshaft.callbacks.lr import LRMonitor
from camshaft.callbacks.predictions import PredictionWriter
from camshaft.callbacks.throughput import Throughput
from camshaft.direct import direct_parts
from camshaft.session import execute
from camshaft.testing import TinyData, TinyModule, tiny_run


class Small(Module):
    """As little work as possible, with everything logged that a step can log."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def training_step(self, batch):
        loss = (batch[0] * self.weight).sum().square()
        self.log("train/own", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Measure(Callback):
    """Note, in the middle and at the end, what Python holds and how many tensors there are."""

    def __init__(self, middle, end):
        self.at = (middle, end)
        self.held = []

    def on_step(self, state):
        if state.progress.step in self.at:
            gc.collect()
            tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
            self.held.append((tracemalloc.get_traced_memory()[0], tensors))


def test_thousands_of_steps_hold_no_more_than_the_first():
    measure = Measure(500, 2500)
    callbacks = {
        "clip": ClipGradients(1.0), "ema": EMA(0.9), "lr": LRMonitor(), "speed": Throughput(), "measure": measure,
    }  # fmt: skip
    tracemalloc.start(1)
    try:
        tiny_run(Small(), TinyData(400), callbacks=callbacks, accumulate=1, max_steps=2500, validate=None)
    finally:
        tracemalloc.stop()
    (before, tensors_before), (after, tensors_after) = measure.held
    assert after - before < 20_000, "bytes over 2000 steps"
    assert tensors_after == tensors_before


def test_predictions_are_written_and_let_go(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alive, most = weakref.WeakSet(), []

    class Predicts(TinyModule):
        def predict_step(self, batch):
            output = self(batch[0])
            alive.add(output)
            most.append(len(alive))
            return output

    trained = tiny_run(runs_dir=tmp_path, checkpoint={}).run_dir
    parts = direct_parts(
        Predicts(), TinyData(samples=800), strategy="single", name="predicts", loggers={},
        callbacks={"write": PredictionWriter(), "progress": None, "summary": None},
        settings={"device": "cpu", "runs_dir": tmp_path, "max_epochs": 1},
    )  # fmt: skip
    execute(parts, "predict", str(trained))
    assert len(most) == 100
    assert max(most) <= 3
