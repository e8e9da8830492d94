"""Hold a value from a recipe against an annotation in source form."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from camshaft.errors import RecipeError
from camshaft.recipe.modules import Source, read_module
from camshaft.recipe.problems import nearest
from camshaft.schedule import Schedule

_LARGEST = 2.0**63
_ANY = {"Any", "object", "typing.Any"}
_LISTS = {"list", "Sequence", "Iterable", "Collection", "set", "frozenset", "List", "Set", "Iterator"}
_DICTS = {"dict", "Mapping", "MutableMapping", "Dict"}
_WORDS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "Path": "a path",
    "None": "null", "Schedule": "an interval", "ScheduleLike": "an interval", "PathLike": "a path",
}  # fmt: skip


class Kind:
    """An annotation: whether it accepts a value, how to say it in words, and as JSON schema."""

    def __init__(self, node: ast.expr | None, source: Source | None = None, depth: int = 0) -> None:
        self.source = source
        self.depth = depth
        self.node = self._parse(node)
        self.name, self.arguments = self._split()

    def _parse(self, node: ast.expr | None) -> ast.expr | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                return ast.parse(node.value, mode="eval").body
            except (SyntaxError, ValueError):
                return None
        return node

    def _split(self) -> tuple[str, list[Kind]]:
        node = self.node
        if node is None:
            return "Any", []
        if isinstance(node, ast.Constant) and node.value is None:
            return "None", []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            members = [self._child(node.left), self._child(node.right)]
            return "Union", [
                inner for kind in members for inner in (kind.arguments if kind.name == "Union" else [kind])
            ]
        if isinstance(node, ast.Subscript):
            head = ast.unparse(node.value).rpartition(".")[2]
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if head == "Literal":
                return "Literal", []
            if head == "Optional":
                return "Union", [self._child(items[0]), self._child(ast.Constant(None))]
            if head in ("Annotated", "Final", "Required"):
                child = self._child(items[0])
                return child.name, child.arguments
            return head, [self._child(item) for item in items]
        if isinstance(node, ast.Name | ast.Attribute):
            return self._named(node)
        return "Any", []

    def _child(self, node: ast.expr) -> Kind:
        return Kind(node, self.source, self.depth + 1)

    def _named(self, node: ast.Name | ast.Attribute) -> tuple[str, list[Kind]]:
        name = ast.unparse(node).rpartition(".")[2]
        if name in _WORDS or name in _LISTS | _DICTS | _ANY or name == "tuple" or self.source is None or self.depth > 8:
            return name, []
        alias = _alias(node, self.source)
        if alias is None:
            return name, []
        value, source = alias
        kind = Kind(value, source, self.depth + 1)
        self.node, self.source = kind.node, kind.source
        return kind.name, kind.arguments

    @property
    def options(self) -> list[Any]:
        """The values of a ``Literal``."""
        if self.name != "Literal" or not isinstance(self.node, ast.Subscript):
            return []
        items = self.node.slice.elts if isinstance(self.node.slice, ast.Tuple) else [self.node.slice]
        return [item.value for item in items if isinstance(item, ast.Constant)]

    def accepts(self, value: Any) -> bool:
        """Say whether the annotation takes a value; what cannot be told is taken."""
        if isinstance(value, dict) and "_target_" in value and self.name not in _DICTS:
            return self.name not in ("int", "float", "bool", "str", "Literal", "Path")
        if self.name == "Union":
            return any(kind.accepts(value) for kind in self.known or self.arguments)
        check = _CHECKS.get(self.name)
        if check is not None:
            return check(value)
        if self.name == "Literal":
            return any(value == option and type(value) is type(option) for option in self.options)
        if self.name in _LISTS or self.name == "tuple":
            return isinstance(value, list) and self._accepts_items(value)
        if self.name in _DICTS:
            value_kind = self.arguments[1] if len(self.arguments) > 1 else None
            return isinstance(value, dict) and (value_kind is None or all(map(value_kind.accepts, value.values())))
        return True

    @property
    def known(self) -> list[Kind]:
        """The members of a union that a plain value can be; ``float | Tensor`` takes a number, and no text."""
        return [kind for kind in self.arguments if kind.is_known]

    @property
    def is_known(self) -> bool:
        """Whether it can be told what is taken."""
        if self.name == "Union":
            return bool(self.known)
        return self.name in _CHECKS or self.name == "Literal" or self.name in _LISTS | _DICTS | _ANY | {"tuple"}

    def _accepts_items(self, items: list[Any]) -> bool:
        kinds = self.arguments
        if not kinds:
            return True
        if self.is_fixed:
            return len(items) == len(kinds) and all(k.accepts(i) for k, i in zip(kinds, items, strict=True))
        return all(map(kinds[0].accepts, items))

    @property
    def is_fixed(self) -> bool:
        """Whether it is a tuple of so many items."""
        last = self.arguments[-1].node if self.arguments else None
        return self.name == "tuple" and not (isinstance(last, ast.Constant) and last.value is ...)

    def convert(self, value: Any) -> Any:
        """Return the value as the annotation means it: 1e3 is the whole number 1000 where one is asked for."""
        if isinstance(value, float) and not self.accepts(value) and abs(value) < _LARGEST and value == int(value):
            whole = int(value)
            return whole if self.accepts(whole) and not isinstance(whole, bool) else value
        return value

    def describe(self) -> str:
        """Say in words what is taken."""
        if self.name == "Union":
            words = list(dict.fromkeys(kind.describe() for kind in self.known or self.arguments))
            return " or ".join(words)
        if self.name == "Literal":
            return "one of " + ", ".join(_plain(option) for option in self.options)
        if self.name in _LISTS or self.name == "tuple":
            if not self.arguments:
                return "a list"
            count = f"{len(self.arguments)} " if self.is_fixed else ""
            return f"a list of {count}{self.arguments[0].plural()}"
        if self.name in _DICTS:
            return "a mapping"
        return _WORDS.get(self.name, self.name)

    def plural(self) -> str:
        """Say in words what several of it are."""
        words = {"int": "whole numbers", "float": "numbers", "str": "texts", "Path": "paths"}
        return words.get(self.name, "values")

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of what is taken."""
        if self.name == "Union":
            return {"anyOf": [kind.schema() for kind in self.arguments]}
        if self.name == "Literal":
            return {"enum": self.options}
        if self.name in _LISTS or self.name == "tuple":
            return {"type": "array"} | (
                {"items": self.arguments[0].schema()} if self.arguments and self.name != "tuple" else {}
            )
        if self.name in _DICTS:
            return {"type": "object"}
        return dict(_SCHEMAS.get(self.name, {}))


def _plain(option: Any) -> str:
    return {True: "true", False: "false"}.get(option, str(option)) if isinstance(option, bool) else str(option)


def _alias(node: ast.Name | ast.Attribute, source: Source) -> tuple[ast.expr, Source] | None:
    """Return what a module-level alias such as ``Mode = Literal["min", "max"]`` stands for."""
    name = node.id if isinstance(node, ast.Name) else ""
    bound = source.get(name)
    if isinstance(bound, ast.Assign | ast.AnnAssign) and bound.value is not None:
        return bound.value, source
    if isinstance(bound, tuple) and bound[1]:
        module = read_module(bound[0], source.local)
        if module is not None:
            inner = module.get(bound[1])
            if isinstance(inner, ast.Assign | ast.AnnAssign) and inner.value is not None:
                return inner.value, module
    return None


def is_number(value: Any) -> bool:
    """Say whether a value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_interval(value: Any) -> bool:
    try:
        Schedule.parse(value)
    except (RecipeError, TypeError, ValueError):
        return False
    return True


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": is_number,
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "Path": lambda value: isinstance(value, str),
    "PathLike": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
    "Schedule": _is_interval,
    "ScheduleLike": _is_interval,
}
_UNITS = "steps?|epochs?|s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?"
INTERVAL: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "pattern": rf"^\s*\d+(\.\d+)?\s*({_UNITS})\s*$"},
        {"type": "integer", "minimum": 1},
        {"type": "object", "properties": {"every": {}, "at": {}, "after": {}}, "additionalProperties": False},
    ]
}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "str": {"type": "string"},
    "Path": {"type": "string"},
    "PathLike": {"type": "string"},
    "None": {"type": "null"},
    "Schedule": INTERVAL,
    "ScheduleLike": INTERVAL,
}


def explain(kind: Kind, value: Any) -> tuple[str, str]:
    """Return why a value of the wrong type is wrong and how to write it, with YAML's traps in mind."""
    names = {kind.name} | {argument.name for argument in kind.arguments}
    if isinstance(value, str):
        if "bool" in names and value.lower() in ("on", "yes", "y", "off", "no", "n"):
            right = "true" if value.lower() in ("on", "yes", "y") else "false"
            return f"YAML reads {value!r} as text, or not, depending on its version.", f"Write {right}."
        if names & {"int", "float"} and value.count(":") in (1, 2) and value.replace(":", "").isdecimal():
            return (
                "One YAML reads it as base 60, another as text.",
                "Write a plain number, or an interval such as '90 minutes'.",
            )
        if names & {"int", "float"} and _is_float(value):
            return "In quotes it is text.", f"Write {value.strip()} without quotes."
        if kind.name in ("Schedule", "ScheduleLike"):
            return "Nothing would say when it is due.", "Write '500 steps', '2 epochs' or '10 minutes'."
        if kind.name == "Literal":
            near = nearest(value, [str(option) for option in kind.options])
            return "", f"Did you mean {near!r}?" if near else ""
    if names & {"str", "Path"} and is_number(value):
        return "YAML reads it as a number.", f"Quote it: '{value}'."
    if names & {"str", "Path"} and isinstance(value, bool):
        return "YAML reads it as true or false.", f"Quote it: '{str(value).lower()}'."
    return "", ""


def _is_float(text: str) -> bool:
    if len(text) > 40:
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True
