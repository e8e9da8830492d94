"""Compose one recipe from files and overrides: later ones win, and every value remembers its layer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from camshaft.errors import RecipeError
from camshaft.recipe.problems import Origin, Path, Problems, dotted
from camshaft.recipe.source import Document, parse, read_file

MAX_FILES = 50
_MODULE: Path = ("module", "_target_")
ON_WHEN_BARE = ("callbacks", "loggers")


@dataclass(slots=True)
class Composed:
    """A recipe that is put together but not checked: plain data, where each path came from, the texts read."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    files: int = 0
    main: str = ""

    def origin(self, path: Path) -> Origin:
        """Return where a path, or the nearest value around it, was set."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path) or Origin("", 0, "the recipe")


def compose(paths: Sequence[str], overrides: Sequence[str], problems: Problems) -> Composed:
    """Read the files in order, then apply the command line; notes what is wrong and goes on where it can.

    Raises:
        RecipeError: a file cannot be read at all.
    """
    result = Composed()
    result.main = paths[-1] if paths else ""
    module = None
    for path in paths:
        _add_file(result, path, (), problems)
        if result.origins.get(_MODULE, module) is not module:
            # The last file that says what is trained; others, such as a piece for some hardware, only adjust it.
            module, result.main = result.origins[_MODULE], path
    if paths:
        result.origins[()] = Origin(result.main, 1, "recipe")
    for override in overrides:
        _apply(result, override, problems)
    return result


def _add_file(result: Composed, shown: str, chain: tuple[str, ...], problems: Problems) -> None:
    identity = os.path.realpath(shown)
    if identity in map(os.path.realpath, chain):
        circle = " -> ".join([*chain, shown])
        raise RecipeError(f"the recipes extend each other in a circle: {circle}.", fix="Remove one 'extends'.")
    # Counted by reads: a file that others extend twice is read twice, and so are all that it extends.
    result.files += 1
    if result.files > MAX_FILES:
        raise RecipeError(f"{(*chain, shown)[0]} extends more than {MAX_FILES} files.", fix="Join some of them.")
    document = read_file(FilePath(shown), shown)
    result.texts[shown] = document.text
    layer = "recipe" if not chain else f"extended by {chain[-1]}"
    if document.data is None:
        document.data = {}
    if not isinstance(document.data, dict):
        raise RecipeError(
            f"{shown}:1: a recipe is a mapping, and this is {type(document.data).__name__}.",
            fix="Start with 'module:', or see docs/recipes.md.",
        )
    for parent in _extends(document, shown, layer, problems):
        _add_file(result, parent, (*chain, shown), problems)
    _turn_on(document)
    origins = {path: Origin(shown, line, layer) for path, line in document.lines.items()}
    _merge(result, document.data, (), origins)


def _extends(document: Document, shown: str, layer: str, problems: Problems) -> list[str]:
    value = document.data.pop("extends", None)
    entries = value if isinstance(value, list) else [value] if value is not None else []
    found = []
    for index, entry in enumerate(entries[:MAX_FILES]):
        path: Path = ("extends", index) if isinstance(value, list) else ("extends",)
        origin = Origin(shown, document.lines.get(path, 1), layer)
        is_path = isinstance(entry, str) and entry.endswith((".yaml", ".yml")) and "\0" not in entry
        if not is_path or FilePath(entry).is_absolute() or entry.startswith("~"):
            problems.add(
                origin,
                f"extends names {str(entry)[:60]!r}.",
                why="A recipe extends YAML files by their path relative to itself.",
                fix="Write for example 'extends: [base/gpt.yaml]'.",
            )
            continue
        target = os.path.normpath(FilePath(shown).parent / entry)
        if not FilePath(target).is_file():
            problems.add(origin, f"extends names {entry}, and there is no {target}.", fix=_which(target))
            continue
        found.append(target)
    return found


def _which(target: str) -> str:
    try:
        read_file(FilePath(target), target)
    except RecipeError as error:
        return error.fix
    return ""


def _turn_on(document: Document) -> None:
    """Read ``ema:`` without a value as ``ema: {}``; switching off is written ``ema: null``."""
    for path in document.bare:
        if len(path) == 2 and path[0] in ON_WHEN_BARE:
            document.data[path[0]][path[1]] = {}


def _merge(result: Composed, new: Any, path: Path, origins: dict[Path, Origin]) -> None:
    """Put a layer on top: mappings merge, everything else is replaced."""
    target: Any = result.data
    for key in path:
        target = target[key]
    if path in origins:
        result.origins[path] = origins[path]
    for key, value in new.items():
        here = (*path, key)
        old = target.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and not _other_class(old, value):
            _merge(result, value, here, origins)
            continue
        _forget(result, here)
        target[key] = value
        result.origins.update({place: origins[place] for place in _places(value, here) if place in origins})


def _other_class(old: dict[Any, Any], new: dict[Any, Any]) -> bool:
    """Say whether a mapping names another class, so that the arguments of the old one have no meaning."""
    return any(key in new and new[key] != old.get(key) for key in ("name", "_target_"))


def _forget(result: Composed, path: Path) -> None:
    for place in _places(_find(result.data, path), path):
        result.origins.pop(place, None)


def _places(value: Any, path: Path) -> Iterator[Path]:
    """Walk the paths of a value and of all inside it: layers cost their own size, not that of the whole recipe."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from _places(item, (*path, key))


def _apply(result: Composed, text: str, problems: Problems) -> None:
    origin = Origin(text if len(text) <= 200 else f"{text[:200]}...", 0, "command line")
    if text.startswith("~"):
        _remove(result, text[1:], origin, problems)
        return
    name, equals, written = text.partition("=")
    is_new = name.startswith("+")
    path = read_path(name.removeprefix("+"))
    if not equals or not path:
        problems.add(
            origin,
            f"{text[:60]!r} is no override.",
            why="It would change nothing.",
            fix="Write path=value to set, +path=value to add, ~path to remove, for example optimizer.lr=1e-3.",
        )
        return
    try:
        document = parse(written, "value") if written.strip() else Document("")
    except RecipeError as error:
        problems.add(origin, f"the value of {name} is not YAML.", fix=error.fix or "Quote it: path='\"text\"'.")
        return
    if is_new and _find(result.data, path) is not _ABSENT:
        problems.add(
            origin,
            f"{dotted(path)} is there already, from {result.origin(path)}.",
            why="'+' adds what is new.",
            fix=f"Write {dotted(path)}={written} to change it.",
        )
        return
    _set(result, path, document, origin, problems)


def read_path(text: str) -> Path:
    """Read ``a.b.0`` as a path; an empty part makes it empty."""
    parts = text.strip().split(".")
    if not all(parts) or len(parts) > 32:
        return ()
    return tuple(int(part) if re.fullmatch(r"[0-9]{1,9}", part) else part for part in parts)


_ABSENT = object()


def _find(data: Any, path: Path) -> Any:
    for key in path:
        is_item = isinstance(data, list) and isinstance(key, int) and key < len(data)
        if not is_item and not (isinstance(data, dict) and key in data):
            return _ABSENT
        data = data[key]
    return data


def _set(result: Composed, path: Path, document: Document, origin: Origin, problems: Problems) -> None:
    target: Any = result.data
    for depth, key in enumerate(path[:-1], 1):
        if isinstance(target, list) and isinstance(key, int) and key < len(target):
            target = target[key]  # an item of a list
            continue
        if not isinstance(target, dict):
            problems.add(origin, f"{dotted(path[: depth - 1])} is {target!r:.60} and has no {key!r}.")
            return
        if not isinstance(target.get(key), dict | list):
            if isinstance(target.get(key), str) and key == "strategy":
                target[key] = {"name": target[key]}
            else:
                target[key] = {}
            result.origins[path[:depth]] = origin
        target = target[key]
    key = path[-1]
    if isinstance(target, list) and not (isinstance(key, int) and key < len(target)):
        problems.add(origin, f"{dotted(path[:-1])} is a list of {len(target)} and has no item {key!r}.")
        return
    if not isinstance(target, dict | list):
        problems.add(origin, f"{dotted(path[:-1])} is {target!r:.60} and has no {key!r}.")
        return
    old = target[key] if isinstance(target, list) else target.get(key)  # type: ignore[index]
    lines = {(*path, *place): origin for place in document.lines} | {path: origin}
    if isinstance(old, dict) and isinstance(document.data, dict) and not _other_class(old, document.data):
        _merge(result, document.data, path, lines)
        return
    _forget(result, path)
    target[key] = document.data  # type: ignore[index]
    result.origins.update(lines)


def _remove(result: Composed, text: str, origin: Origin, problems: Problems) -> None:
    path = read_path(text)
    if not path or _find(result.data, path) is _ABSENT:
        problems.add(
            origin,
            f"{text[:60]!r} is not in the recipe.",
            why="There is nothing to remove.",
            fix="Switch a default off with callbacks.NAME=null.",
        )
        return
    _forget(result, path)
    del _find(result.data, path[:-1])[path[-1]]
