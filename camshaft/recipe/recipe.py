"""Load a recipe: compose it, check all of it, and give it back resolved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from camshaft.recipe.check import Checker, expand
from camshaft.recipe.choices import check_choices
from camshaft.recipe.compose import Composed, compose
from camshaft.recipe.interpolate import interpolate
from camshaft.recipe.problems import Origin, Path, Problems, dotted
from camshaft.recipe.registry import DEFAULT_LOGGERS, FIRST_CALLBACKS, LAST_CALLBACKS, SHORTHANDS
from camshaft.recipe.rules import check_rules
from camshaft.recipe.settings import Launch, Settings, Validate
from camshaft.recipe.trust import Allowed, allowed, require_trust
from camshaft.recipe.trust import trust as remember


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checked recipe. ``config`` is resolved plain data, with defaults for callbacks and loggers filled in."""

    settings: Settings
    config: dict[str, Any]
    origins: Mapping[str, Origin]
    paths: tuple[str, ...]
    text: str
    directory: FilePath
    name: str
    allow: Allowed
    overrides: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)

    def to_yaml(self) -> str:
        """Write the resolved recipe; what runs from it is the same run."""
        from camshaft.recipe.writing import to_yaml

        return to_yaml(self.config)


def load(
    paths: Sequence[str | FilePath] | str | FilePath,
    overrides: Sequence[str] = (),
    *,
    allow: Sequence[str] = (),
    trust: bool = False,
    inspect: bool = False,
) -> Recipe:
    """Compose and check a recipe; nothing that it names is imported.

    ``trust`` remembers that the Python beside the recipe may run. ``inspect`` only reads: it asks for no
    trust, and what it returns cannot build what needs some.

    Raises:
        RecipeError: lists every mistake, with its file, line and layer.
    """
    files = [str(paths)] if isinstance(paths, str | FilePath) else [str(path) for path in paths]
    problems = Problems(" + ".join(files) or "the recipe")
    composed = compose(files, overrides, problems)
    folder = _code(composed)
    granted = allowed(allow, folder)
    data = interpolate(composed.data, composed.origin, granted.variables, problems)
    checker = Checker(composed, granted, problems)
    checker.run(data)
    check_rules(data, checker)
    if not problems.items:
        check_choices(data, checker)
    problems.raise_any()
    if checker.local_targets and folder is not None and not inspect:
        if trust:
            remember(folder)
        require_trust(folder, checker.local_targets)
    return _finish(data, composed, files, overrides, checker)


def _code(composed: Composed) -> str | None:
    """Return the folder whose Python the recipe may name, once it is trusted: beside the file that names the module."""
    wanted = composed.data.get("code")
    key: Path = ("code",) if isinstance(wanted, str) else ("module", "_target_")
    origin = composed.origins.get(key)
    file = origin.file if origin is not None and origin.line else composed.main if key != ("code",) else ""
    folder = FilePath(file).parent if file else FilePath()
    if isinstance(wanted, str):
        if not wanted or "\0" in wanted or "${" in wanted:
            return None
        folder = folder / wanted
    return str(folder.resolve())


def _finish(
    data: dict[str, Any], composed: Composed, files: list[str], overrides: Sequence[str], checker: Checker
) -> Recipe:
    granted = checker.allow
    values = dict(data)
    _expand(data, composed)
    callbacks = data["callbacks"]
    values |= {
        "callbacks": callbacks,
        "loggers": data["loggers"],
        "seed": (callbacks.get("seed") or {}).get("seed", 0),
        "precision": callbacks.get("precision"),
        "checkpoint": False if callbacks.get("checkpoint") is None else callbacks["checkpoint"],
    }
    name = data.get("name") or _name(FilePath(composed.main).stem)
    data["name"] = values["name"] = name
    if granted.local is not None and checker.local_targets:
        # The resolved recipe lies in the run's directory: it says where its Python is.
        data["code"] = values["code"] = granted.local
    origins = {dotted(path): origin for path, origin in composed.origins.items() if path}
    return Recipe(
        settings=settings_of(values),
        config=data,
        origins=origins,
        paths=tuple(files),
        text=_as_written(composed, overrides),
        directory=FilePath(composed.main).parent,
        name=name,
        allow=granted,
        overrides=tuple(overrides),
        texts=composed.texts,
    )


def _name(stem: str) -> str:
    """Return the name of a run from that of its recipe, as a directory can have it."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip("._-")[:100] or "run"


def _as_written(composed: Composed, overrides: Sequence[str]) -> str:
    """Return the files as they are, each a YAML document when there are several, and the overrides as remarks."""
    texts = composed.texts
    if len(texts) == 1 and not overrides:
        return next(iter(texts.values()))
    parts = [f"# {path}\n{text.rstrip()}\n" for path, text in texts.items()]
    parts += ["# command line\n" + "".join(f"# {override}\n" for override in overrides)] if overrides else []
    return "---\n".join(parts)


def settings_of(values: dict[str, Any]) -> Settings:
    """Return the settings that checked values stand for."""
    values["runs_dir"] = FilePath(values.get("runs_dir", "runs"))
    if isinstance(values.get("validate"), dict):
        values["validate"] = Validate(**values["validate"])
    if isinstance(values.get("launch"), dict):
        values["launch"] = Launch(**values["launch"])
    elif values.get("launch", ...) is None:
        del values["launch"]
    return Settings(**values)


def _expand(data: dict[str, Any], composed: Composed) -> None:
    """Put shorthands and defaults into ``callbacks`` and ``loggers``, in the order in which they run."""
    given: dict[str, Any] = data.get("callbacks") or {}
    short: dict[str, Any] = {"seed": expand("seed", data.get("seed", 0))}
    for key in SHORTHANDS:
        value = data.get(key)
        if value is not None:
            short[key] = None if value is False else expand(key, value)
            # What is no mapping of arguments became the value of the first one.
            first = tuple(short[key] or ()) if short[key] is not value else ()
            for path, origin in list(composed.origins.items()):
                if path[:1] == (key,):
                    composed.origins.setdefault(("callbacks", key), origin)
                    composed.origins.setdefault(("callbacks", key, *first, *path[1:]), origin)
    result: dict[str, Any] = {}
    for key in FIRST_CALLBACKS:
        if key not in given and (key != "precision" or "precision" in short):
            result[key] = short.get(key, {})
    result |= given
    for key in LAST_CALLBACKS:
        if key not in given:
            result[key] = short.get(key, {})
    data["callbacks"] = result
    loggers: dict[str, Any] = data.get("loggers") or {}
    data["loggers"] = {key: {} for key in DEFAULT_LOGGERS if key not in loggers} | loggers
    for key in SHORTHANDS:
        data.pop(key, None)
