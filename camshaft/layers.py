"""Find the layers and parameters of a module by what a recipe calls them."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from camshaft.errors import RecipeError

_SHOWN = 24


def find_layers(module: nn.Module, wanted: str | Sequence[str], *, who: str) -> dict[str, nn.Module]:
    """Return the layers that are meant, by name, in the order of the module.

    An entry is a class (``Block``), a name (``encoder.layer.0``), its end (``query``, ``attention.query``)
    or a pattern (``encoder.layer.*``). A layer below another that is meant is not left out.

    Raises:
        RecipeError: an entry matches nothing; ``who`` is named, and what exists is listed.
    """
    layers = {name: layer for name, layer in module.named_modules() if name}
    chosen: dict[str, nn.Module] = {}
    for entry in listed(wanted):
        found = {n: layer for n, layer in layers.items() if type(layer).__name__ == entry or _is_meant(n, entry)}
        if not found:
            kinds = {type(layer).__name__ for layer in layers.values() if any(True for _ in layer.parameters())}
            raise _no_match(who, entry, module, [*kinds, *layers], "layer")
        chosen |= found
    return {name: layer for name, layer in layers.items() if name in chosen}


def find_parameters(module: nn.Module, wanted: str | Sequence[str], *, who: str) -> dict[str, nn.Parameter]:
    """Return the parameters that are meant: those of the layers that ``find_layers`` finds, and by their own names.

    Raises:
        RecipeError: an entry matches nothing.
    """
    parameters = dict(module.named_parameters())
    layers = {name: layer for name, layer in module.named_modules() if name}
    chosen: set[str] = set()
    for entry in listed(wanted):
        found = {name for name in parameters if _is_meant(name, entry)}
        for name, layer in layers.items():
            if type(layer).__name__ == entry or _is_meant(name, entry):
                found |= {n for n in parameters if n.startswith(f"{name}.")}
        if not found:
            kinds = {type(layer).__name__ for layer in layers.values() if any(True for _ in layer.parameters())}
            raise _no_match(who, entry, module, [*kinds, *layers, *parameters], "parameter or layer")
        chosen |= found
    return {name: p for name, p in parameters.items() if name in chosen}


def find_blocks(module: nn.Module, *, who: str) -> dict[str, nn.Module]:
    """Return the repeated blocks of a module: the members of its largest list of layers of one class.

    Raises:
        RecipeError: it has no such list.
    """
    best: list[tuple[str, nn.Module]] = []
    size = 0
    for name, layer in module.named_modules():
        if not isinstance(layer, (nn.ModuleList, nn.Sequential)) or len(layer) < 2:
            continue
        members = [(f"{name}.{key}" if name else key, child) for key, child in layer.named_children()]
        weights = sum(p.numel() for _, child in members for p in child.parameters())
        if len({type(child) for _, child in members}) == 1 and weights > size:
            best, size = members, weights
    if not best:
        raise RecipeError(
            f"{who} looks for repeated blocks, and {type(module).__name__} has no list of layers of one class.",
            fix=f"Name the layers: {_choices([n for n, _ in module.named_modules() if n])}.",
        )
    return dict(best)


def listed(wanted: str | Sequence[str]) -> list[str]:
    """Return one text or a list of them as a list."""
    return [wanted] if isinstance(wanted, str) else list(wanted)


def replace_layer(module: nn.Module, name: str, new: nn.Module) -> None:
    """Put another layer in the place of the one of that name."""
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, new)


def wrap_forward(layer: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``wrap(forward)`` in the place of a layer's forward: the layer, and so every name, stays as it is."""
    layer.forward = wrap(layer.forward)


def _is_meant(name: str, entry: str) -> bool:
    if name == entry or name.endswith(f".{entry}"):
        return True
    return any(c in entry for c in "*?[") and (
        fnmatch.fnmatchcase(name, entry) or fnmatch.fnmatchcase(name, f"*.{entry}")
    )


def _no_match(who: str, entry: str, module: nn.Module, names: Iterable[str], noun: str) -> RecipeError:
    names = list(names)
    ends = {name.rpartition(".")[2] for name in names}
    nearest = difflib.get_close_matches(entry, [*names, *ends], n=1, cutoff=0.6)
    meant = f"Did you mean {nearest[0]!r}? " if nearest else ""
    return RecipeError(
        f"{who} names {entry!r}, and {type(module).__name__} has no {noun} of that name or class.",
        why="Nothing would happen.",
        fix=f"{meant}There are {_choices(names)}.",
    )


def _choices(names: Iterable[str]) -> str:
    """List names, those that differ in their numbers once."""
    short = list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names))
    more = f" and {len(short) - _SHOWN} more" if len(short) > _SHOWN else ""
    return ", ".join(short[:_SHOWN]) + more
