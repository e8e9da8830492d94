"""Give a rank whose step returned no loss the collectives that its peers make in their backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from camshaft.errors import StrategyError


class Stand:
    """Stand in for a loss where parameters are sharded: peers gather and reduce layer by layer, in order.

    Layers that ran are reached through their outputs. If none ran, the step is run on the last batch
    that gave a loss. In between, nothing can be done: the peers would wait for ever.
    """

    def __init__(self, layers: Iterable[nn.Module], *, keeps_batch: bool = True) -> None:
        self._keeps_batch = keeps_batch
        self._call: tuple[Any, ...] | None = None
        self._ran: dict[int, Tensor] = {}
        self._hooks = [layer.register_forward_hook(self._note) for layer in layers]

    def begin(self) -> None:
        """Forget the layers of the micro-batch before."""
        self._ran.clear()

    def succeeded(self, *call: Any) -> None:
        """Keep what a step that gave a loss was called with: batch and indices."""
        if self._keeps_batch:
            self._call = call

    def zero(self, again: Callable[..., Any]) -> Tensor | None:
        """Return a zero that reaches every layer; None when there are no layers to reach."""
        if self._ran and len(self._ran) == len(self._hooks):
            return sum((output.sum() * 0.0 for output in self._ran.values()), torch.zeros(()))
        if self._ran:
            raise StrategyError(
                f"training_step returned None after {len(self._ran)} of {len(self._hooks)} sharded layers had run.",
                why="The other ranks wait for this one in the rest of them.",
                fix="Return None before the first layer or after the last one, or a loss times 0.",
            )
        if not self._hooks and not self._keeps_batch:
            return None
        output = again(*self._call) if self._call is not None else None
        if output is None:
            raise StrategyError(
                "training_step returned None for this rank's first batch.",
                why="Sharded layers need a batch to run on, so that the other ranks are not left waiting.",
                fix="Return a loss times 0 instead, or drop such batches in the dataset.",
            )
        loss = output["loss"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
        return loss * 0.0  # type: ignore[no-any-return]

    def _note(self, layer: nn.Module, _arguments: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            tensors = [output] if isinstance(output, Tensor) else list(output) if isinstance(output, (tuple, list)) else []
            found = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
            if found:
                self._ran[id(layer)] = found[0]
