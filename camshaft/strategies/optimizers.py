"""Read an optimizer's state under the names of its parameters, and put it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from camshaft.errors import CheckpointError

if TYPE_CHECKING:
    from camshaft.strategies.base import Strategy


def tensor_state(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (parameter name, state key, tensor) for every state tensor that has a dim.

    ``names`` maps ``id(parameter)`` to its canonical name.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                yield names[id(parameter)], key, value


def plain_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the groups' options and the scalar state as JSON, by parameter name.

    Raises:
        CheckpointError: a parameter's state holds something that is no number, text or tensor.
    """
    groups = [
        {key: plain_value(key, value) for key, value in group.items() if key != "params"}
        | {"params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        own = {k: plain_value(k, v) for k, v in state.items() if not (isinstance(v, Tensor) and v.ndim)}
        scalars[names[id(parameter)]] = own
    return {"kind": type(optimizer).__name__, "groups": groups, "state": scalars}


def load_state(
    strategy: Strategy, optimizer: Optimizer, index: int, names: Mapping[int, str], data: Mapping[str, Any], reader: Any
) -> None:
    """Fill ``optimizer`` from a checkpoint's plain state and its tensors ``optimizer/<index>/<name>/<key>``.

    Raises:
        CheckpointError: the optimizer is of another kind, or its groups hold other parameters.
    """
    own = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    check_alike(type(optimizer).__name__, own, data)
    for group, saved in zip(optimizer.param_groups, data["groups"], strict=True):
        group.update({key: revive_value(value) for key, value in saved.items() if key != "params"})
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    keys: dict[str, list[str]] = {}
    for entry in reader.names("optimizer"):
        prefix, _, key = entry.rpartition("/")
        keys.setdefault(prefix, []).append(key)
    for name, scalars in data["state"].items():
        parameter = parameters[name]
        state: dict[str, Any] = {key: revive_value(value) for key, value in scalars.items()}
        for key in keys.get(f"optimizer/{index}/{name}", []):
            entry = f"optimizer/{index}/{name}/{key}"
            spec = reader.spec(entry)
            alike = tuple(spec.shape) == tuple(parameter.shape)
            tensor = (
                torch.zeros_like(parameter, dtype=spec.dtype)
                if alike
                else torch.zeros(tuple(spec.shape), dtype=spec.dtype, device=parameter.device)
            ).detach()
            strategy.load(name, tensor, reader, entry)
            state[key] = tensor
        optimizer.state[parameter] = state


def check_alike(kind: str, own: list[list[str]], data: Mapping[str, Any]) -> None:
    """Raise unless saved state is of this kind of optimizer, with these parameters in these groups."""
    if data["kind"] != kind:
        raise CheckpointError(
            f"the checkpoint was trained with {data['kind']}, and this run has {kind}.",
            why="The state of one means nothing to the other.",
            fix="Use the same optimizer, or start from the weights alone with resume.weights_only=true.",
        )
    saved = [list(group["params"]) for group in data["groups"]]
    if own != saved:
        differing = sorted({n for g in own for n in g} ^ {n for g in saved for n in g})[:5]
        detail = f"such as {', '.join(differing)}" if differing else "in another order or grouping"
        raise CheckpointError(
            f"{kind} has other parameters than in the checkpoint, {detail}.",
            why="Its state would be given to the wrong weights.",
            fix="Build the parameter groups as in the run that was saved.",
        )


def plain_value(key: str, value: Any) -> Any:
    """Return an option or a scalar state as JSON; a tensor of one element keeps its dtype."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": str(value.dtype).removeprefix("torch."), "value": value.item()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(plain_value(key, item) for item in value)
    raise CheckpointError(
        f"an optimizer keeps a {type(value).__name__} under {key!r}.",
        why="A checkpoint holds numbers, text and tensors only, so that loading one never runs code.",
        fix="Use an optimizer whose state is tensors and numbers.",
    )


def revive_value(value: Any) -> Any:
    """Return what ``plain_value`` was given."""
    if isinstance(value, dict) and set(value) == {"tensor", "value"}:
        return torch.tensor(value["value"], dtype=getattr(torch, value["tensor"]))
    return value
