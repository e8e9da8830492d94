"""Compose a run from Python objects, with the defaults that a recipe has."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from camshaft.assembly import Parts
from camshaft.callback import Callback
from camshaft.data import DataModule
from camshaft.errors import RecipeError
from camshaft.loggers.base import Logger
from camshaft.module import Module
from camshaft.recipe.registry import CALLBACKS, DEFAULT_LOGGERS, FIRST_CALLBACKS, LAST_CALLBACKS, LOGGERS, STRATEGIES
from camshaft.recipe.settings import Settings
from camshaft.strategies.base import Strategy

_BUILT_HERE = ("module", "data", "strategy", "optimizer", "scheduler", "callbacks", "loggers", "choices", "launch")


def direct_parts(
    module: Module,
    data: DataModule | None,
    *,
    strategy: Strategy | str,
    name: str,
    callbacks: Mapping[str, Callback | None],
    loggers: Mapping[str, Logger | None],
    settings: dict[str, Any],
) -> Parts:
    """Compose what ``camshaft.run`` was given. A callback or logger that is None switches the default off.

    Raises:
        RecipeError: a setting is no top-level key of a recipe.
    """
    known = [field.name for field in dataclasses.fields(Settings) if field.name not in _BUILT_HERE]
    for key in settings:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise RecipeError(
                f"camshaft.run has no argument {key!r}.",
                why="It would be ignored.",
                fix=f"Did you mean {nearest[0]!r}?",
            )
    read = Settings(**settings)
    return Parts(
        settings=read,
        strategy=strategy if isinstance(strategy, Strategy) else _strategy(strategy, read.device),
        build_module=lambda: module,
        build_data=lambda: data,
        callbacks=_callbacks(read, callbacks),
        loggers=_filled({key: (lambda key=key: _class(LOGGERS[key])()) for key in DEFAULT_LOGGERS}, loggers),
        name=name,
    )


def _callbacks(settings: Settings, given: Mapping[str, Callback | None]) -> dict[str, Callback]:
    arguments: dict[str, Any] = {"seed": {"seed": settings.seed}}
    if isinstance(settings.precision, str):
        arguments["precision"] = {"precision": settings.precision}
    elif settings.precision is not None:
        arguments["precision"] = {"precision": dict(settings.precision)}
    if isinstance(settings.checkpoint, dict):
        arguments["checkpoint"] = settings.checkpoint
    off = {"checkpoint"} if settings.checkpoint is False else set()
    off |= {"precision"} - set(arguments)
    first = {
        key: (lambda key=key: _class(CALLBACKS[key])(**arguments.get(key, {})))
        for key in FIRST_CALLBACKS
        if key not in off
    }
    last = {
        key: (lambda key=key: _class(CALLBACKS[key])(**arguments.get(key, {})))
        for key in LAST_CALLBACKS
        if key not in off
    }
    ordered = {**first, **{key: None for key in given if key not in first and key not in last}, **last}
    return _filled({key: make for key, make in ordered.items() if make is not None}, given, order=list(ordered))


def _filled(defaults: Mapping[str, Any], given: Mapping[str, Any], order: list[str] | None = None) -> dict[str, Any]:
    """Return what was given, in order, and a default for every key that was not."""
    result = {}
    for key in order or [*given, *(key for key in defaults if key not in given)]:
        value = given[key] if key in given else defaults[key]()
        if value is not None:
            result[key] = value
    return result


def _strategy(name: str, device: str) -> Strategy:
    if name not in STRATEGIES:
        nearest = difflib.get_close_matches(name, STRATEGIES, n=1, cutoff=0.0)
        raise RecipeError(
            f"strategy {name!r} is unknown.",
            fix=f"Did you mean {nearest[0]!r}? The strategies are {', '.join(STRATEGIES)}, or an object of your own.",
        )
    result: Strategy = _class(STRATEGIES[name])(device=device)
    return result


def _class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
