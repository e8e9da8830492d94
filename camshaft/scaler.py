"""Scale the loss so that float16 gradients do not underflow, on any device and any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from camshaft.errors import LossError

_SMALLEST, _LARGEST = 2.0**-24, 2.0**126


class LossScaler:
    """Multiply the loss by ``scale``; halve it after an overflow, double it after ``growth_interval`` good steps.

    The scale is a host number, the same on every rank. Whether gradients overflowed is read on the
    host once a step: a step that may not be taken cannot be decided later.

    Source: dynamic loss scaling, Micikevicius et al. (2018).
    """

    def __init__(
        self,
        *,
        scale: float = 65536.0,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        self.scale = scale
        self.growth = growth
        self.backoff = backoff
        self.growth_interval = growth_interval
        self.good_steps = 0
        self._any_rank = any_rank

    def unscale(self, parameters: Iterable[Tensor]) -> bool:
        """Divide the gradients by the scale, in place; say whether all of them, on all ranks, are finite."""
        return self.unscale_gradients([p.grad for p in parameters if p.grad is not None])

    def unscale_gradients(self, gradients: Sequence[Tensor]) -> bool:
        """Do as ``unscale`` with the gradients themselves."""
        found = False
        for alike in _by_device(gradients):
            overflow = alike[0].new_zeros((), dtype=torch.float32)
            inverse = overflow.new_full((), 1.0 / self.scale)
            torch._amp_foreach_non_finite_check_and_unscale_(list(alike), overflow, inverse)
            found = found or bool(overflow.item())
        return not self._any_rank(found)

    def update(self, *, finite: bool) -> None:
        """Adapt the scale after a step that was taken (``finite``) or skipped.

        Raises:
            LossError: gradients overflow however small the scale is: they are not finite by themselves.
        """
        if not finite:
            self.scale *= self.backoff
            self.good_steps = 0
            if self.scale < _SMALLEST:
                raise LossError(
                    f"the gradients are still not finite with the loss scaled by {self.scale:.3g}.",
                    why="No scale helps: the loss or its gradient is NaN or infinite, and no step would be taken.",
                    fix="Look for a division by zero or log(0), lower the learning rate, or use bf16.",
                )
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            # float32 holds the scaled loss; GradScaler does not grow past it either.
            self.scale = min(self.scale * self.growth, _LARGEST)
            self.good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and how long it has held."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])


def _by_device(gradients: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Group local gradient tensors by device and dtype, which the fused check needs."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        local = local._values() if local.is_sparse else local  # noqa: SLF001 - as GradScaler reaches sparse gradients
        groups.setdefault((local.device, local.dtype), []).append(local)
    return groups.values()
