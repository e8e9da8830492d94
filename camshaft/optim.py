"""Read what ``configure_optimizers`` returned, and plan when each scheduler steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from camshaft.errors import ModuleError

Interval: TypeAlias = Literal["step", "epoch"]
_OPTIMIZER_KEYS = {"optimizer", "lr_scheduler", "monitor"}
_SCHEDULER_KEYS = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}


@dataclass(slots=True)
class Plan:
    """A scheduler and when it steps: every ``frequency`` steps or epochs, or when ``monitor`` is produced.

    ``interval`` None means that nobody said: it becomes "step" for a scheduler whose ``total_steps``
    is the number of planned steps, and "epoch" otherwise. Counts run over the whole run, not per epoch.
    """

    scheduler: Any
    interval: Interval | None = None
    frequency: int = 1
    monitor: str | None = None
    name: str | None = None
    strict: bool = True
    reduce_on_plateau: bool = False

    @property
    def is_plateau(self) -> bool:
        """Whether the scheduler's step takes the value of a metric."""
        return self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)

    def resolve(self, planned_steps: int | None) -> None:
        """Fill ``interval`` in, now that the length of the run is known.

        Raises:
            ModuleError: a plateau scheduler that monitors nothing.
        """
        if not self.is_plateau:
            # Other schedulers follow the count of steps: a metric's value would be taken for one.
            self.monitor = None
        elif self.monitor is None:
            raise ModuleError(
                f"{type(self.scheduler).__name__} has no metric to monitor.",
                why="It lowers the rate when a metric stops improving, and cannot guess which.",
                fix="Return {'scheduler': scheduler, 'monitor': 'val/loss'}.",
            )
        elif self.frequency != 1:
            raise ModuleError(
                f"{type(self.scheduler).__name__} has frequency {self.frequency}, and steps whenever its metric comes.",
                why="The frequency would be ignored.",
                fix="Validate less often, or raise its patience.",
            )
        if self.interval is None:
            total = getattr(self.scheduler, "total_steps", None)
            self.interval = "step" if total is not None and total == planned_steps else "epoch"

    def advance(self, count: int) -> None:
        """Step the scheduler if ``count`` steps, or epochs, of the run make it due."""
        if count % self.frequency == 0:
            self.scheduler.step()

    def describe(self, planned_steps: int | None) -> str:
        """Say in one line what the learning rate will do."""
        kind = self.name or type(self.scheduler).__name__
        groups = self.scheduler.optimizer.param_groups
        first, base = (_rates(group.get(key, group["lr"]) for group in groups) for key in ("lr", "initial_lr"))
        when = (
            f"when {self.monitor} is produced" if self.is_plateau else _every(self.frequency, self.interval or "epoch")
        )
        total = getattr(self.scheduler, "total_steps", None)
        length = f", {total} in all" if total is not None else ""
        ending = f"; the run plans {planned_steps} steps" if planned_steps is not None else ""
        rates = f"from {base}" if first == base else f"of {base}, starting at {first}"
        return f"{kind} {rates}, stepped {when}{length}{ending}"


def _rates(rates: Iterable[float]) -> str:
    return " and ".join(f"{rate:g}" for rate in sorted({float(rate) for rate in rates}))


def _every(frequency: int, unit: str) -> str:
    return f"every {unit}" if frequency == 1 else f"every {frequency} {unit}s"


def read_optimizers(returned: Any) -> tuple[list[Optimizer], list[Plan]]:
    """Turn what ``configure_optimizers`` returned into optimizers and scheduler plans.

    Accepted: None; an optimizer; a list of them; (optimizers, schedulers); a dict with 'optimizer'
    and 'lr_scheduler' (and 'monitor'); a list of such dicts. A scheduler is itself or a dict with
    'scheduler', 'interval', 'frequency', 'monitor', 'strict' and 'name'.

    Raises:
        ModuleError: any other shape, or an unknown key, named.
    """
    optimizers, plans = _read(returned)
    for plan in plans:
        owner = getattr(plan.scheduler, "optimizer", None)
        if owner is not None and not any(owner is optimizer for optimizer in optimizers):
            raise ModuleError(
                f"{type(plan.scheduler).__name__} belongs to an optimizer that configure_optimizers did not return.",
                why="It would change the rate of an optimizer that never steps.",
                fix="Return that optimizer too, or make the scheduler for the one you return.",
            )
    return optimizers, plans


def _read(returned: Any) -> tuple[list[Optimizer], list[Plan]]:
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _read_dict(returned)
    if isinstance(returned, Sequence) and not isinstance(returned, str) and returned:
        if _is_pair(returned):
            return list(returned[0]), [_read_plan(item) for item in returned[1]]
        if all(isinstance(item, Mapping) for item in returned):
            pairs = [_read_dict(item) for item in returned]
            return [o for pair in pairs for o in pair[0]], [p for pair in pairs for p in pair[1]]
        if all(isinstance(item, Optimizer) for item in returned):
            return list(returned), []
    raise ModuleError(
        f"configure_optimizers returned {_shape(returned)}.",
        why="No optimizer can be read from it.",
        fix="Return an optimizer, a list of them, (optimizers, schedulers), or "
        "{'optimizer': optimizer, 'lr_scheduler': {'scheduler': scheduler, 'interval': 'step'}}.",
    )


def _is_pair(returned: Sequence[Any]) -> bool:
    """Say whether it is two lists: optimizers and schedulers."""
    if len(returned) != len(("optimizers", "schedulers")) or not all(isinstance(p, (list, tuple)) for p in returned):
        return False
    return bool(returned[0]) and all(isinstance(item, Optimizer) for item in returned[0])


def _read_dict(entry: Mapping[str, Any]) -> tuple[list[Optimizer], list[Plan]]:
    _refuse_unknown(entry, _OPTIMIZER_KEYS, "configure_optimizers")
    if not isinstance(entry.get("optimizer"), Optimizer):
        raise ModuleError(
            f"configure_optimizers returned a dict whose 'optimizer' is {_shape(entry.get('optimizer'))}.",
            fix="Put a torch.optim.Optimizer there.",
        )
    plans = []
    if entry.get("lr_scheduler") is not None:
        plan = _read_plan(entry["lr_scheduler"])
        plan.monitor = plan.monitor or entry.get("monitor")
        plans.append(plan)
    return [entry["optimizer"]], plans


def _read_plan(entry: Any) -> Plan:
    if not isinstance(entry, Mapping):
        return Plan(_scheduler(entry))
    _refuse_unknown(entry, _SCHEDULER_KEYS, "an 'lr_scheduler' entry")
    interval = entry.get("interval")
    if interval not in (None, "step", "epoch"):
        raise ModuleError(f"a scheduler's interval is {interval!r}.", fix="Write 'step' or 'epoch'.")
    frequency = entry.get("frequency", 1)
    if not isinstance(frequency, int) or frequency < 1:
        raise ModuleError(
            f"a scheduler's frequency is {frequency!r}.",
            why="It would never step.",
            fix="Give a whole number of steps or epochs, 1 or more.",
        )
    return Plan(
        _scheduler(entry.get("scheduler")),
        interval=interval,
        frequency=frequency,
        reduce_on_plateau=bool(entry.get("reduce_on_plateau", False)),
        monitor=entry.get("monitor"),
        name=entry.get("name"),
        strict=bool(entry.get("strict", True)),
    )


def _scheduler(scheduler: Any) -> Any:
    if callable(getattr(scheduler, "step", None)) and not isinstance(scheduler, Optimizer):
        return scheduler
    raise ModuleError(
        f"{_shape(scheduler)} is not a learning-rate scheduler.",
        why="Nothing in it would change the learning rate.",
        fix="Return one of torch.optim.lr_scheduler, or an object with step, state_dict and load_state_dict.",
    )


def _refuse_unknown(entry: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(entry) - known)
    if unknown:
        raise ModuleError(
            f"{where} has no key {unknown[0]!r}.",
            why="It would be ignored.",
            fix=f"The keys are {', '.join(sorted(known))}.",
        )


def _shape(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return f"a {type(value).__name__}"


class _Warmup(LambdaLR):
    """Rise linearly over ``warmup_steps``, then follow ``decay(progress)`` down to ``min_ratio``; stepped per step."""

    def __init__(
        self, optimizer: Optimizer, *, total_steps: int, warmup_steps: int = 0, min_ratio: float = 0.0
    ) -> None:
        if warmup_steps >= total_steps:
            raise ModuleError(
                f"{type(self).__name__}: warmup_steps is {warmup_steps} and the run has {total_steps} steps.",
                why="The learning rate would never reach its value.",
                fix="Make the warm-up shorter than the run.",
            )
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        self.min_ratio = min_ratio
        super().__init__(optimizer, self._factor)

    def decay(self, fraction: float) -> float:
        """Return the share of the full rate, from 1 at fraction 0 to 0 at 1."""
        raise NotImplementedError

    def _factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        fraction = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.min_ratio + (1 - self.min_ratio) * self.decay(fraction)


class Cosine(_Warmup):
    """Warm up, then follow half a cosine to ``min_ratio`` of the rate. Source: Loshchilov and Hutter (2017)."""

    def decay(self, fraction: float) -> float:
        """Return the cosine's share."""
        return 0.5 * (1 + math.cos(math.pi * fraction))


class Linear(_Warmup):
    """Warm up, then fall linearly to ``min_ratio`` of the rate."""

    def decay(self, fraction: float) -> float:
        """Return the line's share."""
        return 1 - fraction


class Constant(_Warmup):
    """Warm up, then keep the rate."""

    def decay(self, fraction: float) -> float:
        """Return 1."""
        return 1.0


class InverseSqrt(_Warmup):
    """Warm up, then fall as 1 / sqrt(step / warmup_steps). Source: Vaswani et al. (2017)."""

    def decay(self, fraction: float) -> float:
        """Return the root's share of the full rate."""
        scale = max(1, self.warmup_steps)
        return math.sqrt(scale / (scale + fraction * (self.total_steps - self.warmup_steps)))
