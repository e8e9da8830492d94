"""Keep an exponential moving average of the weights."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from camshaft.callback import Callback
from camshaft.errors import CheckpointError, RecipeError

if TYPE_CHECKING:
    from camshaft.state import Checkpoint, State


class EMA(Callback):
    """Average the trainable weights: avg <- decay * avg + (1 - decay) * weight, after each update.

    Averages are float32 on the module's device, one per trainable parameter; with sharded parameters
    each rank keeps its shard, without communication. Early updates use min(decay, (1 + n) / (10 + n)),
    so they are not held by the initial weights. With ``evaluate`` validation, testing and prediction
    run on the averages. Checkpoints hold them beside the raw weights, as ``ema``. Buffers, such as
    running statistics, are the module's own.

    Source: Polyak and Juditsky (1992); warm-up as in TensorFlow's ExponentialMovingAverage.
    """

    def __init__(self, decay: float = 0.999, *, warmup: bool = True, evaluate: bool = True) -> None:
        if not 0 <= decay < 1:
            raise RecipeError(
                f"EMA.decay is {decay}.", why="The average would never move, or grow.", fix="Use 0.9 to 0.9999."
            )
        self.decay = decay
        self.warmup = warmup
        self.evaluate = evaluate
        self.updates = 0
        self.averages: dict[str, Tensor] = {}
        self._own: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._same_dtype = True
        self._swap = ExitStack()

    def on_fit_start(self, state: State) -> None:
        """Begin with a copy of the weights, unless the averages were restored."""
        trainable = _trainable(state)
        for name, weight in trainable.items():
            if name not in self.averages:
                self.averages[name] = weight.detach().to(torch.float32, copy=True)
        self._own = [self.averages[name] for name in trainable]
        self._weights = list(trainable.values())
        self._same_dtype = all(weight.dtype is torch.float32 for weight in self._weights)

    @torch.no_grad()
    def on_step(self, state: State) -> None:
        """Move the averages toward the weights."""
        del state
        count = self.updates = self.updates + 1
        decay = min(self.decay, (1 + count) / (10 + count)) if self.warmup else self.decay
        weights = self._weights if self._same_dtype else [w.float() for w in self._weights]
        torch._foreach_lerp_(self._own, weights, 1 - decay)

    def on_validation_start(self, state: State) -> None:
        """Put the averages in place of the weights."""
        if self.evaluate and self.averages:
            self._swap.enter_context(state.strategy.swapped(self.averages))

    def on_validation_end(self, state: State, metrics: dict[str, float] | None) -> None:
        """Put the weights back, exactly."""
        del state, metrics
        self._swap.close()

    def on_exception(self, state: State, error: BaseException) -> None:
        """Put the weights back when an evaluation failed."""
        del state, error
        self._swap.close()

    def on_checkpoint(self, state: State, checkpoint: Checkpoint) -> None:
        """Add this rank's part of the averages."""
        for name, average in self.averages.items():
            entry = state.strategy.shard(name, average)
            if entry is not None:
                checkpoint.tensors[f"ema/{name}"] = entry

    def on_restore(self, state: State, checkpoint: Checkpoint) -> None:
        """Take the averages back.

        Raises:
            CheckpointError: the checkpoint was written without this callback.
        """
        saved = set(checkpoint.reader.names("ema"))
        for name, weight in _trainable(state).items():
            average = torch.empty_like(weight, dtype=torch.float32)
            if f"ema/{name}" not in saved:
                raise CheckpointError(
                    f"the checkpoint has no average of {name!r} for callback {self.name!r}, which this recipe added.",
                    why=f"Its average would restart from step {checkpoint.step}.",
                    fix=f"Remove callbacks.{self.name}, or start anew with resume=never.",
                )
            state.strategy.load(name, average, checkpoint.reader, f"ema/{name}")
            self.averages[name] = average

    def state_dict(self) -> dict[str, Any]:
        """Return how many updates the averages have seen."""
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the count back."""
        self.updates = int(state["updates"])


def _trainable(state: State) -> dict[str, Tensor]:
    later = {name for named, _ in state.module.later_groups for name in named}
    names = {name for name, p in state.module.named_parameters() if p.requires_grad or name in later}
    return {name: weight for name, weight in state.strategy.named_local() if name in names}
