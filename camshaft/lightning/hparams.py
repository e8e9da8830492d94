"""Keep the arguments that an object was made with, as Lightning's ``save_hyperparameters`` does."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import warnings
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from camshaft.errors import ModuleError
from camshaft.hparams import Hparams, check_plain


class HyperparametersMixin:
    """Hold ``hparams``: the arguments of ``__init__``, kept by ``save_hyperparameters``.

    Whatever was given is kept in the object; a checkpoint holds what is plain data of it.
    """

    is_surface = True
    _hyperparameters: Hparams | None = None
    _initial: Hparams | None = None
    _hparams_name: str | None = None
    _logs_hparams: bool = True

    def save_hyperparameters(
        self, *args: Any, ignore: str | Iterable[str] | None = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        """Keep arguments of ``__init__``: all of them, those named, or the entries of a mapping or namespace.

        ``ignore`` leaves names out. ``logger`` says whether loggers get them when training starts.
        """
        caller = frame if frame is not None else getattr(inspect.currentframe(), "f_back", None)
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        given = collect_arguments(self, caller)
        names = [entry for entry in args if isinstance(entry, str)]
        whole = next((entry for entry in args if not isinstance(entry, str)), None)
        if whole is not None:
            chosen = _as_mapping(whole)
            # The one argument that they came as: loading passes it again.
            same = (name for name, value in given.items() if value is whole)
            object.__setattr__(self, "_hparams_name", next(same, None))
        elif names:
            # A name that is no argument may be one of **kwargs, or is a mistake that Lightning ignores too.
            chosen = {name: given[name] for name in names if name in given}
        else:
            chosen = given
        kept = self.hparams
        kept.update(chosen)
        for name in ignored:
            kept.pop(name, None)
        object.__setattr__(self, "_initial", Hparams({name: _copied(value) for name, value in kept.items()}))
        object.__setattr__(self, "_logs_hparams", logger)

    @property
    def hparams(self) -> Hparams:
        """The hyper-parameters; keys are attributes too."""
        if self._hyperparameters is None:
            object.__setattr__(self, "_hyperparameters", Hparams())
        assert self._hyperparameters is not None
        return self._hyperparameters

    @property
    def hparams_initial(self) -> Hparams:
        """The hyper-parameters as they were when they were kept."""
        return Hparams(self._initial or {})


def collect_arguments(owner: object, frame: FrameType | None) -> dict[str, Any]:
    """Return the arguments of every ``__init__`` of ``owner`` that runs, an outer class's over an inner one's."""
    found: list[dict[str, Any]] = []
    while frame is not None and len(found) < len(type(owner).__mro__):
        names, rest, keywords, values = inspect.getargvalues(frame)
        is_constructor = frame.f_code.co_name in ("__init__", "__post_init__")
        if is_constructor and names and values.get(names[0]) is owner:
            found.append(
                {name: values[name] for name in names[1:] if name in values} | (values[keywords] if keywords else {})
            )
        frame = frame.f_back
    merged: dict[str, Any] = {}
    for arguments in found:
        merged |= arguments
    if dataclasses.is_dataclass(owner) and not found:
        merged = {field.name: getattr(owner, field.name) for field in dataclasses.fields(owner)}
    merged.pop("__class__", None)
    return merged


def plain_hparams(owner: HyperparametersMixin) -> dict[str, Any]:
    """Return the hyper-parameters that a checkpoint can hold, and warn of the others by name."""
    plain, dropped = {}, []
    for name, value in owner.hparams.items():
        kept = _as_plain(value)
        try:
            check_plain(type(owner).__name__, name, kept)
        except ModuleError:
            dropped.append(name)
        else:
            plain[name] = kept
    if dropped and not getattr(owner, "_warned_of_hparams", False):
        object.__setattr__(owner, "_warned_of_hparams", True)
        warnings.warn(
            f"{type(owner).__name__}: checkpoints do not hold {', '.join(dropped)}, which is no plain data. "
            "Pass it to load_from_checkpoint, or leave it out with save_hyperparameters(ignore=[...]).",
            stacklevel=2,
        )
    return plain


def _as_plain(value: Any) -> Any:
    """Turn what holds plain data into plain data: namespaces, dataclasses, tuples and OmegaConf containers."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    elif type(value).__module__.startswith("omegaconf"):
        value = _plain_config(value)
    if isinstance(value, Mapping):
        return {key: _as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_plain(item) for item in value]
    return value


def _plain_config(value: Any) -> Any:
    """Read an OmegaConf container by its own interface: it is a mapping or a sequence."""
    if hasattr(value, "items"):
        return {str(key): _as_plain(value[key]) for key in value}
    return [_as_plain(item) for item in value]


def _as_mapping(entry: Any) -> dict[str, Any]:
    if isinstance(entry, argparse.Namespace):
        return dict(vars(entry))
    if isinstance(entry, Mapping) or hasattr(entry, "items"):
        return dict(entry.items())
    if dataclasses.is_dataclass(entry) and not isinstance(entry, type):
        return {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    raise ModuleError(
        f"save_hyperparameters got a {type(entry).__name__}.",
        fix="Pass names of arguments, a mapping, a Namespace or a dataclass.",
    )


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - what cannot be copied is kept as it is
        return value
