"""Check a composed recipe against ``Settings`` and the constructors that it names, noting every mistake."""

from __future__ import annotations

import ast
import dataclasses
import sys
from typing import Any

from camshaft.recipe.annotations import Kind, explain
from camshaft.recipe.compose import Composed
from camshaft.recipe.modules import Definition, Source, exported, find, read_module
from camshaft.recipe.problems import Path, Problems, dotted, nearest, show, suggest
from camshaft.recipe.registry import CALLBACKS, SHORTHANDS, SLOTS, Slot
from camshaft.recipe.settings import RECORDS, Settings, fields
from camshaft.recipe.signatures import Parameter, Signature, signature
from camshaft.recipe.trust import Allowed, refusal
from camshaft.redact import HIDDEN, is_secret_argument, looks_secret


class Checker:
    """Walk a recipe once.

    ``local_targets`` are the paths that lead to Python beside it, ``scheduled`` the callbacks and loggers
    whose schedule is camshaft's to follow, because their constructor does not take it itself.
    """

    def __init__(self, composed: Composed, allow: Allowed, problems: Problems) -> None:
        self.composed = composed
        self.allow = allow
        self.problems = problems
        self.local_targets: list[str] = []
        self.scheduled: set[Path] = set()

    def note(self, path: Path, what: str, *, why: str = "", fix: str = "") -> None:
        """Note a mistake at a path."""
        self.problems.add(self.composed.origin(path), what, why=why, fix=fix)

    def run(self, data: dict[Any, Any]) -> None:
        """Check everything; whole numbers written as 1e3 are converted in place."""
        self.record(Settings, data, ())
        for name in ("module", "data", "strategy", "optimizer", "scheduler"):
            value = data.get(name)
            if isinstance(value, str) and name == "strategy":
                self.short(SLOTS[name], value, (name,), {})
            elif isinstance(value, dict) and (value or name != "module"):
                self.slot(SLOTS[name], value, (name,), None)
        for name in SHORTHANDS:
            is_right = kind_of(fields(Settings)[name]).accepts(data.get(name))
            if is_right and data.get(name) is not None and data[name] is not False:
                self.shorthand(name, data[name])
        for name in ("callbacks", "loggers"):
            entries = data.get(name)
            for key, value in entries.items() if isinstance(entries, dict) else ():
                if value is not None and isinstance(value, dict):
                    self.slot(SLOTS[name], value, (name, key), str(key))
        if not data.get("module"):
            self.note(
                (),
                "the recipe names no module.",
                why="There is nothing to train.",
                fix="Add 'module: {_target_: my_file.MyModule}'.",
            )

    def shorthand(self, name: str, value: Any) -> None:
        """Check a top-level key against the callback that it stands for."""
        if isinstance(value, dict) and "_target_" in value:
            self.note(
                (name, "_target_"),
                f"{name} stands for the built-in callback of that name.",
                fix=f"Name a class of your own as callbacks.{name}._target_.",
            )
            return
        arguments = expand(name, value)
        if arguments is value:
            self.target(SLOTS["callbacks"], CALLBACKS[name], value, (name,))
            return
        found = find(CALLBACKS[name], None)
        if isinstance(found, Definition):
            self.argument(next(iter(signature(found, None).parameters.values())), value, (name,))

    def record(self, record: type[Any], data: dict[Any, Any], path: Path) -> None:
        """Check a mapping against the fields of a dataclass."""
        known = fields(record)
        for key, value in list(data.items()):
            here = (*path, key)
            field = known.get(key)
            if field is None:
                self.unknown_key(here, str(key), list(known), top=not path)
                continue
            inner = RECORDS.get(str(field.type).partition(" ")[0])
            if inner is not None and isinstance(value, dict):
                self.record(inner, value, here)
                continue
            data[key] = self.value(kind_of(field), value, here)

    def unknown_key(self, path: Path, key: str, known: list[str], *, top: bool) -> None:
        """Note a key that nothing reads."""
        noun = "a recipe" if top else dotted(path[:-1])
        self.note(
            path,
            f"{dotted(path)} is not a key of {noun}.",
            why="It would be ignored.",
            fix=suggest(key, known, noun="keys"),
        )

    def value(self, kind: Kind, value: Any, path: Path) -> Any:
        """Check a value against a type; return it as the type means it."""
        value = kind.convert(value)
        if isinstance(value, str) and ("${" in value or value == "???"):
            # A secret, an interpolation that is noted already, or a value that a rule asks for.
            return value
        if not kind.accepts(value):
            why, fix = explain(kind, value)
            shown = HIDDEN if is_secret_argument(str(path[-1])) or looks_secret(value) else show(value)
            what = f"{dotted(path)} is {shown}, and must be {kind.describe()}."
            self.note(path, what, why=why, fix=fix)
        return value

    def short(self, slot: Slot, name: Any, path: Path, arguments: dict[Any, Any]) -> None:
        """Check a built-in named by its short name."""
        target = slot.builtins.get(name) if isinstance(name, str) else None
        if target is None:
            self.note(
                path,
                f"{dotted(path)} is {show(name)}, and no {slot.noun} has that name.",
                fix=suggest(str(name), list(slot.builtins), noun=f"built-in {slot.noun}s")
                + f" A {slot.noun} of your own is named by _target_: my_file.Class.",
            )
            return
        self.target(slot, target, arguments, path)

    def slot(self, slot: Slot, value: dict[Any, Any], path: Path, key: str | None) -> None:
        """Check a mapping that describes an object: which class, and its arguments."""
        arguments = {name: item for name, item in value.items() if name != "_target_"}
        if "_target_" in value:
            target = value["_target_"]
            if isinstance(target, str) and target in slot.builtins:
                target = slot.builtins[target]
            if not isinstance(target, str):
                self.note((*path, "_target_"), f"{dotted(path)}._target_ is {show(target)}, and must be a dotted path.")
                return
            self.target(slot, target, value, path)
        elif key is not None:
            self.keyed(slot, key, value, path)
        elif "name" in value and slot.builtins:
            del arguments["name"]
            self.short(slot, value["name"], path, value)
        else:
            choice = "name: one of " + ", ".join(slot.builtins) + ", or " if slot.builtins else ""
            self.note(
                path, f"{dotted(path)} does not say which class it is.", fix=f"Add {choice}_target_: my_file.Class."
            )

    def keyed(self, slot: Slot, key: str, value: dict[Any, Any], path: Path) -> None:
        """Check an entry whose key is the short name of a built-in."""
        target = slot.builtins.get(key)
        if target is not None:
            self.target(slot, target, value, path)
            return
        self.note(
            path,
            f"{dotted(path)} names no built-in {slot.noun} and has no _target_.",
            why="Nothing says which class it is.",
            fix=suggest(key, list(slot.builtins), noun=f"built-in {slot.noun}s")
            + " Otherwise add _target_: my_file.Class.",
        )

    def target(self, slot: Slot | None, target: str, value: dict[Any, Any], path: Path) -> None:
        """Check that a class may be named, exists, fits its slot and takes the arguments given."""
        sign = self.constructor(slot, target, (*path, "_target_") if "_target_" in value else path)
        if sign is not None:
            self.arguments(slot, sign, target, value, path)
            return
        for key, item in value.items():
            if key != "_target_":
                self.nested(item, (*path, key))

    def constructor(self, slot: Slot | None, target: str, where: Path) -> Signature | None:
        """Return the signature of a class; None when it is refused or its source cannot tell."""
        subject = dotted(where[:-1] if where[-1] == "_target_" else where)
        refused = refusal(target, self.allow)
        if refused is not None:
            self.note(where, f"{subject} names {show(target)}, which is not allowed.", why=refused[0], fix=refused[1])
            return None
        if self.allow.is_local(target):
            self.local_targets.append(target)
        local = self.allow.local if self.allow.is_local(target) else None
        found = find(target, local)
        if found is None:
            return None
        home = found.source.name if isinstance(found, Definition) else found.rpartition(".")[0]
        is_local = isinstance(found, Definition) and found.source.local is not None
        if home and not is_local and not self.allow.covers(home) and not self.allow.is_local(f"{home}.x"):
            other = found.path if isinstance(found, Definition) else found
            self.alias(where, subject, target, other)
            return None
        if isinstance(found, str):
            self.missing(target, found, where)
            return None
        if not isinstance(found.node, ast.ClassDef):
            self.note(where, f"{subject} names {target}, which is a function.", fix="Name a class.")
            return None
        sign = signature(found, local)
        if slot is not None and sign.all_bases_known and slot.base not in sign.bases:
            self.note(
                where, f"{subject} names {target}, which is no {slot.noun}.", fix=f"Give a subclass of {slot.base}."
            )
            return None
        return sign

    def alias(self, where: Path, subject: str, target: str, other: str) -> None:
        """Refuse a name inside an allowed module that stands for something outside."""
        top = other.partition(".")[0]
        own = (
            ""
            if top in sys.stdlib_module_names
            else f"Name it by its own path, and pass --allow {top} if you trust it."
        )
        self.note(
            where,
            f"{subject} names {target}, another name for {other}, which is not allowed.",
            why="An alias could lead anywhere.",
            fix=own,
        )

    def missing(self, target: str, missing: str, where: Path) -> None:
        """Note a path that leads nowhere, with the nearest that does."""
        module, _, name = missing.rpartition(".")
        fix = (
            suggest(name, sorted(set(exported(module, self.allow.local)))[:20], noun=f"classes of {module}")
            if module
            else ""
        )
        what = f"{module} has no {name}" if module else f"there is no module {missing}"
        if not module:
            fix = "Put it beside the recipe, or install it."
        self.note(where, f"{dotted(where)} is {target}, and {what}.", fix=fix)

    def arguments(self, slot: Slot | None, sign: Signature, target: str, value: dict[Any, Any], path: Path) -> None:
        """Check arguments by name and type, and that none is missing."""
        supplied = slot.supplied if slot is not None else frozenset()
        extra = slot.extra if slot is not None else ()
        taken = {name: item for name, item in sign.parameters.items() if name not in supplied}
        if slot is SLOTS["scheduler"] and target in slot.builtins.values():
            taken.pop("total_steps", None)
        ignored = {"_target_"} | ({"name"} if slot is not None and slot.builtins and "_target_" not in value else set())
        if slot in (SLOTS["callbacks"], SLOTS["loggers"]):
            ignored.discard("name")
        for key, item in list(value.items()):
            here = (*path, key)
            if key in ignored and key not in taken:
                continue
            if key in taken:
                value[key] = self.argument(taken[key], item, here)
            elif key in extra:
                self.beside(str(key), item, here)
                self.scheduled.add(path)
            elif not sign.is_open or key in supplied:
                self.unknown_argument(here, sign, taken, target, is_supplied=key in supplied)
        for name, parameter in taken.items():
            if parameter.is_required and name not in value:
                self.note(
                    path,
                    f"{dotted(path)} lacks {name!r}, which {target} needs.",
                    why="It could not be built.",
                    fix=f"Add '{name}: {_hint(parameter)}'.",
                )

    def argument(self, parameter: Parameter, value: Any, path: Path) -> Any:
        """Check an argument, and the objects inside it."""
        self.nested(value, path)
        return self.value(Kind(parameter.annotation, parameter.source), value, path)

    def nested(self, value: Any, path: Path) -> None:
        """Check objects described inside arguments."""
        if isinstance(value, dict):
            if "_target_" in value:
                if isinstance(value["_target_"], str):
                    self.target(None, value["_target_"], value, path)
                else:
                    self.note(path, f"{dotted(path)}._target_ must be a dotted path.")
                return
            for key, item in value.items():
                self.nested(item, (*path, key))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self.nested(item, (*path, index))

    def beside(self, key: str, value: Any, path: Path) -> None:
        """Check what every callback, logger or scheduler may carry beside its arguments."""
        annotation = {
            "every": "ScheduleLike",
            "at": "int | list[int]",
            "after": "int | ScheduleLike",
            "on_error": "Literal['raise', 'disable']",
            "interval": "Literal['step', 'epoch']",
            "frequency": "int",
            "monitor": "str | None",
        }[key]
        self.value(Kind(ast.parse(annotation, mode="eval").body), value, path)

    def unknown_argument(
        self, path: Path, sign: Signature, taken: dict[str, Parameter], target: str, *, is_supplied: bool
    ) -> None:
        """Note an argument that the class does not take."""
        key = str(path[-1])
        if is_supplied:
            self.note(path, f"{dotted(path)} is given by camshaft itself.", fix="Remove it.")
            return
        near = nearest(key, taken)
        why = "It would be ignored."
        if near is not None and taken[near].default is not None:
            why = f"It would be ignored and {near} would stay {taken[near].default}."
        names = list(taken)
        fix = suggest(key, names, noun="arguments") if names else f"{sign.path.rpartition('.')[2]} takes no arguments."
        self.note(path, f"{dotted(path)} is not an argument of {target}.", why=why, fix=fix)


def expand(name: str, value: Any) -> dict[str, Any]:
    """Return the arguments of the callback that a top-level key stands for.

    A mapping gives its arguments; anything else, and a mapping that is a schedule by step, is its first one.
    """
    found = find(CALLBACKS[name], None)
    parameters = signature(found, None).parameters if isinstance(found, Definition) else {}
    first = next(iter(parameters.values()), None)
    if not isinstance(value, dict):
        return {first.name if first is not None else name: value}
    is_first = first is not None and Kind(first.annotation, first.source).accepts(value)
    if not value or not is_first or any(key in parameters for key in value):
        return value
    return {first.name if first is not None else name: value}


def _hint(parameter: Parameter) -> str:
    if parameter.annotation is None:
        return "VALUE"
    return f"<{Kind(parameter.annotation, parameter.source).describe()}>"


_SETTINGS_SOURCE: list[Source | None] = []


def kind_of(field: dataclasses.Field[Any]) -> Kind:
    """Return the type of a setting."""
    if not _SETTINGS_SOURCE:
        _SETTINGS_SOURCE.append(read_module("camshaft.recipe.settings", None))
    return Kind(ast.parse(str(field.type), mode="eval").body, _SETTINGS_SOURCE[0])
