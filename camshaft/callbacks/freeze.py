"""Freeze parts of a module, and let them train later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from camshaft.callback import Callback
from camshaft.errors import RecipeError, StrategyError
from camshaft.layers import find_parameters, listed

if TYPE_CHECKING:
    from camshaft.module import Module
    from camshaft.state import State
    from camshaft.strategies.base import Strategy


@dataclass(slots=True)
class _Stage:
    """What begins to train after so many updates."""

    start: int
    wanted: list[str]
    lr: float | None
    parameters: dict[str, nn.Parameter]


class Freeze(Callback):
    """Keep layers or parameters as they are: no gradient, no update, no optimizer state.

    ``layers`` names them by class, name or pattern. ``unfreeze`` lets some of them train later:
    ``{100: [head], 200: {layers: [encoder], lr: 1.0e-5}}`` counts updates. Each of these stages is a
    parameter group of its own from the start, so that a scheduler moves it like the others, and a resumed
    run has the same groups; ``lr`` is its rate where the recipe has the ``optimizer``. ``eval_mode`` also
    keeps what is frozen in eval mode: no dropout, and batch norms keep their statistics.
    """

    def __init__(
        self,
        layers: str | Sequence[str],
        *,
        unfreeze: Mapping[int, str | Sequence[str] | Mapping[str, Any]] | None = None,
        eval_mode: bool = False,
    ) -> None:
        self.layers = listed(layers)
        self.eval_mode = eval_mode
        self.stages = [_read(start, value) for start, value in (unfreeze or {}).items()]
        self.stages.sort(key=lambda stage: stage.start)
        self._waiting: list[_Stage] = []
        self._resting: dict[str, nn.Module] = {}

    def on_launch(self, strategy: Strategy) -> None:
        """Refuse a schedule where the strategy lays out what trains once and for all."""
        if self.stages and not strategy.trains_late:
            raise StrategyError(
                f"callbacks.{self.name}.unfreeze cannot run under {strategy.name}.",
                why="It partitions what trains when it is set up.",
                fix="Use strategy: ddp or fsdp, or freeze for the whole run.",
            )

    def on_module(self, module: Module) -> None:
        """Freeze, and give what trains later to the optimizer as groups of their own."""
        who = f"callbacks.{self.name or 'freeze'}"
        frozen = find_parameters(module, self.layers, who=who)
        for parameter in frozen.values():
            parameter.requires_grad_(False)
        taken: set[str] = set()
        for stage in self.stages:
            found = find_parameters(module, stage.wanted, who=f"{who}.unfreeze.{stage.start}")
            thawed = [name for name in found if name not in frozen]
            if thawed or not found.keys() - taken:
                what = f"{thawed[0]}, which is not frozen" if thawed else "what an earlier stage did already"
                raise RecipeError(
                    f"{who}.unfreeze.{stage.start} unfreezes {what}.", fix=f"Freeze it too, or leave it out of {who}."
                )
            stage.parameters = {name: p for name, p in found.items() if name not in taken}
            taken |= found.keys()
        if not any(p.requires_grad for p in module.parameters()):
            raise RecipeError(
                f"{who} freezes every parameter of {type(module).__name__}.",
                why="Nothing would be learned.",
                fix="Leave something out of layers, or add adapters with callbacks.lora before it.",
            )
        module.later_groups = [*module.later_groups, *((stage.parameters, _options(stage)) for stage in self.stages)]
        if self.eval_mode:
            self._rest(module, frozen)
        self._waiting = list(self.stages)

    def on_fit_start(self, state: State) -> None:
        """Check that an optimizer holds what trains later, and catch up with the step a run resumes at."""
        if state.stage != "fit":
            return
        held = {name for o in state.optimizers for name in _names(state, o)}
        for stage in self.stages:
            missing = sorted(stage.parameters.keys() - held)
            if missing:
                raise RecipeError(
                    f"callbacks.{self.name}.unfreeze.{stage.start} names {missing[0]}, which no optimizer holds.",
                    why="It would never be trained.",
                    fix="Give configure_optimizers all parameters, or write the optimizer into the recipe.",
                )
            if stage.lr is not None and not _has_group(state, stage):
                raise RecipeError(
                    f"callbacks.{self.name}.unfreeze.{stage.start}.lr needs the recipe's own optimizer.",
                    why="The groups of configure_optimizers are the module's.",
                    fix="Write optimizer into the recipe, or set the rate of these parameters in configure_optimizers.",
                )
        self._unfreeze(state)

    def on_step_start(self, state: State, window: list[object]) -> None:
        """Let what is due train from this step on."""
        del window
        if self._waiting and state.progress.step >= self._waiting[0].start:
            self._unfreeze(state)

    def _unfreeze(self, state: State) -> None:
        due = [stage for stage in self._waiting if stage.start <= state.progress.step]
        self._waiting = [stage for stage in self._waiting if stage.start > state.progress.step]
        names = {name for stage in due for name in stage.parameters}
        if names:
            state.strategy.train_also(names)
            for name, layer in list(self._resting.items()):
                if any(p.requires_grad for p in layer.parameters()):
                    self._resting.pop(name).train()

    def _rest(self, module: Module, frozen: Mapping[str, nn.Parameter]) -> None:
        """Put the layers all of whose parameters are frozen, and those that were named, into eval mode."""
        whole = {
            name: layer
            for name, layer in module.named_modules()
            if name and (own := [f"{name}.{n}" for n, _ in layer.named_parameters()]) and all(n in frozen for n in own)
        }
        self._resting = {n: layer for n, layer in whole.items() if not any(n.startswith(f"{o}.") for o in whole)}
        for layer in self._resting.values():
            layer.eval()


def _read(start: Any, value: Any) -> _Stage:
    lr = None
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - {"layers", "lr"})
        if unknown or "layers" not in value:
            raise RecipeError(
                f"Freeze.unfreeze.{start} has {unknown[0] if unknown else 'no layers'}.",
                fix="Write a list of layers, or {layers: [...], lr: 1.0e-5}.",
            )
        value, lr = value["layers"], value.get("lr")
    if not str(start).isdigit() or int(start) < 1:
        raise RecipeError(
            f"Freeze.unfreeze has the key {start!r}.", fix="Use the number of updates after which to begin, 1 or more."
        )
    return _Stage(int(start), listed(value), lr, {})


def _options(stage: _Stage) -> dict[str, Any]:
    return {} if stage.lr is None else {"lr": stage.lr}


def _names(state: State, optimizer: Any) -> list[str]:
    names = state.strategy.parameter_names()
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _has_group(state: State, stage: _Stage) -> bool:
    names = state.strategy.parameter_names()
    groups = [{names[id(p)] for p in g["params"]} for o in state.optimizers for g in o.param_groups]
    return set(stage.parameters) in groups
