"""Generate the JSON schema of recipes from ``Settings`` and the constructors of the built-ins."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import PurePath
from typing import Any

from camshaft.recipe.annotations import INTERVAL, Kind
from camshaft.recipe.check import kind_of
from camshaft.recipe.modules import Definition, find
from camshaft.recipe.registry import SHORTHANDS, SLOTS, Slot
from camshaft.recipe.settings import RECORDS, Settings, fields
from camshaft.recipe.signatures import Signature, signature

_INTERPOLATED = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
_EXTRA: dict[str, Any] = {
    "every": INTERVAL | {"description": "When its step events fire: '500 steps', '2 epochs', '10 minutes'."},
    "at": {
        "description": "Steps at which it fires as well.",
        "type": ["integer", "array"],
        "items": {"type": "integer"},
    },
    "after": {"description": "Steps before which it does not fire.", "type": ["integer", "string"]},
    "on_error": {"description": "raise ends the run; disable warns and goes on.", "enum": ["raise", "disable"]},
    "interval": {"description": "What it is stepped by.", "enum": ["step", "epoch"]},
    "frequency": {"description": "Every so many steps or epochs.", "type": "integer", "minimum": 1},
    "monitor": {"description": "Metric that it watches.", "type": ["string", "null"]},
}


def schema() -> dict[str, Any]:
    """Return the schema, in the draft that editors read."""
    properties = {name: _setting(field) for name, field in fields(Settings).items()}
    properties["extends"] = {
        "description": "Recipes that this one builds on, by path relative to it; later ones win.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    for name in ("module", "data", "strategy", "optimizer", "scheduler"):
        properties[name] |= {"anyOf": [*_slot(SLOTS[name], is_required=name == "module")]}
        properties[name].pop("type", None)
    for name in ("callbacks", "loggers"):
        properties[name] |= {"type": ["object", "null"], **_entries(SLOTS[name])}
        properties[name].pop("anyOf", None)
    for name in SHORTHANDS:
        properties[name] |= _shorthand(name, properties[name])
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "camshaft recipe",
        "type": "object",
        "additionalProperties": False,
        "properties": dict(sorted(properties.items())),
    }


def _setting(field: dataclasses.Field[Any]) -> dict[str, Any]:
    doc = str(field.metadata["doc"])
    names = [part.strip() for part in str(field.type).split("|")]
    records = [RECORDS[name] for name in names if name in RECORDS]
    kind = _flexible(kind_of(field).schema())
    for record in records:
        inner = {name: _setting(item) for name, item in fields(record).items()}
        kind = {
            "anyOf": [
                {"type": "object", "properties": inner, "additionalProperties": False},
                INTERVAL,
                {"type": "null"},
            ]
        }
    result = {"description": doc} | kind
    default = field.default
    if isinstance(default, PurePath):
        default = str(default)
    if default is None or isinstance(default, str | int | float | bool):
        result["default"] = default
    return result


def _flexible(kind: dict[str, Any]) -> dict[str, Any]:
    """Take an interpolation, or ???, wherever a plain value is taken."""
    if not kind or kind.get("type") == "string":
        return kind
    options = kind["anyOf"] if set(kind) == {"anyOf"} else [kind]
    return {"anyOf": [*options, _INTERPOLATED]}


def _slot(slot: Slot, *, is_required: bool) -> list[dict[str, Any]]:
    options: list[dict[str, Any]] = [_own(slot)]
    for name, target in slot.builtins.items():
        sign = read(target)
        if sign is None:
            continue
        inner = _arguments(sign, slot, target)
        inner["properties"] = {"name": {"const": name, "description": sign.doc}} | inner["properties"]
        inner["required"] = ["name"]
        options.append(inner)
    options.append(_partial(slot))
    if slot.noun == "strategy":
        options.append({"enum": list(slot.builtins), "description": "A strategy with its defaults."})
    if not is_required:
        options.append({"type": "null"})
    return options


def _partial(slot: Slot) -> dict[str, Any]:
    """Describe the arguments that a layer changes while another layer names the class."""
    result: dict[str, Any] = {"type": "object", "properties": {"_target_": False, "name": False}}
    if not slot.builtins:
        return result | {"properties": {"_target_": False}}
    signs = [sign for target in slot.builtins.values() if (sign := read(target)) is not None]
    names = {name for sign in signs for name in sign.parameters if name not in slot.supplied} | set(slot.extra)
    return result | {"propertyNames": {"enum": sorted(names)}}


def _own(slot: Slot) -> dict[str, Any]:
    """Describe a class of the user's own."""
    target = {"type": "string", "description": f"Dotted path of a {slot.noun} of your own, such as my_file.MyClass."}
    result: dict[str, Any] = {"type": "object", "properties": {"_target_": target}, "required": ["_target_"]}
    if slot.extra:
        result["properties"] |= {name: _EXTRA[name] for name in slot.extra}
    return result


def _entries(slot: Slot) -> dict[str, Any]:
    known = {}
    for name, target in slot.builtins.items():
        sign = read(target)
        if sign is not None:
            inner = _arguments(sign, slot, target)
            known[name] = {"description": sign.doc, "anyOf": [inner, {"type": "null"}, _own(slot)]}
    return {"properties": known, "additionalProperties": {"anyOf": [_own(slot), {"type": "null"}]}}


def _arguments(sign: Signature, slot: Slot, target: str) -> dict[str, Any]:
    properties = {
        name: _flexible(Kind(parameter.annotation, parameter.source).schema()) | _default(parameter.default)
        for name, parameter in sign.parameters.items()
        if name not in slot.supplied
    }
    properties |= {name: _EXTRA[name] for name in slot.extra if name not in properties}
    return {"type": "object", "properties": properties, "additionalProperties": sign.is_open, "title": target}


def _default(source: str | None) -> dict[str, Any]:
    if source is None:
        return {}
    try:
        value = ast.literal_eval(source)
    except (ValueError, SyntaxError):
        return {}
    return {"default": value} if value is None or isinstance(value, str | int | float | bool) else {}


def _shorthand(name: str, kind: dict[str, Any]) -> dict[str, Any]:
    slot = SLOTS["callbacks"]
    sign = read(slot.builtins[name])
    if sign is None or not sign.parameters:
        return {}
    options = [*kind.get("anyOf", [{"type": kind["type"]} if "type" in kind else {}]), _arguments(sign, slot, name)]
    if name != "checkpoint":
        first = next(iter(sign.parameters.values()))
        options.append(Kind(first.annotation, first.source).schema())
    options = [option for option in options if option not in ({"type": "object"}, {})]
    return {"anyOf": [option for index, option in enumerate(options) if option not in options[:index]]}


def read(target: str) -> Signature | None:
    """Return the signature of a built-in."""
    found = find(target, None)
    return signature(found, None) if isinstance(found, Definition) else None


def names() -> str:
    """Return the short names of every slot, each with what its class does."""
    lines = []
    for key, slot in SLOTS.items():
        if slot.builtins:
            lines.append(f"{key}:")
            width = max(map(len, slot.builtins))
            for name, target in slot.builtins.items():
                sign = read(target)
                lines.append(f"  {name:<{width}}  {(sign.doc if sign is not None else '') or target}".rstrip())
    return "\n".join(lines)


def table() -> str:
    """Return every top-level key, its default and meaning as the table of docs/recipes.md."""
    rows = ["| Key | Default | Meaning |", "|---|---|---|", "| `extends` | | Recipes that this one builds on. |"]
    for name, field in fields(Settings).items():
        rows.append(f"| `{name}` | {_shown(field)} | {field.metadata['doc']} |")
        record = RECORDS.get(str(field.type).partition(" ")[0])
        for inner, item in fields(record).items() if record is not None else ():
            rows.append(f"| `{name}.{inner}` | {_shown(item)} | {item.metadata['doc']} |")
    return "\n".join(rows)


def _shown(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return "[]" if field.default_factory() == [] else "{}"
    if dataclasses.is_dataclass(field.default):
        return "{}"
    if field.default == ():
        return "[]"
    if field.default is None or isinstance(field.default, bool):
        return {None: "null", True: "true", False: "false"}[field.default]
    return str(field.default)
