"""Keep checkpoints to tensors and plain data, so that loading one never runs code."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import Tensor

from camshaft.errors import CheckpointError


def plain(value: Any, where: str) -> Any:
    """Return a value as tensors and plain data.

    Raises:
        CheckpointError: it holds an object; where is said.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes, Tensor)):
        return _exact(value)
    if isinstance(value, Mapping):
        return {plain(key, where): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (set, frozenset)):
        return {plain(item, where) for item in value}
    return _converted(value, where)


def _exact(value: Any) -> Any:
    """Return the plain type of a subclass, such as an enum's value or a numpy float."""
    for kind in (str, bool, int, float):
        if isinstance(value, kind) and type(value) not in (str, bool, int, float):
            return kind(value)
    if isinstance(value, Tensor) and type(value) is not Tensor:
        return value.detach().as_subclass(Tensor)  # type: ignore[arg-type]
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def _converted(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        import torch

        return torch.from_numpy(value.copy())
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, argparse.Namespace):
        return plain(vars(value), where)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), f"{where}.{field.name}") for field in dataclasses.fields(value)}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}.",
        why="A checkpoint holds tensors and plain data, so that loading one never runs code.",
        fix="Put its state_dict or its numbers there, and build it again in on_load_checkpoint.",
    )
