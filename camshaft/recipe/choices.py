"""Check the free choices of a recipe: every value that it names as worth trying must be right."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from camshaft.errors import RecipeError
from camshaft.recipe.check import Checker
from camshaft.recipe.compose import read_path
from camshaft.recipe.problems import Path, Problems, dotted, show
from camshaft.recipe.rules import check_rules

MAX_VALUES = 100


def check_choices(data: dict[str, Any], checker: Checker) -> None:
    """Put each value in its place and check the recipe again; the recipe itself is right already."""
    choices = data.get("choices") or {}
    count = sum(len(values) for values in choices.values())
    if count > MAX_VALUES:
        checker.note(("choices",), f"choices name {count} values; at most {MAX_VALUES} are checked.", fix="Name fewer.")
        return
    for name, values in choices.items():
        path = read_path(str(name))
        if not values:
            checker.note(("choices", name), f"choices.{name} names no value.", fix="Give a list of values.")
        for index, value in enumerate(values):
            _check(data, path, value, ("choices", name, index), checker)


def _check(data: dict[str, Any], path: Path, value: Any, place: Path, checker: Checker) -> None:
    changed = copy.deepcopy(data)
    changed.pop("choices")
    target: Any = changed
    for key in path[:-1]:
        inner = target.get(key) if isinstance(target, dict) else None
        if not isinstance(inner, dict):
            checker.note(
                place[:-1],
                f"choices.{place[1]} is no value of this recipe.",
                why="It would choose nothing.",
                fix="Give the path of a value, such as optimizer.lr.",
            )
            return
        target = inner
    target[path[-1]] = value
    problems = Problems(dotted(path))
    inner_checker = Checker(checker.composed, checker.allow, problems)
    with contextlib.suppress(RecipeError):  # raised where there are too many, which are noted all the same
        inner_checker.run(changed)
        check_rules(changed, inner_checker)
    for problem in problems.items:
        checker.note(place, f"with {dotted(path)}={show(value)}: {problem.what}", why=problem.why, fix=problem.fix)
