"""Compile the training step, or chosen layers, with torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from camshaft.callback import Callback
from camshaft.errors import RecipeError
from camshaft.layers import find_layers

if TYPE_CHECKING:
    from camshaft.module import Module

_LOGS = ("log", "log_dict", "log_text", "log_image")


class Compile(Callback):
    """Compile the whole training step with its loss, or each of the named layers by itself.

    Layers of one class share their code, so that compiling a block costs its time once however deep the
    model is (``layers: [Block]``). Names in checkpoints stay as they are. What the step logs is handed over
    outside the compiled code. ``mode``, ``dynamic``, ``fullgraph`` and ``backend`` are torch.compile's; a
    whole step that logs has several graphs, so that ``fullgraph`` is for layers. Evaluation runs the
    compiled layers, and otherwise the module as it is.
    """

    def __init__(
        self,
        layers: str | Sequence[str] | None = None,
        *,
        mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None,
        dynamic: bool | None = None,
        fullgraph: bool = False,
        backend: str = "inductor",
    ) -> None:
        if fullgraph and layers is None:
            raise RecipeError(
                "Compile has fullgraph: true for the whole step.",
                why="What a step logs is handed over between two graphs.",
                fix="Name layers, or leave fullgraph out.",
            )
        self.layers = layers
        self.options: dict[str, Any] = {"mode": mode, "dynamic": dynamic, "fullgraph": fullgraph, "backend": backend}

    def on_module(self, module: Module) -> None:
        """Compile in place; the work itself is done by the first step."""
        known = torch.compiler.list_backends(exclude_tags=())
        if self.options["backend"] not in known:
            raise RecipeError(
                f"callbacks.{self.name or 'compile'}.backend is {self.options['backend']!r}.",
                why="torch has no backend of that name.",
                fix=f"Use one of {', '.join(torch.compiler.list_backends())}.",
            )
        if self.layers is not None:
            found = find_layers(module, self.layers, who=f"callbacks.{self.name or 'compile'}")
            for name, layer in found.items():
                if not any(name.startswith(f"{other}.") for other in found):
                    layer.compile(**self.options)
            return
        # Instance attributes: the class, and every name in a checkpoint, stay as they are.
        for name in _LOGS:
            setattr(module, name, torch.compiler.disable(getattr(module, name)))  # type: ignore[no-untyped-call]
        step: Any = torch.compile(module.training_step, **self.options)
        module.training_step = step  # type: ignore[method-assign]
