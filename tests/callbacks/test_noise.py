"""The noise scale is that of the formula, and near the truth where that is known."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from camshaft import Module
from camshaft.callback import Callback
from camshaft.callbacks.noise import GradientNoiseScale
from camshaft.errors import CallbackError, RecipeError
from camshaft.loggers.base import Logger
from camshaft.testing import TinyModule, tiny_run


class Keep(Logger):
    def __init__(self):
        self.values = {}

    def log_metrics(self, record):
        if record.kind == "step" and "train/noise_scale" in record.values:
            self.values[record.step] = record.values["train/noise_scale"]


class ByHand(Callback):
    """Compute the scale of a step from the gradient of each micro-batch alone."""

    def __init__(self):
        self.scales, self.batches = [], []

    def on_step_start(self, state, window):
        squares, parameters = [], list(state.module.parameters())
        for inputs, targets in window:
            loss = nn.functional.mse_loss(state.module(inputs), targets)
            squares.append(torch.autograd.grad(loss, parameters))
        small = sum(sum(g.square().sum() for g in grads) for grads in squares).item() / len(squares)
        mean = [torch.stack(parts).mean(0) for parts in zip(*squares, strict=True)]
        large = sum(g.square().sum() for g in mean).item()
        b, total = len(window[0][0]), sum(len(inputs) for inputs, _ in window)
        noise = (small - large) / (1 / b - 1 / total)
        self.scales.append(noise / (large - noise / total))


def test_it_is_the_formula_of_its_source():
    torch.manual_seed(0)
    keep, by_hand = Keep(), ByHand()
    noise = GradientNoiseScale("1 step", decay=0.0)
    tiny_run(
        TinyModule(), callbacks={"by_hand": by_hand, "noise": noise}, loggers={"keep": keep}, accumulate=3, log_every=1
    )
    assert list(keep.values.values()) == pytest.approx(by_hand.scales, rel=1e-3)
    assert len(keep.values) == 2


class Offset(Module):
    """A gradient with a known mean and noise: the loss of one number against normal samples."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.tensor(3.0))

    def training_step(self, batch):
        return ((self.place - batch[0]) ** 2).mean() / 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_it_is_near_the_truth_where_that_is_known():
    torch.manual_seed(1)
    samples = TensorDataset(2.0 * torch.randn(64000))
    keep = Keep()
    tiny_run(
        Offset(), DataLoader(samples, batch_size=16), callbacks={"noise": GradientNoiseScale("1 step", decay=0.99)},
        loggers={"keep": keep}, accumulate=4, log_every=1000, max_epochs=1,
    )  # fmt: skip
    # The gradient is 3 with variance 4: noise over squared gradient is 4 / 9.
    assert list(keep.values.values())[-1] == pytest.approx(4 / 9, rel=0.3)


def test_a_step_of_one_micro_batch_is_refused():
    with pytest.raises(CallbackError, match="compares micro-batches"):
        tiny_run(callbacks={"noise": GradientNoiseScale("2 steps")})


def test_a_decay_that_makes_no_sense_is_refused():
    with pytest.raises(RecipeError, match=r"GradientNoiseScale\.decay is 1\.0"):
        GradientNoiseScale(decay=1.0)
