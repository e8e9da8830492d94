"""Build the objects that a checked recipe describes."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from camshaft.errors import CamshaftError, RecipeError
from camshaft.recipe.interpolate import reveal
from camshaft.recipe.problems import Path, dotted
from camshaft.recipe.recipe import Recipe
from camshaft.recipe.registry import SLOTS, Slot
from camshaft.recipe.trust import resolve
from camshaft.redact import redact
from camshaft.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from camshaft.callback import Callback
    from camshaft.data import DataModule
    from camshaft.loggers.base import Logger
    from camshaft.module import Module
    from camshaft.optim import Plan
    from camshaft.strategies.base import Strategy


# What a constructor raises when it is given what it cannot take; anything else is shown with its traceback.
_FAILURES = (
    TypeError, ValueError, AssertionError, LookupError, ArithmeticError, AttributeError, NotImplementedError, OSError,
)  # fmt: skip


def build_module(recipe: Recipe) -> Module:
    """Build the module."""
    result: Module = _build(recipe, SLOTS["module"], recipe.config["module"], ("module",))
    return result


def build_data(recipe: Recipe) -> DataModule | None:
    """Build the data module; None when the module owns its loaders."""
    entry = recipe.config.get("data")
    return _build(recipe, SLOTS["data"], entry, ("data",)) if entry is not None else None


def build_strategy(recipe: Recipe) -> Strategy:
    """Build the strategy, with the recipe's device where it takes one."""
    entry = recipe.config.get("strategy", "single")
    entry = {"name": entry} if isinstance(entry, str) else entry
    given = {"device": recipe.settings.device}
    result: Strategy = _build(recipe, SLOTS["strategy"], entry, ("strategy",), optional=given)
    return result


def build_callbacks(recipe: Recipe) -> dict[str, Callback]:
    """Build the callbacks, in the order in which they run."""
    return {key: _listener(recipe, "callbacks", key, entry) for key, entry in _on(recipe, "callbacks")}


def build_loggers(recipe: Recipe) -> dict[str, Logger]:
    """Build the loggers."""
    return {key: _listener(recipe, "loggers", key, entry) for key, entry in _on(recipe, "loggers")}


def build_optimizer(recipe: Recipe) -> Callable[[Iterable[Tensor]], Optimizer] | None:
    """Return what builds the optimizer from parameters; None when the module configures its own."""
    entry = recipe.config.get("optimizer")
    if entry is None:
        return None

    def build(params: Iterable[Tensor]) -> Optimizer:
        result: Optimizer = _build(recipe, SLOTS["optimizer"], entry, ("optimizer",), supplied={"params": params})
        return result

    return build


def build_scheduler(recipe: Recipe) -> Callable[[Optimizer, int | None], Plan] | None:
    """Return what builds the scheduler from the optimizer and the planned steps; None when the recipe has none.

    camshaft's own schedulers step per optimizer step. Others step per epoch unless ``interval`` says so, or
    their ``total_steps``, which they are given when they take it, are the planned steps.
    """
    entry = recipe.config.get("scheduler")
    if entry is None:
        return None
    slot = SLOTS["scheduler"]
    own = {key: value for key, value in entry.items() if key not in slot.extra}
    path: Path = ("scheduler",)
    target = _target(slot, entry, path)
    is_own = target.startswith("camshaft.")

    def build(optimizer: Optimizer, planned_steps: int | None) -> Plan:
        from camshaft.optim import Plan

        if is_own and planned_steps is None and "total_steps" not in own:
            with _located(recipe, path):
                raise RecipeError(
                    f"{target.rpartition('.')[2]} follows the length of the run, which is not known.",
                    why="The data has no length, and no max_steps is given.",
                    fix="Give max_steps, or scheduler.total_steps.",
                )
        given = {"total_steps": planned_steps} if planned_steps is not None and "epochs" not in own else {}
        scheduler = _build(recipe, slot, own, path, supplied={"optimizer": optimizer}, optional=given)
        return Plan(
            scheduler,
            interval=entry.get("interval") or ("step" if is_own else None),
            frequency=entry.get("frequency", 1),
            monitor=entry.get("monitor"),
            name=str(entry.get("name") or target.rpartition(".")[2]),
        )

    return build


def _on(recipe: Recipe, slot: str) -> list[tuple[str, dict[str, Any]]]:
    return [(key, entry) for key, entry in recipe.config[slot].items() if entry is not None]


def _listener(recipe: Recipe, slot: str, key: str, entry: dict[str, Any]) -> Any:
    """Build a callback or logger; its schedule and error policy are taken off unless it takes them itself."""
    path = (slot, key)
    cls = _class(recipe, SLOTS[slot], entry, path)
    accepted = inspect.signature(cls).parameters
    own = [name for name in SLOTS[slot].extra if name in entry and name not in accepted]
    arguments = {name: value for name, value in entry.items() if name not in own}
    built = _build(recipe, SLOTS[slot], arguments, path)
    schedule = {name: entry[name] for name in own if name != "on_error"}
    if schedule:
        built.schedule = Schedule.parse(schedule)
    if "on_error" in own:
        built.on_error = entry["on_error"]
    built.name = key
    return built


def _target(slot: Slot, entry: dict[str, Any], path: Path) -> str:
    target = entry.get("_target_") or entry.get("name") or path[-1]
    if slot in (SLOTS["callbacks"], SLOTS["loggers"]):
        target = entry.get("_target_") or path[-1]
    return slot.builtins.get(str(target), str(target))


def _class(recipe: Recipe, slot: Slot, entry: dict[str, Any], path: Path) -> type[Any]:
    with _located(recipe, path):
        return resolve(_target(slot, entry, path), recipe.allow, (slot.base,))


def _build(
    recipe: Recipe,
    slot: Slot,
    entry: dict[str, Any],
    path: Path,
    *,
    supplied: dict[str, Any] | None = None,
    optional: dict[str, Any] | None = None,
) -> Any:
    """Build an object. ``optional`` arguments are passed where the constructor takes them and the recipe is silent."""
    cls = _class(recipe, slot, entry, path)
    is_named = slot.builtins and "_target_" not in entry and slot not in (SLOTS["callbacks"], SLOTS["loggers"])
    skip = {"_target_", "name"} if is_named else {"_target_"}
    arguments = {key: _value(recipe, value, (*path, key)) for key, value in entry.items() if key not in skip}
    if optional:
        accepted = inspect.signature(cls).parameters
        arguments = {key: value for key, value in optional.items() if key in accepted} | arguments
    return _call(recipe, cls, {**(supplied or {}), **arguments}, path)


def _value(recipe: Recipe, value: Any, path: Path) -> Any:
    if isinstance(value, str):
        return reveal(value)
    if isinstance(value, list):
        return [_value(recipe, item, (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    arguments = {key: _value(recipe, item, (*path, key)) for key, item in value.items() if key != "_target_"}
    if "_target_" not in value:
        return arguments
    with _located(recipe, path):
        cls = resolve(value["_target_"], recipe.allow)
    return _call(recipe, cls, arguments, path)


def _call(recipe: Recipe, cls: type[Any], arguments: dict[str, Any], path: Path) -> Any:
    with _located(recipe, path):
        try:
            return cls(**arguments)
        except CamshaftError:
            raise
        except _FAILURES as error:
            reason = redact(f"{type(error).__name__}: {error}")
            raise RecipeError(f"{cls.__name__} could not be built: {reason}{_place(recipe, error)}") from error


def _place(recipe: Recipe, error: Exception) -> str:
    """Say which line of the recipe's own Python raised an error: it is shown without a traceback."""
    folder = recipe.config.get("code")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if folder is not None and FilePath(frame.filename).is_relative_to(folder)]
    return f" ({FilePath(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


class _located:  # noqa: N801 - reads as the statement it is
    """Say where in the recipe an error arose."""

    def __init__(self, recipe: Recipe, path: Path) -> None:
        self.recipe = recipe
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, CamshaftError) or getattr(error, "located", False):
            return
        path = self.path
        while path and dotted(path) not in self.recipe.origins:
            path = path[:-1]
        origin = self.recipe.origins.get(dotted(path))
        place = f"{origin}: " if origin is not None else ""
        what, why, fix = map(redact, (error.what, error.why, error.fix))
        located = type(error)(f"{place}{dotted(self.path)}: {what}", why=why, fix=fix)
        located.located = True  # type: ignore[attr-defined]
        raise located from error
