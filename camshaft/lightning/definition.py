"""Refuse, when a class is defined, hooks that would never be called or could not be."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Collection
from typing import Any

from camshaft.lightning.errors import MisconfigurationException
from camshaft.lightning.hooks import DATA_HOOKS, MODULE_HOOKS

_EPOCH_END = "Log with on_epoch=True in the step, or collect in a list and read it in {0}."
_OF_LIGHTNING_1 = {
    "training_epoch_end": _EPOCH_END.format("on_train_epoch_end(self)"),
    "validation_epoch_end": _EPOCH_END.format("on_validation_epoch_end(self)"),
    "test_epoch_end": _EPOCH_END.format("on_test_epoch_end(self)"),
    "on_epoch_start": "Write on_train_epoch_start.",
    "on_epoch_end": "Write on_train_epoch_end.",
    "on_batch_start": "Write on_train_batch_start.",
    "on_batch_end": "Write on_train_batch_end.",
    "on_pretrain_routine_start": "Write on_fit_start.",
    "on_pretrain_routine_end": "Write on_fit_start.",
    "training_step_end": "Do it at the end of training_step.",
    "validation_step_end": "Do it at the end of validation_step.",
    "test_step_end": "Do it at the end of test_step.",
    "training_end": "Do it at the end of training_step.",
    "validation_end": "Write on_validation_epoch_end.",
    "test_end": "Write on_test_epoch_end.",
    "tbptt_split_batch": "Split the sequence in training_step with automatic_optimization = False.",
    "get_progress_bar_dict": "Log with prog_bar=True.",
    "on_train_dataloader": "Write train_dataloader.",
    "on_val_dataloader": "Write val_dataloader.",
    "on_load_checkpoint_end": "Write on_load_checkpoint.",
    "on_init_start": "Do it in __init__ or setup.",
    "on_init_end": "Do it in __init__ or setup.",
    "configure_sharded_model": "Write configure_model.",
    "on_hpc_save": "Write on_save_checkpoint.",
    "on_hpc_load": "Write on_load_checkpoint.",
}
_ARGUMENTS_GONE = {
    "optimizer_idx": "set automatic_optimization = False, and step every optimizer of self.optimizers() in it",
    "hiddens": "keep the hidden state in an attribute, detached, and set automatic_optimization = False",
}
_HOOK_SHAPED = re.compile(
    r"on_(((before|after)_)?(train|validation|val|test|predict|fit|sanity_check|zero_grad|backward|optimizer_step"
    r"|batch_transfer|save|load)(_(start|end|begin|finish|batch|epoch|model|checkpoint)\w*)?)$"
)


def check_module(cls: type) -> None:
    """Check the methods that a ``LightningModule`` class defines itself.

    Raises:
        MisconfigurationException: a hook of Lightning 1, one that nothing calls, or one with other arguments.
    """
    _check(cls, MODULE_HOOKS | DATA_HOOKS)
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        step = vars(cls).get(name)
        for gone in _ARGUMENTS_GONE if inspect.isfunction(step) else ():
            if gone in inspect.signature(step).parameters:
                raise MisconfigurationException(
                    f"{cls.__qualname__}.{name} takes {gone!r}, as in Lightning 1.",
                    why="Nothing passes it since Lightning 2.",
                    fix=f"Instead, {_ARGUMENTS_GONE[gone]}.",
                )


def check_callback(cls: type, hooks: Collection[str]) -> None:
    """Check the methods that a ``Callback`` class defines itself; ``hooks`` are those that exist."""
    _check(cls, hooks)


def _check(cls: type, hooks: Collection[str]) -> None:
    for name, value in vars(cls).items():
        if not inspect.isfunction(value):
            continue
        if name in _OF_LIGHTNING_1:
            raise MisconfigurationException(
                f"{cls.__qualname__}.{name} is a hook of Lightning 1.",
                why="It would never be called.",
                fix=_OF_LIGHTNING_1[name],
            )
        if name in hooks:
            _check_arguments(cls, name, value)
        elif _HOOK_SHAPED.match(name):
            nearest = difflib.get_close_matches(name, sorted(hooks), n=1, cutoff=0.0)
            raise MisconfigurationException(
                f"{cls.__qualname__}.{name} is not a hook.",
                why="It would never be called.",
                fix=f"Did you mean {nearest[0]!r}? A method of your own needs another name than on_....",
            )


def _check_arguments(cls: type, name: str, hook: Any) -> None:
    inherited = next((getattr(base, name) for base in reversed(cls.__mro__) if hasattr(base, name)), None)
    if inherited is None or inherited is hook:
        return
    expected = list(inspect.signature(inherited).parameters.values())
    needed = [p.name for p in expected if p.default is p.empty]
    try:
        inspect.signature(hook).bind(*needed)
    except TypeError:
        wanted = ", ".join(str(p).split(":")[0] for p in expected)
        raise MisconfigurationException(
            f"{cls.__qualname__}.{name}{inspect.signature(hook)} does not take the arguments of its hook.",
            why="The first time it fired it would fail.",
            fix=f"Write 'def {name}({wanted})'.",
        ) from None
