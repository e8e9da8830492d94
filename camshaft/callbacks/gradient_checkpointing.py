"""Turn on the gradient checkpointing that models of Transformers bring with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from camshaft.callback import Callback
from camshaft.errors import RecipeError

if TYPE_CHECKING:
    from camshaft.module import Module


class GradientCheckpointing(Callback):
    """Let every Transformers model inside the module recompute its layers in backward.

    The model chooses the layers. Its key-value cache is turned off for training, which needs none. For
    other modules there is ``activation_checkpointing``.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_module(self, module: Module) -> None:
        """Turn it on, in place.

        Raises:
            RecipeError: the module has no model that can.
        """
        models: dict[str, Any] = {
            name: layer
            for name, layer in module.named_modules()
            if getattr(layer, "supports_gradient_checkpointing", False)
        }
        self.names = [name for name in models if not any(name.startswith(f"{other}.") for other in models if other)]
        if not models:
            raise RecipeError(
                f"callbacks.{self.name or 'gradient_checkpointing'} finds no Transformers model in "
                f"{type(module).__name__} that supports gradient checkpointing.",
                why="Nothing would be recomputed.",
                fix="Use activation_checkpointing, which works on any module.",
            )
        for name in self.names:
            model = models[name]
            # Transformers 5 renamed it, and warns of the old name.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            model.config.use_cache = False
