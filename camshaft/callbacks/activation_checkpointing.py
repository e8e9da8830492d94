"""Recompute activations in backward instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from camshaft.callback import Callback
from camshaft.errors import RecipeError
from camshaft.layers import find_blocks, find_layers, wrap_forward

if TYPE_CHECKING:
    from camshaft.module import Module


class ActivationCheckpointing(Callback):
    """Keep the inputs of the chosen layers only, and run them again in backward: less memory, about a third more time.

    ``layers`` names them by class, name or pattern; without it they are the repeated blocks of the module.
    ``stride`` chooses every k-th of them. Results do not change, bit for bit: random streams are replayed,
    so that dropout drops the same. Names in checkpoints stay. Layers inside a chosen one need no entry.

    Source: Chen et al. (2016), Training deep nets with sublinear memory cost.
    """

    def __init__(self, layers: str | Sequence[str] | None = None, *, stride: int = 1) -> None:
        if stride < 1:
            raise RecipeError(
                f"ActivationCheckpointing.stride is {stride}.", fix="Use 1 for every layer, 2 for every other."
            )
        self.layers = layers
        self.stride = stride
        self.names: list[str] = []

    def on_module(self, module: Module) -> None:
        """Wrap the forward of the chosen layers, in place."""
        who = f"callbacks.{self.name or 'activation_checkpointing'}"
        found = find_blocks(module, who=who) if self.layers is None else find_layers(module, self.layers, who=who)
        outer = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
        self.names = outer[:: self.stride]
        for name in self.names:
            wrap_forward(found[name], _recomputed)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(_run, forward)


def _run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
