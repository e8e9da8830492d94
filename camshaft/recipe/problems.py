"""Collect everything that is wrong with a recipe, and say it all in one error."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from camshaft.errors import RecipeError

Path: TypeAlias = "tuple[str | int, ...]"
MAX_MISTAKES = 50
MAX_NAMES = 1000
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was set: a file and line, or the command line, and the layer that it belongs to."""

    file: str
    line: int
    layer: str

    def __str__(self) -> str:
        """Write the place as an error shows it."""
        if not self.line:
            return f"{self.layer}: {self.file}" if self.file else self.layer
        place = f"{self.file}:{self.line}"
        return place if self.layer == "recipe" else f"{place} ({self.layer})"


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where, what, what would have happened, and how to put it right."""

    origin: Origin
    what: str
    why: str = ""
    fix: str = ""

    def __str__(self) -> str:
        """Write the mistake on two lines."""
        rest = " ".join(part for part in (self.why, self.fix) if part)
        head = f"{self.origin}: {self.what}"
        return f"{head}\n  {rest}" if rest else head


class Problems:
    """A growing list of the mistakes in ``recipe``, each said once."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe
        self.items: list[Problem] = []

    def add(self, origin: Origin, what: str, *, why: str = "", fix: str = "") -> None:
        """Note a mistake.

        Raises:
            RecipeError: there are so many that nobody reads more; a file of nothing but mistakes would take minutes.
        """
        problem = Problem(origin, what, why, fix)
        if problem in self.items:
            return
        if len(self.items) == MAX_MISTAKES:
            self.raise_any(f"more than {MAX_MISTAKES} mistakes; these were found first")
        self.items.append(problem)

    def raise_any(self, count: str = "") -> None:
        """Raise one error that lists every mistake, in the order of files and lines.

        Raises:
            RecipeError: there is a mistake.
        """
        if not self.items:
            return
        items = sorted(
            self.items, key=lambda problem: (problem.origin.line == 0, problem.origin.file, problem.origin.line)
        )
        if len(items) == 1:
            raise RecipeError(printable(str(items[0])))
        body = "\n".join(str(problem) for problem in items)
        raise RecipeError(printable(f"{self.recipe} has {count or f'{len(items)} mistakes'}.\n{body}"))


def printable(text: str) -> str:
    """Write out what would steer a terminal, or turn the order of its letters: a recipe's keys are shown in errors."""
    return _STEERING.sub(lambda match: repr(match.group(0))[1:-1], text)


def dotted(path: Sequence[str | int]) -> str:
    """Write a path as an override does."""
    return ".".join(map(str, path))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was most likely meant."""
    lowered = {candidate.lower(): candidate for candidate in map(str, itertools.islice(known, MAX_NAMES))}
    match = difflib.get_close_matches(str(name)[:100].lower(), lowered, n=1, cutoff=0.6)
    return lowered[match[0]] if match else None


def suggest(name: str, known: Sequence[str], *, noun: str) -> str:
    """Return the sentence that names the nearest right name, or all there are."""
    near = nearest(name, known)
    if near is not None:
        return f"Did you mean {near!r}?"
    if not known:
        return ""
    return f"The {noun} are {', '.join(known)}."


def show(value: object, limit: int = 60) -> str:
    """Write a value as the message quotes it: short, on one line."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
