"""Measure how noisy gradients are, and so how large a batch is worth its samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from camshaft.callback import Callback
from camshaft.errors import CallbackError, RecipeError
from camshaft.schedule import Schedule, ScheduleLike

if TYPE_CHECKING:
    from camshaft.state import Batch, State


class GradientNoiseScale(Callback):
    """Log ``train/noise_scale``: the batch size at which a step gains half of what an infinite batch would bring.

    On the steps that are due, the norm of each micro-batch's own gradient is compared with the norm of the
    step's mean gradient, over all ranks. With b samples a micro-batch and B a step,
    E|g_b|^2 = |G|^2 + S/b and E|g_B|^2 = |G|^2 + S/B give the squared gradient |G|^2 and its noise S
    without bias; both are averaged with ``decay`` before their ratio S/|G|^2 is taken. In units of
    ``batch_weight`` where the module has one, else of samples. Costs a norm a parameter on those steps and
    one small reduction; nothing on others. Losses returned as (sum, weight) need ``batch_weight``.

    Source: McCandlish et al. (2018), An Empirical Model of Large-Batch Training, appendix A.1.
    """

    def __init__(self, every: ScheduleLike = "10 steps", *, decay: float = 0.9) -> None:
        if not 0 <= decay < 1:
            raise RecipeError(f"GradientNoiseScale.decay is {decay}.", fix="Use 0 for no averaging, or 0.9.")
        self.schedule = Schedule.parse(every)
        self.decay = decay
        self._hooks: list[Any] = []
        self._squares: list[Tensor] = []
        # Sums over micro-batches: |contribution|^2 / weight^2, 1 / weight, count, weight.
        self._sums: list[Any] = []
        self._averages: list[float] | Tensor | None = None

    def on_fit_start(self, state: State) -> None:
        """Refuse a run in which there is nothing to compare."""
        if state.stage == "fit" and state.accumulate * state.strategy.data_world_size < 2:
            raise CallbackError(
                f"callbacks.{self.name} compares micro-batches, and a step of this run has one.",
                why="One gradient has no noise that could be seen.",
                fix="Set accumulate to 2 or more with the same batch_size, or train on several processes.",
            )

    def on_step_start(self, state: State, window: list[Batch]) -> None:
        """Listen to gradients as backward hands them to the parameters, before they are summed or reduced."""
        del window
        self._stop()
        self._sums = []
        trainable: list[Any] = [p for p in state.module.parameters() if p.requires_grad]
        self._hooks = [p.register_hook(self._take) for p in trainable]

    def on_backward(self, state: State, loss: Tensor) -> None:
        """Sum up one micro-batch."""
        del loss
        if not self._squares:
            raise _not_whole(self.name, state)
        square, weight = torch.stack(self._squares).sum(), float(state.metrics.weight)
        self._squares = []
        if weight > 0 and not state.metrics.muted:
            scaler = state.strategy.scaler
            scale = weight * (scaler.scale if scaler is not None else 1.0)
            self._sums.append((square / scale**2, 1 / weight, 1.0, weight))

    def on_gradients(self, state: State) -> None:
        """Compare with the mean gradient, and log."""
        self._stop()
        gradients = [p.grad for p in state.module.parameters() if p.grad is not None]
        if not gradients or any(hasattr(gradient, "to_local") for gradient in gradients):
            raise _not_whole(self.name, state)
        device, world = state.strategy.device, state.strategy.data_world_size
        columns = list(zip(*self._sums, strict=True)) or [(0.0,)] * 4
        own = torch.stack([torch.as_tensor(sum(column), dtype=torch.float64, device=device) for column in columns])
        squares, inverses, count, total = state.strategy.reduce_data(own).unbind()
        small, inverse = squares * (total / world) ** 2 / count, inverses / count
        large = torch.stack(torch._foreach_norm(gradients)).double().square().sum()  # noqa: SLF001 - one call for all
        noise = (small - large) / (inverse - 1 / total)
        self._log(state, torch.stack([noise, large - noise / total]))

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        averages = self._averages.tolist() if isinstance(self._averages, Tensor) else self._averages
        return {"averages": averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        self._averages = state["averages"]

    def _take(self, gradient: Tensor) -> None:
        self._squares.append(gradient.detach().float().square().sum())

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._squares = [], []

    def _log(self, state: State, found: Tensor) -> None:
        before = self._averages
        if before is None:
            averages = found
        else:
            averages = (
                self.decay * torch.as_tensor(before, dtype=found.dtype, device=found.device) + (1 - self.decay) * found
            )
        self._averages = averages
        state.metrics.log("train/noise_scale", averages[0] / averages[1], batch_size=1)


def _not_whole(name: str, state: State) -> CallbackError:
    return CallbackError(
        f"callbacks.{name} sees no whole gradients under strategy {state.strategy.name}.",
        why="Each rank has a part of them only, and never those of one micro-batch.",
        fix="Measure the noise scale under single or ddp; it is a property of the model and the data.",
    )
