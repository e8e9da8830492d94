"""Name what ZeRO keeps in flat partitions: parameters and optimizer state, for checkpoints and averages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from camshaft.errors import StrategyError
from camshaft.strategies.optimizers import check_alike, plain_value, revive_value
from camshaft.strategies.zero import Fragment


class ZeroState:
    """The optimizer of a ZeRO run under the names of the parameters whose fragments it holds.

    Made from the module's own optimizer before DeepSpeed replaces its groups; ``attach`` afterwards.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.kind = type(optimizer).__name__
        self.groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self._keys = [[key for key in group if key != "params"] for group in optimizer.param_groups]
        self._base = optimizer
        self.fragments: dict[str, Fragment] = {}

    def attach(self, base: Optimizer, fragments: Mapping[str, Fragment]) -> None:
        """Take the optimizer that DeepSpeed steps, and where each parameter lies."""
        self._base = base
        self.fragments = dict(fragments)

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (parameter name, state key, this rank's elements)."""
        for name, fragment in self.fragments.items():
            for key, value in self._base.state.get(fragment.flat, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    if value.shape != fragment.flat.shape:
                        raise StrategyError(
                            f"{self.kind} keeps {key!r} of shape {tuple(value.shape)} for "
                            f"{fragment.flat.numel()} parameters.",
                            why="ZeRO steps flat partitions, where such a state belongs to no parameter.",
                            fix="Use an optimizer with one value a parameter, such as AdamW, or another strategy.",
                        )
                    yield name, key, fragment.within(value)

    def data(self) -> dict[str, Any]:
        """Return the groups' options and the scalar state as JSON."""
        groups = [
            {key: plain_value(key, group.get(key)) for key in keys} | {"params": names}
            for group, keys, names in zip(self._base.param_groups, self._keys, self.groups, strict=True)
        ]
        state = {}
        for name, fragment in self.fragments.items():
            values = self._base.state.get(fragment.flat)
            if values is not None:
                state[name] = {k: _scalar(k, v) for k, v in values.items() if not (isinstance(v, Tensor) and v.ndim)}
        return {"kind": self.kind, "groups": groups, "state": state}

    def load(self, data: Mapping[str, Any], reader: Any) -> None:
        """Put back what any strategy saved: this rank reads the elements of its fragments."""
        check_alike(self.kind, self.groups, data)
        for group, saved in zip(self._base.param_groups, data["groups"], strict=True):
            group.update({key: revive_value(value) for key, value in saved.items() if key in group and key != "params"})
        saved_keys: dict[str, list[str]] = {}
        for entry in reader.names("optimizer"):
            prefix, _, key = entry.rpartition("/")
            saved_keys.setdefault(prefix.removeprefix("optimizer/0/"), []).append(key)
        for name, scalars in data["state"].items():
            fragment = self.fragments[name]
            state = self._base.state[fragment.flat]
            state.update({key: self._revived(key, value) for key, value in scalars.items()})
            for key in saved_keys.get(name, []):
                entry = f"optimizer/0/{name}/{key}"
                if key not in state:
                    state[key] = torch.zeros_like(fragment.flat.detach(), dtype=reader.spec(entry).dtype)
                if fragment.numel:
                    fragment.within(state[key]).copy_(reader.read_flat(entry, fragment.start, fragment.numel))

    def _revived(self, key: str, value: Any) -> Any:
        revived = revive_value(value)
        native = type(self._base).__module__.startswith("deepspeed")
        return int(revived) if native and key == "step" else revived


def _scalar(key: str, value: Any) -> Any:
    """Write a step count as torch's optimizers keep it, also where DeepSpeed's own counts in an int."""
    if key == "step" and isinstance(value, int):
        value = torch.tensor(float(value))
    return plain_value(key, value)
