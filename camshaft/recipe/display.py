"""Show a resolved recipe with the place that set each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from camshaft.recipe.problems import Origin, Path, dotted
from camshaft.recipe.recipe import Recipe
from camshaft.redact import HIDDEN, is_secret_argument, looks_secret


def annotate(recipe: Recipe) -> str:
    """Return the recipe as YAML, with its file and line behind every value."""
    lines = list(_lines(recipe.config, (), recipe.origins))
    width = min(max((len(text) for text, _ in lines), default=0), 60)
    return "\n".join(f"{text:<{width}}  # {origin}" if origin else text for text, origin in lines)


def _lines(value: Mapping[Any, Any], path: Path, origins: Mapping[str, Origin]) -> Iterator[tuple[str, str]]:
    indent = "  " * len(path)
    for key, item in value.items():
        here = (*path, key)
        name = _scalar(key)
        if isinstance(item, dict) and item:
            yield f"{indent}{name}:", ""
            yield from _lines(item, here, origins)
            continue
        shown = HIDDEN if is_secret_argument(str(key)) and isinstance(item, str) and "${" not in item else item
        yield (
            f"{indent}{name}: {_scalar(HIDDEN if looks_secret(shown) else shown)}",
            str(origins.get(dotted(here), "default")),
        )


def _scalar(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def diff(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> list[tuple[str, str | None, str | None]]:
    """Return (path, old, new) of every value that differs; None where there is none."""
    before, after = dict(_flat(old, ())), dict(_flat(new, ()))
    paths = dict.fromkeys([*before, *after])
    return [(path, before.get(path), after.get(path)) for path in paths if before.get(path) != after.get(path)]


def _flat(value: Any, path: Path) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, (*path, key))
    else:
        yield dotted(path), _scalar(value)
