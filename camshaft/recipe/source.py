"""Read one YAML file into plain data and the line of every value, whatever the file holds.

The file is read as events with limits on size, depth and number of values, so that a hostile file
costs no more than a large honest one. Scalars follow YAML 1.2: ``on`` and ``1:30`` are text, ``1e-3``
is a number.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

from camshaft.errors import RecipeError
from camshaft.recipe.problems import Path, nearest

MAX_BYTES = 1 << 20
MAX_SCALAR = 1 << 16
MAX_DEPTH = 32
MAX_VALUES = 20_000

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)$")
_BASED = re.compile(r"[-+]?0[xob][0-9a-fA-F_]+$")
_OCTAL = re.compile(r"[-+]?0[0-9_]+$")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?$")
_CONSTANTS: dict[str, Any] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
    ".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan"),
}  # fmt: skip


@dataclass(slots=True)
class Document:
    """What a file says: plain data, the line of each path, and the paths written without a value."""

    data: Any
    lines: dict[Path, int] = field(default_factory=dict)
    bare: set[Path] = field(default_factory=set)
    text: str = ""


def read_file(path: FilePath, shown: str) -> Document:
    """Read a recipe's file.

    Raises:
        RecipeError: there is no such file, or it is no YAML, too large or malicious.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise RecipeError(f"{shown} is not a file.", fix="Give the path of a YAML file.")
        if status.st_size > MAX_BYTES:
            raise RecipeError(
                f"{shown} has {status.st_size:,} bytes; a recipe has at most {MAX_BYTES:,}.",
                fix="Keep data out of the recipe: put it in a file and pass its path.",
            )
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{shown} is not UTF-8 text (byte {error.start}).", fix="Save it as UTF-8.") from None
    except FileNotFoundError:
        raise _missing(path, shown) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RecipeError(f"{shown[:200]!r} cannot be read: {reason}.") from None
    return parse(text, shown)


def _missing(path: FilePath, shown: str) -> RecipeError:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml"))
    except OSError:
        return RecipeError(f"{shown} does not exist: there is no directory {path.parent}.")
    near = nearest(path.name, names)
    fix = f"Did you mean {path.parent / near}?" if near else f"Recipes there: {', '.join(names[:10]) or 'none'}."
    return RecipeError(f"{shown} does not exist.", fix=fix)


def parse(text: str, shown: str) -> Document:
    """Read YAML text; ``shown`` names it in errors.

    Raises:
        RecipeError: the text is no YAML, holds more than one document or exceeds a limit.
    """
    reader = _Reader(text, shown)
    try:
        return reader.document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        reason = error.problem or error.context or "it cannot be read"
        hint = ""
        # libyaml may report the line before the tab that it stumbled over.
        for place, content in enumerate(text.splitlines()[line - 1 : line + 1], line):
            if "\t" in content[: len(content) - len(content.lstrip())]:
                line, hint = place, "Indent with spaces, not tabs."
        raise RecipeError(f"{shown}:{line}: this is not YAML: {reason}.", fix=hint) from None
    except (yaml.YAMLError, ValueError) as error:
        reason = getattr(error, "reason", str(error))
        raise RecipeError(f"{shown}: this is not YAML: {reason}.") from None


class _Reader:
    """Build values from parser events, counting every value, copies of aliases included."""

    def __init__(self, text: str, shown: str) -> None:
        self.shown = shown
        self.events: Iterator[Any] = yaml.parse(text, Loader=_Loader)
        self.result = Document(None, text=text)
        self.anchors: dict[str, tuple[Any, Path, int]] = {}
        self.count = 0

    def document(self) -> Document:
        started = False
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if started:
                    raise self.error(
                        event, "a second document starts here.", fix="Keep one recipe per file: remove '---'."
                    )
                started = True
                self.result.data = self.value(next(self.events), ())
        return self.result

    def error(self, event: Any, what: str, *, why: str = "", fix: str = "") -> RecipeError:
        return RecipeError(f"{self.shown}:{event.start_mark.line + 1}: {what}", why=why, fix=fix)

    def value(self, event: Any, path: Path) -> Any:
        if len(path) > MAX_DEPTH:
            raise self.error(event, f"values are nested more than {MAX_DEPTH} deep.", fix="Flatten the recipe.")
        self.spend(event, 1)
        self.result.lines.setdefault(path, event.start_mark.line + 1)
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, path)
        if event.tag is not None and event.tag != "!":
            raise self.error(
                event,
                f"the tag {event.tag[:60]!r} is refused.",
                why="A recipe holds plain data.",
                fix="Remove the tag.",
            )
        before = self.count
        if isinstance(event, yaml.ScalarEvent):
            result = self.scalar(event, path)
        elif isinstance(event, yaml.SequenceStartEvent):
            result = self.sequence(path)
        else:
            result = self.mapping(path)
        if event.anchor is not None:
            self.anchors[event.anchor] = (result, path, self.count - before + 1)
        return result

    def spend(self, event: Any, values: int) -> None:
        self.count += values
        if self.count > MAX_VALUES:
            raise self.error(
                event, f"the recipe holds more than {MAX_VALUES:,} values, aliases expanded.", fix="Use fewer aliases."
            )

    def alias(self, event: Any, path: Path) -> Any:
        if event.anchor not in self.anchors:
            raise self.error(event, f"the alias *{event.anchor[:60]} names nothing that is complete here.")
        value, source, size = self.anchors[event.anchor]
        self.spend(event, size)
        return self.copy(value, source, path)

    def copy(self, value: Any, source: Path, path: Path) -> Any:
        if len(path) > MAX_DEPTH:
            raise RecipeError(f"{self.shown}: values are nested more than {MAX_DEPTH} deep.", fix="Flatten the recipe.")
        if source in self.result.lines:
            self.result.lines.setdefault(path, self.result.lines[source])
        if source in self.result.bare:
            self.result.bare.add(path)
        if isinstance(value, dict):
            return {key: self.copy(item, (*source, key), (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self.copy(item, (*source, index), (*path, index)) for index, item in enumerate(value)]
        return value

    def sequence(self, path: Path) -> list[Any]:
        result: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            result.append(self.value(event, (*path, len(result))))
        return result

    def mapping(self, path: Path) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        merged: list[dict[Any, Any]] = []
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.key(event)
            if key == "<<" and getattr(event, "implicit", (False,))[0]:
                value = self.value(next(self.events), (*path, "<<"))
                parts = value if isinstance(value, list) else [value]
                if not all(isinstance(part, dict) for part in parts):
                    raise self.error(event, "<< merges mappings, and this is none.", fix="Write '<<: *anchor'.")
                merged += parts
                continue
            if key in result:
                first = self.result.lines[(*path, key)]
                raise self.error(
                    event,
                    f"the key {key!r} is given twice; the first is on line {first}.",
                    why="YAML would silently keep one of them.",
                    fix="Remove one.",
                )
            result[key] = None
            self.result.lines[(*path, key)] = event.start_mark.line + 1
            result[key] = self.value(next(self.events), (*path, key))
        for part in merged:
            for key, item in part.items():
                if key not in result:
                    self.spend(event, 1)
                    result[key] = self.copy(item, (*path, "<<", key), (*path, key))
                    self.result.lines.setdefault((*path, key), self.result.lines[path])
        return result

    def key(self, event: Any) -> str | int:
        if not isinstance(event, yaml.ScalarEvent):
            raise self.error(event, "a key is not text.", fix="Keys are names, such as 'optimizer'.")
        self.spend(event, 1)
        if event.tag is not None and event.tag != "!":
            raise self.error(event, f"the tag {event.tag[:60]!r} is refused.", why="A recipe holds plain data.")
        if len(event.value) > 200:
            raise self.error(event, f"a key has {len(event.value):,} characters.", fix="Keys are short names.")
        if event.implicit[0] and _INT.match(event.value) and len(event.value) < 20:
            return int(event.value.replace("_", ""))
        return str(event.value)

    def scalar(self, event: Any, path: Path) -> Any:
        text: str = event.value
        if len(text) > MAX_SCALAR:
            raise self.error(
                event, f"a text has {len(text):,} characters; the limit is {MAX_SCALAR:,}.", fix="Put it in a file."
            )
        if not event.implicit[0]:
            return text
        if text in _CONSTANTS:
            if text == "":
                self.result.bare.add(path)
            return _CONSTANTS[text]
        if _OCTAL.match(text):
            raise self.error(
                event,
                f"{text[:40]} starts with 0: one YAML reads it as octal, another as decimal.",
                fix=f"Write {text[:40].lstrip('0') or '0'}, or quote it if it is text.",
            )
        return number(text)


def is_text(text: str) -> bool:
    """Say whether unquoted text is read as the text that it is."""
    return text not in _CONSTANTS and not _OCTAL.match(text) and isinstance(number(text), str)


def number(text: str) -> Any:
    """Return the number that unquoted text writes, or the text."""
    if len(text) > 40:
        return text
    plain = text.replace("_", "")
    if _INT.match(text):
        return int(plain)
    if _BASED.match(text):
        try:
            return int(plain, 0)
        except ValueError:
            return text
    return float(plain) if _FLOAT.match(text) else text
