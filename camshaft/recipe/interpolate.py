"""Resolve ``${path}`` and ``${oc.env:NAME}`` with OmegaConf, once everything else is known to be harmless.

OmegaConf's grammar can nest, call any registered resolver and copy without bound. So each
interpolation is first held against a strict pattern, and the cost of resolving all is counted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from camshaft.recipe.problems import Origin, Path, Problems, dotted, nearest
from camshaft.redact import is_secret_variable

MAX_COST = 20_000
MAX_CHAIN = 20
MAX_INTERPOLATIONS = 1000
MAX_CHARACTERS = 1 << 20

_REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_]\w*(?:\.\w+)*)\}")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)(?:,([^${}'\"\\]*))?\}")
HARMLESS = frozenset({
    "HOME", "USER", "HOSTNAME", "TMPDIR", "SCRATCH", "WORK", "DATA", "DATA_DIR", "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID",
})  # fmt: skip


def interpolate(
    data: dict[str, Any], origin: Callable[[Path], Origin], allowed: frozenset[str], problems: Problems
) -> dict[str, Any]:
    """Return the data with every interpolation resolved.

    A secret from the environment stays as it is written: it is read when its object is built, and
    so is in no file, log or error.
    """
    found = {path: text for path, text in _texts(data, ()) if "${" in text}
    if not found:
        return data
    if len(found) > MAX_INTERPOLATIONS:
        place = next(iter(found))
        problems.add(
            origin(place),
            f"the recipe holds {len(found):,} interpolations; at most {MAX_INTERPOLATIONS:,} are read.",
            fix="Write some of the values out.",
        )
        return data
    before = len(problems.items)
    for path, text in found.items():
        _check_text(path, text, origin(path), data=data, allowed=allowed, problems=problems)
    if len(problems.items) > before:
        return data
    budget = _Budget(data)
    for path in found:
        reason = budget.reason(path)
        if reason:
            problems.add(origin(path), f"{dotted(path)}: {reason}", fix="Write the value out.")
            return data
    # OmegaConf is slow on large recipes: it is given the parts that the interpolations read or are in.
    parts = {path[0] for path in budget.known}
    return data | _resolve({key: value for key, value in data.items() if key in parts}, found)


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))


def _check_text(
    path: Path, text: str, origin: Origin, *, data: Any, allowed: frozenset[str], problems: Problems
) -> None:
    rest = _ENVIRONMENT.sub("", _REFERENCE.sub("", text))
    if "${" in rest or "\\$" in text:
        problems.add(
            origin,
            f"{dotted(path)} holds an interpolation that a recipe may not use: {text[:60]!r}.",
            why="Only ${path.to.value} and ${oc.env:NAME} are read.",
            fix="Use one of these, or write the value out.",
        )
        return
    for match in _REFERENCE.finditer(text):
        target = _absolute(path, match)
        if target is None or _get(data, target) is _ABSENT:
            known = [dotted(place) for place, _ in _leaves(data, ())]
            near = nearest(match.group(2), known)
            problems.add(
                origin,
                f"{dotted(path)} refers to {match.group(0)}, and there is no such value.",
                fix=f"Did you mean {near!r}?"
                if near
                else "Give the path from the top of the recipe, such as ${optimizer.lr}.",
            )
    for match in _ENVIRONMENT.finditer(text):
        _check_variable(path, match, origin, allowed=allowed, problems=problems)


def _check_variable(
    path: Path, match: re.Match[str], origin: Origin, *, allowed: frozenset[str], problems: Problems
) -> None:
    name, default = match.groups()
    if name not in allowed | HARMLESS:
        problems.add(
            origin,
            f"{dotted(path)} reads the environment variable {name}, which is not allowed.",
            why="A recipe from someone else could carry a secret of yours away.",
            fix=f"If you mean it, pass --allow env:{name}, or add env:{name} to your allow file.",
        )
    elif is_secret_variable(name) and (match.string != match.group(0) or path[0] not in ("callbacks", "loggers")):
        problems.add(
            origin,
            f"{dotted(path)} puts the secret {name} where it would be saved.",
            why="Hyper-parameters, names and paths are written to logs and checkpoints.",
            fix="Give a secret whole, as ${oc.env:NAME}, to an argument of a callback or logger.",
        )
    elif default is None and name not in os.environ:
        problems.add(
            origin,
            f"{dotted(path)} needs the environment variable {name}, which is not set.",
            fix=f"Set it, or give a default: ${{oc.env:{name},default}}.",
        )


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))


_ABSENT = object()


def _get(data: Any, path: Path) -> Any:
    for key in path:
        if isinstance(data, dict):
            data = data.get(key, _ABSENT)
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            return _ABSENT
    return data


def _absolute(path: Path, match: re.Match[str]) -> Path | None:
    dots, names = match.groups()
    parts = tuple(int(part) if part.isdecimal() else part for part in names.split("."))
    if not dots:
        return parts
    return (*path[: len(path) - len(dots)], *parts) if len(dots) <= len(path) else None


class _Budget:
    """Count values and characters that resolving would make, without making them."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.known: dict[Path, tuple[int, int]] = {}
        self.open: list[Path] = []

    def reason(self, path: Path) -> str:
        """Say why a path cannot be resolved, or nothing."""
        try:
            cost, characters = self.cost(path)
        except RecursionError as error:
            return str(error)
        if cost > MAX_COST or characters > MAX_CHARACTERS:
            return "its interpolations multiply without end."
        return ""

    def cost(self, path: Path) -> tuple[int, int]:
        if path in self.known:
            return self.known[path]
        if path in self.open:
            raise RecursionError("its interpolation leads back to itself.")
        if len(self.open) > MAX_CHAIN:
            raise RecursionError(f"its interpolations form a chain of more than {MAX_CHAIN}.")
        self.open.append(path)
        value = _get(self.data, path)
        cost, characters = 1, len(value) if isinstance(value, str) else 0
        below: list[Path] = []
        if isinstance(value, dict):
            below = [(*path, key) for key in value]
        elif isinstance(value, list):
            below = [(*path, index) for index in range(len(value))]
        elif isinstance(value, str):
            below = [target for match in _REFERENCE.finditer(value) if (target := _absolute(path, match)) is not None]
        for place in below:
            more, longer = self.cost(place)
            cost, characters = min(cost + more, 2 * MAX_COST), min(characters + longer, 2 * MAX_CHARACTERS)
        self.open.pop()
        self.known[path] = cost, characters
        return cost, characters


def _resolve(data: dict[str, Any], found: dict[Path, str]) -> dict[str, Any]:
    from omegaconf import OmegaConf

    secrets = {
        path: text
        for path, text in found.items()
        if any(is_secret_variable(m.group(1)) for m in _ENVIRONMENT.finditer(text))
    }
    config = OmegaConf.create(_without(data, (), secrets))
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    for path, text in secrets.items():
        _get(resolved, path[:-1])[path[-1]] = text
    result: dict[str, Any] = _numbers(data, resolved)
    return result


def _without(value: Any, path: Path, secrets: dict[Path, str]) -> Any:
    if path in secrets:
        return "secret"
    if isinstance(value, dict):
        return {key: _without(item, (*path, key), secrets) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, (*path, index), secrets) for index, item in enumerate(value)]
    return value


def _numbers(before: Any, after: Any) -> Any:
    """Read the numbers that came from the environment, as a file's are read."""
    from camshaft.recipe.source import number

    if isinstance(before, str) and isinstance(after, str) and _ENVIRONMENT.fullmatch(before):
        return number(after)
    if isinstance(before, dict) and isinstance(after, dict):
        return {key: _numbers(before.get(key), item) for key, item in after.items()}
    if isinstance(before, list) and isinstance(after, list):
        return [_numbers(old, new) for old, new in zip(before, after, strict=True)]
    return after


def reveal(value: str) -> str:
    """Return the secret that an argument names, at the moment its object is built."""
    match = _ENVIRONMENT.fullmatch(value)
    if match is None or not is_secret_variable(match.group(1)):
        return value
    return os.environ.get(match.group(1), match.group(2) or "")
