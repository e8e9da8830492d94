"""Give a rank whose step returned no loss the collectives that its peers make in their backward."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from camshaft.errors import StrategyError


class Stand:
    """Stand in for a loss where parameters are sharded: peers gather and reduce layer by layer, in order.

    Layers that ran are reached through the last output of them and of the modules ``around`` them. If none
    ran, the step is run on the last batch that gave a loss. In between, nothing can be done: the peers would
    wait for ever.
    """

    def __init__(
        self, layers: Collection[nn.Module], around: Collection[nn.Module] = (), *, keeps_batch: bool = True
    ) -> None:
        self._keeps_batch = keeps_batch
        self._call: tuple[Any, ...] | None = None
        self._ran: set[int] = set()
        self._last: Tensor | None = None
        self._layers = {id(layer) for layer in layers}
        for layer in {*layers, *around}:
            layer.register_forward_hook(self._note)

    def begin(self) -> None:
        """Forget the layers of the micro-batch before."""
        self._ran.clear()
        self._last = None

    def succeeded(self, *call: Any) -> None:
        """Keep what a step that gave a loss was called with: batch and indices."""
        if self._keeps_batch:
            self._call = call

    def zero(self, again: Callable[..., Any]) -> Tensor | None:
        """Return a zero that reaches every layer; None when there are no layers to reach."""
        if self._last is not None and self._ran == self._layers:
            # From the last one backward runs through the others in the order that the peers' does.
            return self._last.sum() * 0.0
        if self._ran:
            raise StrategyError(
                f"training_step returned None after {len(self._ran)} of {len(self._layers)} sharded layers had run.",
                why="The other ranks wait for this one in the rest of them.",
                fix="Return None before the first layer or after the last one, or a loss times 0.",
            )
        if not self._layers and not self._keeps_batch:
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
            tensors = (
                [output] if isinstance(output, Tensor) else list(output) if isinstance(output, (tuple, list)) else []
            )
            found = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
            if found:
                self._last = found[0]
                self._ran |= {id(layer)} & self._layers
