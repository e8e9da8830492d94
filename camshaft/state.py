"""Hold the state of a run: counters, requests, the record of a checkpoint, and what they belong to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from camshaft.errors import StateError
from camshaft.loggers.base import Sinks
from camshaft.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from camshaft.callback import Callback
    from camshaft.loader import Source
    from camshaft.metrics import Metrics
    from camshaft.module import Module
    from camshaft.optim import Plan
    from camshaft.strategies.base import Strategy

Batch: TypeAlias = Any
Stage: TypeAlias = Literal["fit", "validate", "test", "predict"]


@dataclass(slots=True)
class Progress:
    """Count what a run has done; never one number for two things.

    Attributes:
        step: optimizer updates taken, one per window however many optimizers: the unit of every
            schedule and of the loggers' x axis.
        micro_step: backward passes on this rank.
        epoch: epochs finished.
        samples: training samples of all ranks that went into updates.
        tokens: ``Module.batch_weight`` summed over them; 0 where it is not overridden.
        skipped_steps: windows whose update was not taken (overflow, None, a request).
        epoch_samples: samples of the running epoch handed out to all ranks, skipped steps included:
            the data position.
        epoch_batches: micro-batches of the running epoch handed out to this rank.
    """

    step: int = 0
    micro_step: int = 0
    epoch: int = 0
    samples: int = 0
    tokens: float = 0
    skipped_steps: int = 0
    epoch_samples: int = 0
    epoch_batches: int = 0


@dataclass(slots=True)
class Request:
    """One thing a callback asked for.

    ``everywhere`` claims that every rank asks at this same step. ``urgent`` cuts validation short.
    """

    reason: str
    everywhere: bool = False
    urgent: bool = False


@dataclass(slots=True)
class Control:
    """Collect what callbacks ask for; the loop acts at the next boundary, after all ranks agree.

    A request of one rank alone travels with the next agreement (every ``agree_every`` steps when
    there are several ranks). Pass ``everywhere=True`` when the decision follows from what all ranks
    know, such as ``progress.step`` or reduced metrics: it then takes effect at this boundary.
    """

    stopping: Request | None = None
    saving: Request | None = None
    validating: Request | None = None
    skipping: str | None = None
    agreed: int = 0
    landed: int = 0

    def stop(self, reason: str, *, everywhere: bool = False, urgent: bool = False) -> None:
        """Ask to end the run at the next boundary; the first reason is kept.

        ``urgent``, as after a signal, also abandons a validation that is running: it is made up for
        when the run resumes.
        """
        self.stopping = self.stopping or Request(reason)
        self.stopping.everywhere |= everywhere
        self.stopping.urgent |= urgent

    def save(self, tag: str = "requested", *, everywhere: bool = False) -> None:
        """Ask for a checkpoint at the next boundary, after validation if that is due too."""
        self.saving = self.saving or Request(tag)
        self.saving.everywhere |= everywhere

    def validate(self, *, everywhere: bool = False) -> None:
        """Ask for a validation run at the next boundary."""
        self.validating = self.validating or Request("requested")
        self.validating.everywhere |= everywhere

    def skip_step(self, reason: str) -> None:
        """Drop the update whose gradients are in hand. Every rank must ask, from what all ranks know."""
        self.skipping = reason


@dataclass(slots=True)
class Checkpoint:
    """The record that ``on_checkpoint`` fills and ``on_restore`` reads.

    Attributes:
        step: optimizer updates at which it is taken.
        tag: why it is taken: "step", "epoch", "end", "requested", "exception".
        exact: whether a run resumed from it equals an uninterrupted one.
        metrics: value and step of the metrics that these very weights produced.
        tensors: canonical name (``group/...``) to a tensor or a shard of one; each rank adds its own.
        data: name to plain JSON, the same on all ranks, written once.
        rank_data: name to plain JSON of this rank.
        rank_tensors: name to a tensor of this rank.
        reader: where ``on_restore`` reads tensors, a ``checkpoint.Reader``; None while saving.
    """

    step: int
    tag: str = ""
    exact: bool = True
    metrics: dict[str, tuple[float, int]] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    rank_data: dict[str, Any] = field(default_factory=dict)
    rank_tensors: dict[str, Tensor] = field(default_factory=dict)
    reader: Any = None


@dataclass(slots=True)
class Limits:
    """Say how long a run is; at least one of the first three is set.

    ``log_every`` counts steps. The ``*_batches`` limits are micro-batches per rank, or a fraction of
    the loader when they are floats; None is all of it.
    """

    max_steps: int | None = None
    max_epochs: int | None = None
    max_secs: float | None = None
    log_every: int = 50
    agree_every: int = 8
    train_batches: int | float | None = None
    validation_batches: int | float | None = None
    test_batches: int | float | None = None
    predict_batches: int | float | None = None
    sanity_batches: int = 2
    overfit: bool = False


@dataclass(slots=True)
class Validation:
    """Say when to validate inside a fit: on a schedule, and before the first step when ``at_start``."""

    schedule: Schedule | None = None
    at_start: bool = False


@dataclass(slots=True, eq=False, repr=False)
class State:
    """Everything a running loop and its callbacks share. One per process; slots only.

    Attributes:
        precision: a knob: what the forward of the next step computes in.
        accumulate: a knob: micro-batches of the next window.
        planned_steps: optimizer updates of the whole run, when its data has a length.
        values: the newest flushed value of every logged name, with the step it belongs to.
        at_epoch_end: whether the step in hand is the last of its epoch.
        evaluation: what validates inside a fit in place of the engine's own ``evaluate``, with its arguments.
        store: where checkpoints go; None when nothing saves.
        saved, saved_step: the newest durable checkpoint of this run, and its step.
        flight: the checkpoint that is being written in the background.
        restored: whether the run continues from a checkpoint.
        streams: gives a resumed run its random streams back, once nothing but the loop is left to run.
        status: "running", then "finished", "stopped", "interrupted", "terminated" or "failed".
    """

    module: Module
    strategy: Strategy
    metrics: Metrics = field(kw_only=True)
    limits: Limits = field(kw_only=True)
    run_dir: Path | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    stage: Stage = field(default="fit", kw_only=True)
    callbacks: Mapping[str, Callback] = field(default_factory=dict, init=False)
    loggers: Sinks = field(default_factory=lambda: Sinks({}), init=False)
    optimizers: list[Optimizer] = field(default_factory=list, init=False)
    plans: list[Plan] = field(default_factory=list, init=False)
    step_plans: list[Plan] = field(default_factory=list, init=False)
    progress: Progress = field(default_factory=Progress, init=False)
    control: Control = field(default_factory=Control, init=False)
    precision: str = field(default="fp32", init=False)
    accumulate: int = field(default=1, init=False)
    planned_steps: int | None = field(default=None, init=False)
    weighs_batches: bool = field(default=False, init=False)
    at_epoch_end: bool = field(default=False, init=False)
    train_data: Source | None = field(default=None, init=False)
    validation_data: list[Source] = field(default_factory=list, init=False)
    validation: Validation = field(default_factory=Validation, init=False)
    validation_pending: bool = field(default=False, init=False)
    evaluation: Callable[..., dict[str, float] | None] | None = field(default=None, init=False)
    store: Any = field(default=None, init=False)
    save_at_end: bool = field(default=False, init=False)
    save_on_exception: bool = field(default=False, init=False)
    save_in_background: bool = field(default=False, init=False)
    saved: Checkpoint | None = field(default=None, init=False)
    saved_step: int = field(default=-1, init=False)
    flight: Checkpoint | None = field(default=None, init=False)
    restored: bool = field(default=False, init=False)
    in_update: bool = field(default=False, init=False)
    data_state: Callable[[], dict[str, Any]] | None = field(default=None, init=False)
    streams: Callable[[], None] | None = field(default=None, init=False)
    values: dict[str, tuple[float, int]] = field(default_factory=dict, init=False)
    signal: str | None = field(default=None, init=False)
    status: str = field(default="running", init=False)
    stop_reason: str | None = field(default=None, init=False)
    started: float = field(default_factory=time.monotonic, init=False)
    next_poll: float = field(default=0.0, init=False)
    quiet_until: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.weighs_batches = self.module.overrides("batch_weight")

    def logged_names(self) -> set[str]:
        """Return every name that was logged so far, whether its value was flushed or not."""
        return {*self.values, *self.metrics.names()}

    def is_logged(self, name: str) -> bool:
        """Say whether something logs ``name``: it has a value, or will have one at the next flush."""
        names = self.logged_names()
        # A collection is logged under one name, and gives one value for each of its metrics.
        return name in names or any(name.startswith(f"{collection}/") for collection in self.metrics.epoch.objects)

    def value(self, name: str) -> float:
        """Return the newest value of a logged name.

        Raises:
            StateError: nothing has logged it; the names that exist are listed.
        """
        if name in self.values:
            return self.values[name][0]
        raise StateError(
            f"nothing has logged {name!r}.",
            why=f"The names so far are {', '.join(sorted(self.values)) or '(none)'}.",
            fix="Log it in a step of the module, or use one of these names.",
        )
