"""Make one optimizer update out of a window of micro-batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from camshaft.data import Window
from camshaft.errors import LossError
from camshaft.strategies.base import check_loss

if TYPE_CHECKING:
    from camshaft.hooks import Hooks
    from camshaft.state import State


def train_step(state: State, window: Window, hooks: Hooks) -> bool:
    """Run every micro-batch of the window and update once; say whether the update was taken.

    Every rank calls this with its own micro-batches. The gradient is that of the mean loss over all
    samples of the window and all ranks, however unevenly they are spread.
    """
    strategy, progress = state.strategy, state.progress
    hooks.on_step_start(state, window.batches)
    strategy.zero_grad()
    weighting = Weighting(state, window)
    last = len(window.batches) - 1
    for index in range(last + 1):
        strategy.micro_step(sync=index == last, precision=state.precision)
        batch = hooks.on_batch(state, strategy.to_device(window.batches[index]))
        state.metrics.weight, state.metrics.muted = weighting.weights[index], not window.samples[index]
        loss = weighting.read(index, strategy.run("training_step", batch, window.first + index))
        strategy.backward(weighting.scale(index, loss))
        progress.micro_step += 1
        hooks.on_backward(state, loss)
    state.metrics.muted = False
    weighting.finish()
    if strategy.unscale():
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
    """

    __slots__ = ("_late", "_late_weight", "_none", "_owner", "_state", "_total", "_world", "tokens", "weights")

    def __init__(self, state: State, window: Window) -> None:
        self._state = state
        self._world = state.strategy.world_size
        self._late = False
        self._late_weight = 0.0
        self._none = 0
        self.tokens = 0.0
        if state.weighs_batches:
            batches = zip(window.batches, window.samples, strict=True)
            self.weights: list[Any] = [float(state.module.batch_weight(b)) if n else 0.0 for b, n in batches]
            total = torch.tensor(sum(self.weights), dtype=torch.float64)
            self._total = self.tokens = float(state.strategy.reduce(total))
        else:
            self.weights = window.samples
            self._total = window.total

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch of the only rank gave a loss, so that there is nothing to update with."""
        return self._none == len(self.weights) and self._world == 1

    def read(self, index: int, output: Any) -> Tensor:
        """Return the loss to run backward on, and record its mean as ``train/loss``."""
        if isinstance(output, dict):
            output = output.get("loss")
        if output is None:
            self._none += 1
            return self._state.strategy.zero_loss()
        owner = type(self._state.module).__name__
        if isinstance(output, tuple):
            if len(output) != 2:
                raise LossError(
                    f"{owner}.training_step returned a tuple of {len(output)}.",
                    fix="Return the loss, or (sum, weight).",
                )
            return self._read_pair(index, check_loss(output[0], owner), float(output[1]))
        loss = check_loss(output, owner)
        self._state.metrics.log_loss(loss, self.weights[index])
        return loss

    def scale(self, index: int, loss: Tensor) -> Tensor:
        """Divide a loss by its share of the window."""
        if self._late:
            return loss if self.weights[index] else loss * 0.0
        weight = self.weights[index]
        divisor = self._total / (weight * self._world) if weight else math.inf
        return loss if divisor == 1 else loss / divisor

    def finish(self) -> None:
        """Divide the gradients, where the weight was only known after the forward passes."""
        if self._late:
            strategy = self._state.strategy
            total = float(strategy.reduce(torch.tensor(self._late_weight, dtype=torch.float64)))
            strategy.scale_gradients(self._world / total if total else 0.0)

    def _read_pair(self, index: int, loss: Tensor, weight: float) -> Tensor:
        self._state.metrics.log_loss(loss / weight if weight else loss * 0.0, weight)
        if self._state.weighs_batches:
            # ``scale`` divides by total / (weight * world): undo the mean that a scalar would be.
            return loss / self.weights[index] if self.weights[index] else loss
        self._late = True
        self._late_weight += weight if self.weights[index] else 0.0
        return loss
