"""Write values as strict JSON that comes back exactly as it went in."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Never

from camshaft.checkpoint.entries import Json
from camshaft.errors import CheckpointError

_FLOAT = "$float"
_TUPLE = "$tuple"
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(values: Mapping[str, Json], *, where: str) -> bytes:
    """Return ``values`` as readable, strict JSON; NaN, infinities and tuples are tagged, never altered.

    Raises:
        CheckpointError: a value JSON cannot hold, named with its path below ``where``.
    """
    text = json.dumps(_tag(values, where), indent=1, allow_nan=False, ensure_ascii=False)
    return text.encode() + b"\n"


def decode(raw: bytes, *, where: str) -> dict[str, Json]:
    """Return what ``encode`` wrote.

    Raises:
        CheckpointError: ``raw`` is not strict JSON of a mapping.
    """
    try:
        values = _untag(json.loads(raw.decode(), parse_constant=_refuse_constant))
    except (ValueError, RecursionError) as error:
        raise _unreadable(where, str(error)) from error
    if not isinstance(values, dict):
        raise _unreadable(where, f"it holds a {type(values).__name__}, not a mapping")
    return values


def _tag(value: object, where: str) -> object:
    if isinstance(value, float):
        # float() because numpy's float64 is a float whose repr json would not use.
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [_tag(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, list):
        return [_tag(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key in (_FLOAT, _TUPLE):
                raise _unwritable(
                    where, f"has the key {key!r}", "Use strings as keys, other than '$float' and '$tuple'."
                )
        return {str(key): _tag(item, f"{where}.{key}") for key, item in value.items()}
    raise _unwritable(
        where, f"is a {type(value).__name__}", "Convert it to numbers, strings, lists and dicts; tensors go to tensors."
    )


def _untag(value: object) -> Json:
    if isinstance(value, list):
        return [_untag(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_FLOAT}:
            return _FLOATS[str(value[_FLOAT])] if str(value[_FLOAT]) in _FLOATS else _refuse_constant(str(value))
        if value.keys() == {_TUPLE} and isinstance(value[_TUPLE], list):
            return tuple(_untag(item) for item in value[_TUPLE])
        return {str(key): _untag(item) for key, item in value.items()}
    assert value is None or isinstance(value, bool | int | float | str)
    return value


def _refuse_constant(text: str) -> Never:
    raise ValueError(f"{text} is no JSON number")


def _unwritable(where: str, what: str, fix: str) -> CheckpointError:
    return CheckpointError(f"{where} {what}.", why="A checkpoint holds JSON, so that loading it runs no code.", fix=fix)


def _unreadable(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is not readable: {why}.", why="The file is damaged.", fix="Use another checkpoint; resume: auto does."
    )
