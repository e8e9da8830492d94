"""Find the layers of a module that are gathered, recomputed or offloaded together."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from camshaft.errors import StrategyError


def find_wrapped(module: nn.Module, wrap: list[str] | int | None) -> list[str]:
    """Return the names of the layers that ``wrap`` chooses, by class names or by size.

    A size chooses the classes of the smallest layers that have more parameters than that.

    Raises:
        StrategyError: a class that no layer has, or a size that none reaches; the choices are listed.
    """
    layers = [(name, layer) for name, layer in module.named_modules() if name]
    if wrap is None:
        return []
    if isinstance(wrap, int):
        wrap = _classes_above(layers, wrap)
    kinds = {type(layer).__name__ for _, layer in layers}
    missing = [kind for kind in wrap if kind not in kinds]
    if missing:
        own = sorted({type(layer).__name__ for _, layer in layers if any(True for _ in layer.parameters())})
        raise StrategyError(
            f"wrap names {', '.join(missing)}, and {type(module).__name__} has no layer of that class.",
            why="Nothing would be wrapped.",
            fix=f"The classes with parameters are {', '.join(own)}.",
        )
    return [name for name, layer in layers if type(layer).__name__ in wrap]


def _classes_above(layers: list[tuple[str, nn.Module]], size: int) -> list[str]:
    runnable = [(name, layer) for name, layer in layers if type(layer).forward is not nn.Module.forward]
    sizes = {name: sum(p.numel() for p in layer.parameters()) for name, layer in runnable}
    large = {name for name, count in sizes.items() if count > size}
    smallest = {name for name in large if not any(other.startswith(f"{name}.") for other in large)}
    if not smallest:
        raise StrategyError(
            f"no layer has more than the {size} parameters that wrap asks for.",
            why="The module would be gathered whole.",
            fix=f"The largest layer has {max(sizes.values(), default=0)}. Give a smaller number, or class names.",
        )
    return sorted({type(layer).__name__ for name, layer in runnable if name in smallest})


def recompute_activations(module: nn.Module, names: list[str]) -> None:
    """Recompute the named layers in backward instead of keeping their activations.

    Their ``forward`` is replaced, not the layer, so that names stay, and a wrapper around the layer
    gathers it once for the recomputation. Random streams are replayed, so that dropout drops the same
    (Accelerate's own option turns that off).
    """
    if not names:
        raise StrategyError(
            "activation_checkpointing needs layers to recompute, and wrap names none.",
            fix="Set wrap to the class names of the repeated layers.",
        )
    for name in names:
        layer = module.get_submodule(name)
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
