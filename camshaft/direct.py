"""Compose a run from Python objects, with the defaults that a recipe has."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from camshaft.assembly import Parts
from camshaft.callback import Callback
from camshaft.callbacks.seed import Seed
from camshaft.data import DataModule
from camshaft.errors import RecipeError
from camshaft.loggers.base import Logger
from camshaft.module import Module
from camshaft.recipe.arguments import read_settings
from camshaft.recipe.provenance import collect
from camshaft.recipe.registry import CALLBACKS, DEFAULT_LOGGERS, FIRST_CALLBACKS, LAST_CALLBACKS, LOGGERS, STRATEGIES
from camshaft.recipe.settings import Launch, Settings
from camshaft.strategies.base import Strategy
from camshaft.terminal import say

if TYPE_CHECKING:
    from camshaft.session import Result
    from camshaft.state import State

_KEEPER = "whole_weights"

_BUILT_HERE = ("module", "data", "strategy", "optimizer", "scheduler", "callbacks", "loggers", "choices", "launch")


def direct_parts(
    module: Module,
    data: DataModule | None,
    *,
    strategy: Strategy | str | Mapping[str, Any],
    name: str,
    callbacks: Mapping[str, Callback | None],
    loggers: Mapping[str, Logger | None],
    settings: dict[str, Any],
) -> Parts:
    """Compose what ``camshaft.run`` was given. A callback or logger that is None switches the default off.

    Raises:
        RecipeError: a setting is no top-level key of a recipe, or is wrong by the rules of one.
    """
    _require_objects(callbacks, Callback, "callbacks")
    _require_objects(loggers, Logger, "loggers")
    read = _settings(settings, callbacks)
    return Parts(
        settings=read,
        strategy=strategy if isinstance(strategy, Strategy) else _strategy(strategy, read.device),
        build_module=lambda: module,
        build_data=lambda: data,
        callbacks=_callbacks(read, callbacks),
        loggers=_filled({key: (lambda key=key: _class(LOGGERS[key])()) for key in DEFAULT_LOGGERS}, loggers),
        name=name,
        provenance=lambda parent: collect(seed=read.seed, parent=parent),
    )


def _settings(settings: dict[str, Any], callbacks: Mapping[str, Callback | None]) -> Settings:
    known = [field.name for field in dataclasses.fields(Settings) if field.name not in _BUILT_HERE]
    for key in settings:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise RecipeError(
                f"camshaft.run has no argument {key!r}.",
                why="It would be ignored.",
                fix=f"Did you mean {nearest[0]!r}?",
            )
    seed = callbacks.get("seed")
    # As in a recipe: the order of samples follows the seed, wherever it is said.
    followed: dict[str, Any] = {"seed": seed.seed} if isinstance(seed, Seed) and "seed" not in settings else {}
    given = [name for name, callback in callbacks.items() if callback is not None]
    # Nothing says that an earlier run was the same: continuing it has to be asked for.
    read = read_settings({"resume": "never", **settings}, given, who="camshaft.run")
    return dataclasses.replace(read, **followed)


def _require_objects(given: Any, kind: type[Any], argument: str) -> None:
    """Refuse what cannot be callbacks or loggers by name, such as a list of them or a class."""
    if not isinstance(given, Mapping):
        raise RecipeError(
            f"{argument} is a {type(given).__name__}.",
            why="Each has a name: the key of its state in checkpoints.",
            fix="Pass a dict of names and objects.",
        )
    for name, value in given.items():
        if value is not None and not isinstance(value, kind):
            what = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
            raise RecipeError(
                f"{argument}[{name!r}] is {what}, and no {kind.__name__}.",
                fix=f"Pass an object of a subclass of camshaft.{kind.__name__}, or None to switch a default off.",
            )


def run_in_processes(module: Module, data: DataModule | None, *, num_processes: int, **given: Any) -> Result:
    """Do what ``camshaft.run`` does in several new processes; ``given`` is what ``direct_parts`` takes besides.

    Raises:
        CamshaftError: anything is wrong that can be seen here, or what the first failing rank raised.
    """
    from camshaft.launch import choose_count
    from camshaft.launchcall import in_processes

    parts = direct_parts(module, data, **given)
    launch = Launch(num_processes=num_processes)
    count = choose_count(launch, parts.strategy.name, parts.settings.device)
    result: Result
    result, weights = in_processes(_run_one, (module, data, given), launch, count)
    if weights.keys() == module.state_dict().keys():
        module.load_state_dict(weights)
        result.module = module
    else:
        say("Callbacks changed the module's layers: its weights stayed in the processes; load them from a checkpoint.")
    return result


def _run_one(module: Module, data: DataModule | None, given: dict[str, Any]) -> tuple[Result, dict[str, Tensor]]:
    """Run on one of several ranks; return the result, and on the main process whole weights."""
    from camshaft.session import execute

    parts = direct_parts(module, data, **given)
    parts.callbacks[_KEEPER] = keeper = _Weights()
    result = execute(parts)
    result.module = None
    return result, keeper.weights


class _Weights(Callback):
    """Keep whole weights when the run ends, before its processes part."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self._has_failed = False

    def on_exception(self, state: State, error: BaseException) -> None:
        """Remember that peers may be gone."""
        self._has_failed = True

    def on_fit_end(self, state: State) -> None:
        """Copy the weights to the main process's memory."""
        if self._has_failed:
            return
        module = state.module
        # Asked before, since FSDP shards again what somebody asks a state_dict of.
        kept = module.state_dict().keys()
        with state.strategy.full_parameters():
            if state.strategy.is_main:
                tensors = dict(module.named_buffers(remove_duplicate=False))
                tensors |= dict(module.named_parameters(remove_duplicate=False))
                self.weights = {name: t.detach().cpu().clone() for name, t in tensors.items() if name in kept}


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


def _strategy(given: str | Mapping[str, Any], device: str) -> Strategy:
    """Build a strategy from its short name, or from a mapping of the name and its options, as a recipe has it."""
    options = dict(given) if isinstance(given, Mapping) else {"name": given}
    name = options.pop("name", None)
    if name not in STRATEGIES:
        nearest = difflib.get_close_matches(str(name), STRATEGIES, n=1, cutoff=0.0)
        raise RecipeError(
            f"strategy {name!r} is unknown.",
            fix=f"Did you mean {nearest[0]!r}? The strategies are {', '.join(STRATEGIES)}, or an object of your own.",
        )
    kind = _class(STRATEGIES[name])
    takes = [key for key in inspect.signature(kind).parameters if key != "device"]
    for key in options:
        if key not in takes:
            raise RecipeError(
                f"strategy {name!r} has no option {key!r}.",
                why="It would be ignored.",
                fix=f"Its options are {', '.join(takes) or '(none)'}; the device is an argument of camshaft.run.",
            )
    result: Strategy = kind(device=device, **options)
    return result


def _class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
