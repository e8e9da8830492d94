"""Make one optimizer update out of a window of micro-batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from camshaft.data import Window
from camshaft.errors import LossError
from camshaft.loss import check_loss

if TYPE_CHECKING:
    from camshaft.hooks import Hooks
    from camshaft.state import State


def train_step(state: State, window: Window, hooks: Hooks) -> bool:
    """Run every micro-batch of the window and update once; say whether the update was taken.

    Every rank calls this with its own micro-batches. The gradient is that of the mean loss over all
    samples of the window and all ranks, however unevenly they are spread.
    """
    strategy, progress, metrics = state.strategy, state.progress, state.metrics
    hooks.on_step_start(state, window.batches)
    strategy.zero_grad()
    weighting = Weighting(state, window)
    last = len(window.batches) - 1
    for index in range(last + 1):
        strategy.micro_step(sync=index == last, precision=state.precision)
        batch = hooks.on_batch(state, strategy.to_device(window.batches[index]))
        metrics.weight, metrics.muted = weighting.weights[index], not window.samples[index]
        loss, share = weighting.weigh(index, strategy.run("training_step", batch, window.first + index))
        strategy.backward(share)
        progress.micro_step += 1
        hooks.on_backward(state, loss)
    metrics.muted = False
    if weighting.is_late:
        weighting.divide_gradients()
    if strategy.scaler is None or strategy.unscale():
        hooks.on_gradients(state)
    state.in_update = True
    took = strategy.step(skip=weighting.is_empty or state.control.skipping is not None)
    state.control.skipping = None
    if not took:
        state.in_update = False
        progress.skipped_steps += 1
        return False
    progress.step += 1
    progress.samples += window.total
    progress.tokens += weighting.tokens
    for plan in state.step_plans:
        plan.advance(progress.step)
    hooks.on_step(state)
    state.in_update = False
    return True


class Weighting:
    """Weigh the micro-batches of a window, so that their gradients sum to that of the whole window's mean.

    Strategies average gradients over ranks, so a loss that is the mean over ``n`` of the window's
    ``total`` samples is divided by ``total / (n * world_size)``: by the number of micro-batches when
    all are alike, as a hand-written loop does, bit for bit.

    Where the module has ``batch_weight``, weights are its own and their total is reduced over ranks
    once a step. A (sum, weight) pair without it has its gradients divided after the last backward.

    Attributes:
        is_late: whether gradients are to be divided after the last backward.
        is_empty: whether no micro-batch of the only rank gave a loss, so that there is nothing to update with.
        tokens: the window's weight over all ranks where the module has ``batch_weight``, else 0.
    """

    # Defaults of what most windows never set: one is made every step.
    is_late = is_empty = False
    tokens = _late_weight = 0.0
    _nothing = 0

    def __init__(self, state: State, window: Window) -> None:
        self._state = state
        self._metrics = state.metrics
        self._world = state.strategy.data_world_size
        self.weights: list[Any] = window.samples
        self._total: float = window.total
        if state.weighs_batches:
            batches = zip(window.batches, window.samples, strict=True)
            self.weights = [float(state.module.batch_weight(b)) if n else 0.0 for b, n in batches]
            total = torch.tensor(sum(self.weights), dtype=torch.float64)
            self._total = self.tokens = float(state.strategy.reduce_data(total))

    def weigh(self, index: int, output: Any) -> tuple[Tensor, Tensor]:
        """Return the loss of a micro-batch and its share of the window's; record its mean as ``train/loss``."""
        if type(output) is Tensor and output.requires_grad and output.numel() == 1:
            weight = self.weights[index]
            self._metrics.log_loss(output, weight)
        else:
            output, weight = self._read(index, output)
        divisor = self._total / (weight * self._world) if weight else math.inf
        return output, output if divisor == 1 else output / divisor

    def divide_gradients(self) -> None:
        """Divide the gradients by a weight that was only known after the forward passes."""
        strategy = self._state.strategy
        total = float(strategy.reduce_data(torch.tensor(self._late_weight, dtype=torch.float64)))
        strategy.scale_gradients(self._world / total if total else 0.0)

    def _read(self, index: int, output: Any) -> tuple[Tensor, float]:
        """Read every other shape than a plain loss: a dict, a pair, None, or what cannot be trained on."""
        if isinstance(output, dict):
            output = output.get("loss")
        if output is None:
            self._nothing += 1
            self.is_empty = self._world == 1 and self._nothing == len(self.weights)
            return self._state.strategy.zero_loss(), self.weights[index]
        owner = type(self._state.module).__name__
        if isinstance(output, tuple):
            if len(output) != len(("sum", "weight")):
                raise LossError(
                    f"{owner}.training_step returned a tuple of {len(output)}.",
                    fix="Return the loss, or (sum, weight).",
                )
            return self._read_pair(index, check_loss(output[0], owner), float(output[1]))
        loss = check_loss(output, owner)
        self._metrics.log_loss(loss, self.weights[index])
        return loss, self.weights[index]

    def _read_pair(self, index: int, loss: Tensor, weight: float) -> tuple[Tensor, float]:
        """Return the sum, weighed so that its share is sum * world / total, or the sum itself until that is known."""
        self._metrics.log_loss(loss / weight if weight else loss * 0.0, weight)
        counts = 1.0 if self.weights[index] else 0.0
        if not self._state.weighs_batches:
            self.is_late = True
            self._late_weight += weight * counts
            return loss, counts * self._total / self._world
        return loss, counts
