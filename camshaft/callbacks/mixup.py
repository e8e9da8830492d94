"""Train on mixtures of samples and of their labels."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from camshaft.callback import Callback
from camshaft.errors import CallbackError, RecipeError
from camshaft.sampler import derive_seed

if TYPE_CHECKING:
    from camshaft.state import Batch, State


class Mixup(Callback):
    """Blend every sample of a training batch with another one of it, and their labels alike.

    For batches (inputs, labels, ...): inputs are floats of shape (batch, ...), labels integers of shape
    (batch,). The module's loss gets class probabilities, (batch, ``num_classes``) in the inputs' dtype,
    as ``cross_entropy`` takes them. One weight a micro-batch, drawn from Beta(alpha, alpha). Draws follow
    from (seed, rank, micro-batch) and from nothing else, so that a resumed run makes the same.

    Source: Zhang et al. (2018), mixup: Beyond Empirical Risk Minimization.
    """

    def __init__(self, num_classes: int, *, alpha: float = 0.2) -> None:
        if alpha <= 0 or num_classes < 2:
            raise RecipeError(
                f"Mixup has num_classes={num_classes} and alpha={alpha}.",
                fix="Give the number of classes, at least 2, and a positive alpha such as 0.2.",
            )
        self.num_classes = num_classes
        self.alpha = alpha

    def on_batch(self, state: State, batch: Batch) -> Batch:
        """Return the mixture."""
        inputs, labels, rest = _parts(batch)
        seed = derive_seed(state.seed, "mixup", state.strategy.data_rank, state.progress.micro_step)
        weight = random.Random(seed).betavariate(self.alpha, self.alpha)  # noqa: S311 - not for secrets
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(inputs.device)
        targets = one_hot(labels, self.num_classes).to(inputs.dtype)
        mixed = (torch.lerp(inputs[order], inputs, weight), torch.lerp(targets[order], targets, weight), *rest)
        return mixed if isinstance(batch, tuple) else list(mixed)


def _parts(batch: Batch) -> tuple[Tensor, Tensor, list[object]]:
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        inputs, labels, *rest = batch
        are_tensors = isinstance(inputs, Tensor) and isinstance(labels, Tensor)
        if are_tensors and inputs.is_floating_point() and labels.ndim == 1 and labels.dtype is torch.int64:
            return inputs, labels, rest
    raise CallbackError(
        "Mixup got a batch that is not (float inputs, int64 labels of shape (batch,), ...).",
        why="Only such samples and labels can be blended.",
        fix="Let the dataset return (inputs, label), or remove callbacks.mixup.",
    )
