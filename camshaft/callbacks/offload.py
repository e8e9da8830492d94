"""Keep in host memory what the device does not need at the moment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from camshaft.callback import Callback
from camshaft.errors import RecipeError, StrategyError
from camshaft.layers import find_blocks, find_layers, wrap_forward

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from camshaft.module import Module
    from camshaft.state import State
    from camshaft.strategies.base import Strategy


class Offload(Callback):
    """Keep activations, or the optimizer's state, in host memory until they are needed.

    ``activations`` is true for those of the module's repeated blocks, or names layers: what they save for
    backward waits on the host. ``optimizer`` keeps its state there between updates. Both cost copies over
    the bus, and change no result. On a CPU everything is in host memory already, and this does nothing.
    Parameters are offloaded by the strategies that shard them (``cpu_offload``, ``offload_param``).
    """

    def __init__(self, *, activations: bool | str | Sequence[str] = False, optimizer: bool = False) -> None:
        if not activations and not optimizer:
            raise RecipeError(
                "Offload has neither activations nor optimizer.",
                why="Nothing would be moved.",
                fix="Set activations: true, optimizer: true, or both.",
            )
        self.activations = activations
        self.optimizer = optimizer
        self._pins = False
        self._hooks: list[Any] = []

    def on_launch(self, strategy: Strategy) -> None:
        """Learn whether copies can be pinned; refuse what a strategy does itself.

        Raises:
            StrategyError: the strategy partitions the optimizer's state and has an option of its own.
        """
        self._pins = strategy.device.type == "cuda"
        if self.optimizer and not strategy.replicates:
            raise StrategyError(
                f"callbacks.{self.name}.optimizer cannot move what {strategy.name} partitions.",
                fix="Use the strategy's own option: {name: fsdp, cpu_offload: true}, or "
                "{name: deepspeed, offload_optimizer: cpu}.",
            )

    def on_module(self, module: Module) -> None:
        """Wrap the forward of the layers whose activations move, in place."""
        if not self.activations:
            return
        who = f"callbacks.{self.name}.activations"
        wanted = self.activations
        found = find_blocks(module, who=who) if isinstance(wanted, bool) else find_layers(module, wanted, who=who)
        for name, layer in found.items():
            if not any(name.startswith(f"{other}.") for other in found):
                wrap_forward(layer, functools.partial(_offloaded, pins=self._pins))

    def on_fit_start(self, state: State) -> None:
        """Bring the optimizer's state to the device around each update only."""
        if self.optimizer and state.stage == "fit":
            for optimizer in state.optimizers:
                device = state.strategy.device
                self._hooks.append(optimizer.register_step_pre_hook(lambda o, *_, device=device: _move(o, device)))
                self._hooks.append(optimizer.register_step_post_hook(lambda o, *_: _move(o, torch.device("cpu"))))
                _move(optimizer, torch.device("cpu"))

    def on_fit_end(self, state: State) -> None:
        """Let go of the optimizers."""
        del state
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _offloaded(forward: Callable[..., Any], *, pins: bool) -> Callable[..., Any]:
    return functools.partial(_run, forward, pins)


def _run(forward: Callable[..., Any], pins: bool, *args: Any, **kwargs: Any) -> Any:
    with save_on_cpu(pin_memory=pins):
        return forward(*args, **kwargs)


def _move(optimizer: Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim and value.device.type != device.type:
                state[key] = value.to(device)
