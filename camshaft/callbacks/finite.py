"""Watch for a loss that is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from camshaft.callback import Callback
from camshaft.errors import LossError, RecipeError

if TYPE_CHECKING:
    from camshaft.state import Checkpoint, State


GIVE_UP = 100


class FiniteLoss(Callback):
    """Raise, skip the update, or go on when a loss is NaN or infinite.

    ``raise`` keeps the first bad step on the device and looks at log steps and before a checkpoint,
    so that none is poisoned; on the CPU, where looking is free, it looks at once. ``skip`` decides for
    all ranks before each update, which reads the device once a step; after 100 skipped in a row it raises,
    because a run counted in steps would never end.
    """

    def __init__(self, policy: Literal["raise", "skip", "ignore"] = "raise") -> None:
        if policy not in ("raise", "skip", "ignore"):
            raise RecipeError(f"FiniteLoss.policy is {policy!r}.", fix="Use raise, skip or ignore.")
        self.policy = policy
        self.needs_host_sync = policy == "skip"
        self.skipped = 0
        self._in_a_row = 0
        self._first_bad: Tensor | None = None
        self._bad: Tensor | None = None

    def on_backward(self, state: State, loss: Tensor) -> None:
        """Note whether this micro-batch's loss is finite."""
        if self.policy == "ignore":
            return
        is_bad = ~torch.isfinite(loss.detach())
        if self.policy == "skip":
            self._bad = is_bad if self._bad is None else self._bad | is_bad
        elif loss.is_cpu:
            if is_bad.item():
                self._raise(state.progress.step + 1)
        else:
            step = torch.where(is_bad, state.progress.step + 1, torch.iinfo(torch.int64).max)
            self._first_bad = step if self._first_bad is None else torch.minimum(self._first_bad, step)

    def on_gradients(self, state: State) -> None:
        """Skip the update on all ranks when any of them found a bad loss."""
        if self.policy == "skip" and self._bad is not None:
            found, self._bad = bool(self._bad.item()), None
            if not state.strategy.any(found):
                self._in_a_row = 0
                return
            self.skipped += 1
            self._in_a_row += 1
            if self._in_a_row >= GIVE_UP:
                raise LossError(
                    f"{GIVE_UP} losses in a row were not finite, up to step {state.progress.step + 1}.",
                    why="Nothing is learned any more, and skipping changes nothing about it.",
                    fix="Go back to an earlier checkpoint with a lower learning rate, or check the data.",
                )
            state.control.skip_step("the loss is not finite")

    def on_step(self, state: State) -> None:
        """Look at log steps."""
        if state.progress.step % state.limits.log_every == 0:
            self._look()

    def on_checkpoint(self, state: State, checkpoint: Checkpoint) -> None:
        """Look before anything is saved."""
        del state, checkpoint
        self._look()

    def _look(self) -> None:
        if self._first_bad is not None:
            first, self._first_bad = int(self._first_bad.item()), None
            if first < torch.iinfo(torch.int64).max:
                self._raise(first)

    def _raise(self, step: int) -> None:
        raise LossError(
            f"the loss is not finite at step {step}.",
            why="Every later update would spread it through the weights.",
            fix="Lower the learning rate, clip gradients, or check the batch; "
            "callbacks.finite.policy=skip leaves such steps out, ignore goes on.",
        )
