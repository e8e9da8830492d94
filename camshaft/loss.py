"""Check that what a training step returned can be trained on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from camshaft.errors import LossError


def check_loss(loss: Any, owner: str) -> Tensor:
    """Return the loss if it can be trained on.

    Raises:
        LossError: it is no tensor, no scalar, or depends on no parameter.
    """
    if not isinstance(loss, Tensor):
        raise LossError(
            f"{owner}.training_step returned a {type(loss).__name__}.",
            fix="Return the loss (a scalar tensor), a (sum, weight) pair, a dict with 'loss', or None to skip.",
        )
    if loss.numel() != 1:
        raise LossError(
            f"{owner}.training_step returned a loss of shape {tuple(loss.shape)}.",
            why="Only a scalar has a gradient.",
            fix="Return its mean(), or (loss.sum(), weight).",
        )
    if not loss.requires_grad:
        raise LossError(
            f"{owner}.training_step returned a loss without a gradient.",
            why="It depends on no trainable parameter, or was detached, so nothing would learn.",
            fix="Compute it from the module's parameters, outside torch.no_grad().",
        )
    return loss
