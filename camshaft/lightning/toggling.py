"""Let one optimizer's parameters ask for gradients while another's do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def toggle(optimizer: Any, all_optimizers: Iterable[Any], earlier: dict[Tensor, bool] | None) -> dict[Tensor, bool]:
    """Switch every parameter of the other optimizers off; return the flags to give back, the oldest kept."""
    flags = dict(earlier or {})
    others = [p for other in all_optimizers for p in _parameters(other)]
    for parameter in others:
        flags.setdefault(parameter, parameter.requires_grad)
        parameter.requires_grad_(False)
    for parameter in _parameters(optimizer):
        # One that was frozen before stays so.
        parameter.requires_grad_(flags.get(parameter, True))
    return flags


def untoggle(optimizer: Any, flags: dict[Tensor, bool] | None) -> None:
    """Give the parameters of every other optimizer their flags back."""
    own = set(_parameters(optimizer))
    for parameter, flag in (flags or {}).items():
        if parameter not in own:
            parameter.requires_grad_(flag)


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
