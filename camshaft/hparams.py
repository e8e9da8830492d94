"""Hold hyper-parameters: the arguments that a module was made with, as plain data."""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from camshaft.errors import ModuleError


class Hparams(dict[str, Any]):
    """Hyper-parameters: a dict of plain data whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyper-parameter {name!r}; there are {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def hyperparameters(owner: object, caller: FrameType | None, names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of the ``__init__`` calls that make ``owner``, from ``caller`` outwards.

    Arguments that only an outer ``__init__`` takes, of a class derived from the caller's, are left out
    with a warning when they are not plain: the caller cannot know them.

    Raises:
        ModuleError: ``caller`` is not an ``__init__`` of ``owner``, or has no argument of a name.
    """
    frames = list(_constructors(owner, caller))
    if not frames:
        raise ModuleError(
            "save_hyperparameters was called outside __init__.",
            why="Only there are the arguments known.",
            fix="Call it in __init__, or pass a mapping: save_hyperparameters({'lr': 0.1}).",
        )
    own = _arguments(frames[0])
    if unknown := [name for name in names if name not in own]:
        nearest = difflib.get_close_matches(unknown[0], own, n=1, cutoff=0.0)
        raise ModuleError(
            f"save_hyperparameters({unknown[0]!r}): {type(owner).__name__}.__init__ has no such argument.",
            why="It would not be kept.",
            fix=f"Did you mean {nearest[0]!r}?" if nearest else "Name arguments of __init__.",
        )
    if names:
        return {name: own[name] for name in names}
    for frame in frames[1:]:
        for name, value in _arguments(frame).items():
            try:
                check_plain(type(owner).__name__, name, value)
            except ModuleError as error:
                if name not in own:
                    warnings.warn(f"{name} is not kept in hparams. {error.what}", stacklevel=3)
            else:
                own[name] = value
    return own


def check_plain(owner: str, name: str, value: Any) -> None:
    """Refuse what a checkpoint cannot keep as JSON; ``owner`` and ``name`` say whose argument it is."""
    if value is None or isinstance(value, (str, bool, int)):
        return
    if isinstance(value, float) and not math.isnan(value):
        return
    if isinstance(value, (list, tuple)):
        for item in value:
            check_plain(owner, name, item)
        return
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for item in value.values():
            check_plain(owner, name, item)
        return
    raise ModuleError(
        f"save_hyperparameters: {owner} holds a {type(value).__name__}, which is not plain data.",
        why="A checkpoint keeps hyper-parameters as JSON, so that loading one never runs code.",
        fix=f"Pass the numbers and names it is made from, or call save_hyperparameters(ignore=[{name!r}]).",
    )


def _constructors(owner: object, frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of ``__init__`` that run for ``owner``, from the innermost out."""
    while frame is not None and frame.f_code.co_name == "__init__":
        names, _, _, values = inspect.getargvalues(frame)
        if not names or values.get(names[0]) is not owner:
            return
        yield frame
        frame = frame.f_back


def _arguments(frame: FrameType) -> dict[str, Any]:
    """Read the arguments of the call that ``frame`` runs, without ``self``; *args as a list under their name."""
    names, rest, keywords, values = inspect.getargvalues(frame)
    arguments = {name: values[name] for name in names[1:] if name in values}
    if rest and values[rest]:
        arguments[rest] = list(values[rest])
    return arguments | (values[keywords] if keywords else {})
