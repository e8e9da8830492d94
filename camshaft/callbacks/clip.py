"""Clip gradients before each update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from camshaft.callback import Callback
from camshaft.errors import RecipeError

if TYPE_CHECKING:
    from camshaft.state import State


class ClipGradients(Callback):
    """Scale all gradients so that their joint L2 norm is at most ``max_norm``, or clamp each to ``max_value``.

    The norm is over all ranks' shards. Logs ``train/grad_norm``, the norm before clipping, as a
    device scalar (no host sync).
    """

    def __init__(self, max_norm: float | None = None, *, max_value: float | None = None) -> None:
        if (max_norm is None) == (max_value is None):
            raise RecipeError(
                f"ClipGradients has max_norm={max_norm} and max_value={max_value}.",
                why="It clips in one way.",
                fix="Give exactly one of them.",
            )
        for name, bound in (("max_norm", max_norm), ("max_value", max_value)):
            if bound is not None and not bound > 0:
                raise RecipeError(
                    f"ClipGradients.{name} is {bound}; it must be positive, or every update would be zero.",
                    fix="Give the bound you want, often 1.0, or remove the callback to train unclipped.",
                )
        self.max_norm = max_norm
        self.max_value = max_value

    def on_gradients(self, state: State) -> None:
        """Clip, and log the norm that was found."""
        if self.max_norm is not None:
            state.metrics.log("train/grad_norm", state.strategy.clip_grad_norm(self.max_norm))
        elif self.max_value is not None:
            state.strategy.clip_grad_value(self.max_value)
