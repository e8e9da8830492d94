"""Read settings that come from Python, by the rules that hold for a recipe."""

from __future__ import annotations

import numbers
import os
from collections.abc import Collection, Mapping
from typing import Any

from camshaft.recipe.check import Checker
from camshaft.recipe.compose import Composed
from camshaft.recipe.problems import Origin, Problems
from camshaft.recipe.recipe import settings_of
from camshaft.recipe.registry import SHORTHANDS
from camshaft.recipe.rules import check_rules
from camshaft.recipe.settings import RECORDS, Settings, fields
from camshaft.recipe.trust import allowed


def read_settings(given: Mapping[str, Any], callbacks: Collection[str], *, who: str) -> Settings:
    """Check ``given`` as the top level of a recipe, and return it as settings.

    Paths, tuples and integers of numpy are taken for what they stand for. ``callbacks`` are the names of
    those that were passed as objects; ``who`` was called with it all.

    Raises:
        RecipeError: there are mistakes; all of them are listed.
    """
    data = {name: _plain(value) for name, value in given.items()}
    # Built already, so there is nothing in them to check but their names.
    data["callbacks"] = {name: {} for name in callbacks}
    problems = Problems(who)
    checker = Checker(Composed(data, {(): Origin("", 0, who)}), allowed((), None), problems)
    checker.record(Settings, data, ())
    for name in SHORTHANDS:
        if data.get(name) is not None and data[name] is not False:
            checker.shorthand(name, data[name])
    check_rules(data, checker)
    problems.raise_any()
    return settings_of(data)


def _plain(value: Any) -> Any:
    """Return a value as YAML would have given it."""
    if isinstance(value, tuple(RECORDS.values())):
        return {name: _plain(getattr(value, name)) for name in fields(type(value))}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return value
