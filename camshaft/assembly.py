"""Assemble the state of a run: data into sources, optimizers and schedulers, limits, in the order they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from camshaft.callback import Callback
from camshaft.data import DataModule
from camshaft.errors import CamshaftError, DataError, ModuleError, RecipeError
from camshaft.hooks import Hooks
from camshaft.loader import Placement, Source, limit_rounds, open_source
from camshaft.loggers.base import Logger
from camshaft.manual import Link
from camshaft.metrics import Metrics
from camshaft.module import Module
from camshaft.optim import Plan, read_optimizers
from camshaft.preflight import require_optimizers, require_reachable, require_step, require_trainable
from camshaft.recipe.settings import Settings, Validate
from camshaft.schedule import Schedule, seconds
from camshaft.state import Limits, Stage, State, Validation
from camshaft.strategies.base import Strategy

_LOADERS = {
    "fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader",
}  # fmt: skip


@dataclass(slots=True)
class Parts:
    """Everything a run is composed of, before any process is up: builders, not built things.

    ``provenance`` says where the run comes from; it is given the checkpoint that the run goes on from, or None.
    ``run_dir`` is the directory of an earlier run that the recipe lies in: an evaluation is of that run.
    """

    settings: Settings
    strategy: Strategy
    build_module: Callable[[], Module]
    build_data: Callable[[], DataModule | None]
    callbacks: dict[str, Callback] = field(default_factory=dict)
    loggers: dict[str, Logger] = field(default_factory=dict)
    build_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    build_scheduler: Callable[[torch.optim.Optimizer, int | None], Plan] | None = None
    name: str = "run"
    recipe: str = ""
    source: str = ""
    provenance: Callable[[str | None], dict[str, Any]] | None = None
    run_dir: Path | None = None


@dataclass(slots=True)
class Assembled:
    """A prepared run: what the loop needs, and the data to evaluate."""

    state: State
    hooks: Hooks
    data: DataModule | None
    parts: Parts

    def sources(self, stage: Stage) -> list[Source]:
        """Open the loaders of an evaluation; empty when there are none."""
        return _evaluation_sources(self, stage)


def assemble(parts: Parts, stage: Stage, run_dir: Path | None) -> Assembled:
    """Build module, data, optimizers and state on every rank, up to and with ``strategy.prepare``.

    The strategy is launched, and ``on_launch`` has fired.
    """
    strategy, settings = parts.strategy, parts.settings
    hooks = Hooks(parts.callbacks, is_main=strategy.is_main)
    hooks.on_launch(strategy)
    data = parts.build_data()
    module = parts.build_module()
    if not isinstance(module, Module):
        raise ModuleError(f"the module is a {type(module).__name__}.", fix="Derive it from camshaft.Module.")
    require_step(module, stage)
    hooks.on_module(module)
    state = State(
        module, strategy, metrics=Metrics(), limits=read_limits(settings),
        run_dir=run_dir, seed=settings.seed, stage=stage,
    )  # fmt: skip
    state.callbacks, state.accumulate = parts.callbacks, settings.accumulate
    state.data_state = data.state_dict if data is not None else None
    module.attach(link := Link(state))
    assembled = Assembled(state, hooks, data, parts)
    _set_up(data, strategy, stage)
    optimizers: list[torch.optim.Optimizer] = []
    if stage == "fit":
        _open_training_data(assembled)
        optimizers = _configure(assembled)
    state.optimizers = strategy.prepare(module, optimizers)
    if stage == "fit" and not module.automatic_optimization:
        from camshaft.manual import ManualDriver

        link.driver = ManualDriver(state)
    return assembled


def read_limits(settings: Settings) -> Limits:
    """Read how long a run is from its settings.

    Raises:
        RecipeError: none of max_epochs, max_steps and max_time is given.
    """
    if settings.fast_dev_run:
        count = int(settings.fast_dev_run)
        return Limits(
            max_steps=count, max_epochs=1, log_every=1, sanity_batches=0, train_batches=count * settings.accumulate,
            validation_batches=count, test_batches=count, predict_batches=count,
        )  # fmt: skip
    validation = settings.validate
    return Limits(
        max_steps=settings.max_steps,
        max_epochs=settings.max_epochs,
        max_secs=seconds(settings.max_time),
        log_every=settings.log_every,
        train_batches=settings.overfit_batches or settings.limit_train_batches,
        validation_batches=settings.overfit_batches or settings.limit_validation_batches,
        test_batches=settings.limit_test_batches,
        predict_batches=settings.limit_predict_batches,
        sanity_batches=validation.sanity_batches if isinstance(validation, Validate) else 2,
        overfit=bool(settings.overfit_batches),
    )


def require_limit(settings: Settings) -> None:
    """Refuse a run that nothing ends."""
    if not (settings.max_epochs or settings.max_steps or settings.max_time or settings.fast_dev_run):
        raise RecipeError(
            "none of max_epochs, max_steps and max_time is given.",
            why="Nothing would end the run.",
            fix="Give at least one, for example max_epochs=10.",
        )


def read_validation(settings: Settings) -> Validation:
    """Read when to validate from the settings; a fast run tries its validation whenever that is due."""
    wanted = settings.validate
    if wanted is None or settings.limit_validation_batches == 0:
        return Validation()
    if settings.fast_dev_run:
        return Validation(Schedule(every_epochs=1))
    if isinstance(wanted, Validate):
        options = {"every": wanted.every, "at": wanted.at or None, "after": wanted.after or None}
        said = {key: value for key, value in options.items() if value is not None}
        return Validation(Schedule.parse(said) if said else None, at_start=wanted.at_start)
    return Validation(Schedule.parse(wanted))


def placement(strategy: Strategy, settings: Settings, *, pads: bool) -> Placement:
    """Say how this rank shares data with the others."""
    return Placement(strategy.data_rank, strategy.data_world_size, settings.seed, pads=pads)


def micro_batch(settings: Settings, world_size: int) -> int | None:
    """Return samples per rank and micro-batch, from the global batch size; None keeps the loader's own.

    Raises:
        RecipeError: the batch does not divide.
    """
    total = settings.batch_size
    if total is None:
        return None
    parts = world_size * settings.accumulate
    if total % parts:
        raise RecipeError(
            f"batch_size is {total}, which {world_size} processes x {settings.accumulate} micro-batches do not divide.",
            why="Samples per optimizer step would not be what the recipe says.",
            fix=f"Use a multiple of {parts}, such as {max(parts, total // parts * parts)}.",
        )
    return total // parts


def _set_up(data: DataModule | None, strategy: Strategy, stage: Stage) -> None:
    if data is None:
        return
    error: CamshaftError | Exception | None = None
    if strategy.local_rank == 0:
        try:
            data.prepare_data()
        except Exception as caught:  # noqa: BLE001 - raised below, on every rank, instead of a hang
            error = caught
    if strategy.any(error is not None):
        raise error or DataError("prepare_data failed on another rank.", fix="Its traceback is above.")
    for part in ("fit", "test") if stage == "fit" else (stage,):
        data.setup(part)


def _loader(assembled: Assembled, name: str) -> Any:
    """Return what the data module's or the module's own method gives."""
    owner: Any = assembled.data
    found = getattr(owner, name)() if owner is not None else None
    return getattr(assembled.state.module, name)() if found is None else found


def _open_training_data(assembled: Assembled) -> None:
    state, settings = assembled.state, assembled.parts.settings
    require_limit(settings)
    loader = _loader(assembled, "train_dataloader")
    if loader is None:
        raise DataError(
            "neither the data nor the module has a train_dataloader.",
            fix="Return a torch DataLoader from it, or pass loaders to camshaft.run.",
        )
    state.train_data = open_source(
        loader,
        placement(state.strategy, settings, pads=True),
        name="train_dataloader",
        micro_batch=micro_batch(settings, state.strategy.data_world_size),
        ordered=bool(settings.overfit_batches),
    )
    rounds = limit_rounds(state.train_data.rounds(), state.limits.train_batches, "train")
    if rounds == 0:
        raise DataError("limit_train_batches leaves no training batch.", fix="Allow at least one.")
    state.planned_steps = _planned(state, rounds)
    state.validation = read_validation(settings)
    if state.validation.schedule is not None and state.module.overrides("validation_step"):
        state.validation_data = assembled.sources("validate")
    if not state.validation_data:
        state.validation = Validation()
    if not settings.fast_dev_run:
        require_reachable(state, state.callbacks)


def _planned(state: State, rounds: int | None) -> int | None:
    limits = state.limits
    counts = [limits.max_steps] if limits.max_steps is not None else []
    if rounds is not None and limits.max_epochs is not None:
        counts.append(-(-rounds // state.accumulate) * limits.max_epochs)
    return min(counts) if counts else None


def _evaluation_sources(assembled: Assembled, stage: Stage) -> list[Source]:
    state, settings = assembled.state, assembled.parts.settings
    name = "train_dataloader" if settings.overfit_batches and stage == "validate" else _LOADERS[stage]
    loaders = _loader(assembled, name)
    if loaders is None:
        return []
    where = placement(state.strategy, settings, pads=state.strategy.needs_equal_forwards)
    several: Sequence[Any] = loaders if isinstance(loaders, (list, tuple)) else [loaders]
    return [open_source(loader, where, name=name, ordered=stage == "predict") for loader in several]


def _configure(assembled: Assembled) -> list[torch.optim.Optimizer]:
    """Build the optimizers and schedulers that the recipe or the module gives."""
    state, parts = assembled.state, assembled.parts
    module = state.module
    require_trainable(module)
    if parts.build_optimizer is not None:
        trainable: list[Any] = [p for p in module.parameters() if p.requires_grad]
        if module.later_groups:
            later = [{"params": list(named.values()), **options} for named, options in module.later_groups]
            trainable = [{"params": trainable}, *later]
        optimizers = [parts.build_optimizer(trainable)]
        state.plans = []
    else:
        optimizers, state.plans = read_optimizers(module.configure_optimizers())
    require_optimizers(module, optimizers)
    if parts.build_scheduler is not None:
        state.plans = [parts.build_scheduler(optimizers[0], state.planned_steps)]
    for plan in state.plans:
        plan.resolve(state.planned_steps)
    state.step_plans = [plan for plan in state.plans if plan.interval == "step" and not plan.is_plateau]
    if not module.automatic_optimization:
        state.step_plans = []
    return optimizers
