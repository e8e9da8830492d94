"""Refuse, before anything is trained, what could only fail or be ignored later."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

from torch.optim import Optimizer

from camshaft.callback import STEP_EVENTS, Callback
from camshaft.errors import CallbackError, ModuleError, RecipeError
from camshaft.module import Module
from camshaft.schedule import Schedule
from camshaft.state import Stage, State

_NEEDED = {"fit": ("training_step",), "validate": ("validation_step",), "test": ("test_step", "validation_step")}


def require_step(module: Module, stage: Stage) -> None:
    """Refuse a module without the step that the stage runs; prediction has one that calls the module."""
    needed = _NEEDED.get(stage, ())
    if needed and not any(module.overrides(name) for name in needed):
        raise ModuleError(
            f"{type(module).__name__} has no {needed[0]}.",
            why=f"There is nothing to {'train' if stage == 'fit' else stage} with.",
            fix=f"Write 'def {needed[0]}(self, batch)'.",
        )


def require_trainable(module: Module) -> None:
    """Refuse to build an optimizer of nothing, now or later."""
    if not module.later_groups and not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModuleError(
            f"{type(module).__name__} has no parameter that asks for a gradient.",
            why="There is nothing for an optimizer to change.",
            fix="Give it layers, or freeze less of it.",
        )


def require_optimizers(module: Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse to train without an optimizer, with one of other parameters, or with one that needs a closure."""
    if not optimizers:
        raise ModuleError(
            f"{type(module).__name__} has no optimizer.",
            why="Nothing would be learned.",
            fix="Return one from configure_optimizers, or give the recipe 'optimizer: {name: adamw, lr: 1.0e-3}'.",
        )
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise ModuleError(
                f"{type(optimizer).__name__} holds no parameter of {type(module).__name__}.",
                why="It would change something else, and the module would learn nothing.",
                fix="Make it in configure_optimizers from self.parameters().",
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ModuleError(
                f"{type(optimizer).__name__} needs a closure that computes the loss again.",
                why="A step has one forward and backward for each of its micro-batches.",
                fix="Use an optimizer whose step takes no closure, such as AdamW.",
            )


def require_reachable(state: State, callbacks: Mapping[str, Callback]) -> None:
    """Refuse a schedule of validation or of a callback that never comes within the run, or that nothing follows."""
    schedule = state.validation.schedule
    if schedule is not None and not _comes(state, schedule):
        raise RecipeError(
            f"validate is '{schedule}', and the run plans {state.planned_steps} steps.",
            why="It would never validate.",
            fix="Validate more often, train longer, or set validate: null.",
        )
    for name, callback in callbacks.items():
        if callback.schedule is None:
            continue
        if not any(getattr(type(callback), event) is not getattr(Callback, event) for event in STEP_EVENTS):
            raise CallbackError(
                f"callbacks.{name} carries the schedule '{callback.schedule}', and {type(callback).__name__} "
                "listens to no event of a step.",
                why="A schedule holds back the events of a step alone, so it would be ignored.",
                fix="Remove every, at and after from it.",
            )
        if not _comes(state, callback.schedule):
            raise RecipeError(
                f"callbacks.{name} is due {callback.schedule}, and the run plans {state.planned_steps} steps.",
                why="It would never hear of a step.",
                fix="Shorten the interval, or lengthen the run.",
            )


def _comes(state: State, schedule: Schedule) -> bool:
    return schedule.can_fire(max_steps=state.planned_steps, max_epochs=state.limits.max_epochs)
