"""Load a recipe: compose it, check all of it, and give it back resolved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from camshaft.recipe.check import Checker
from camshaft.recipe.compose import Composed, compose
from camshaft.recipe.interpolate import interpolate
from camshaft.recipe.problems import Origin, Problems, dotted
from camshaft.recipe.registry import DEFAULT_LOGGERS, FIRST_CALLBACKS, LAST_CALLBACKS, CALLBACKS
from camshaft.recipe.rules import check_rules
from camshaft.recipe.settings import Launch, Settings, Validate
from camshaft.recipe.trust import Allowed, allowed, require_trust, trust as remember


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
    problems = Problems()
    folder = os.path.realpath(os.path.dirname(files[-1]) or ".") if files else None
    granted = allowed(allow, folder)
    composed = compose(files, overrides, problems)
    data = interpolate(composed.data, composed.origin, granted.variables, problems)
    checker = Checker(composed, granted, problems)
    checker.run(data)
    shown = " + ".join(files) or "the recipe"
    check_rules(data, checker)
    problems.raise_any(shown)
    if checker.local_targets and folder is not None and not inspect:
        if trust:
            remember(folder)
        require_trust(folder, checker.local_targets)
    return _finish(data, composed, files, overrides, granted)


def _finish(
    data: dict[str, Any], composed: Composed, files: list[str], overrides: Sequence[str], granted: Allowed
) -> Recipe:
    _expand(data, composed)
    name = data.get("name") or (FilePath(files[-1]).stem if files else "run")
    data["name"] = name
    origins = {dotted(path): origin for path, origin in composed.origins.items() if path}
    return Recipe(
        settings=_settings(data),
        config=data,
        origins=origins,
        paths=tuple(files),
        text=composed.texts.get(files[-1], "") if files else "",
        directory=FilePath(os.path.dirname(files[-1]) or ".") if files else FilePath(),
        name=name,
        allow=granted,
        overrides=tuple(overrides),
        texts=composed.texts,
    )


def _settings(data: dict[str, Any]) -> Settings:
    values = dict(data)
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
    short: dict[str, Any] = {"seed": {"seed": data.get("seed", 0)}}
    precision = data.get("precision")
    if precision is not None:
        short["precision"] = precision if isinstance(precision, dict) else {"precision": precision}
        composed.origins.setdefault(("callbacks", "precision"), composed.origin(("precision",)))
    checkpoint = data.get("checkpoint")
    if checkpoint is not None:
        short["checkpoint"] = None if checkpoint is False else checkpoint
        composed.origins.setdefault(("callbacks", "checkpoint"), composed.origin(("checkpoint",)))
    result: dict[str, Any] = {}
    for key in FIRST_CALLBACKS:
        if key not in given and (key != "precision" or "precision" in short):
            result[key] = short.get(key, {})
    result |= given
    for key in LAST_CALLBACKS:
        if key not in given:
            result[key] = short.get(key, {})
    data["callbacks"] = {key: value for key, value in result.items() if key in CALLBACKS or value is not None}
    loggers: dict[str, Any] = data.get("loggers") or {}
    data["loggers"] = {key: {} for key in DEFAULT_LOGGERS if key not in loggers} | loggers
    for key in ("seed", "precision", "checkpoint"):
        data.pop(key, None)
