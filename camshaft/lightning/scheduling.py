"""Configure optimizers and schedulers, and step the schedulers when Lightning does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from camshaft.lightning.errors import MisconfigurationException
from camshaft.optim import Plan, read_optimizers

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from camshaft.lightning.trainer import Trainer


class LRSchedulerConfig:
    """A scheduler and when it steps, with the names that Lightning gives them."""

    is_surface = True

    def __init__(self, plan: Plan) -> None:
        self.scheduler = plan.scheduler
        self.interval = plan.interval or "epoch"
        self.frequency = plan.frequency
        self.monitor = plan.monitor
        self.strict = plan.strict
        self.name = plan.name
        self.reduce_on_plateau = plan.is_plateau
        if plan.is_plateau and plan.monitor is None:
            raise MisconfigurationException(
                f"{type(plan.scheduler).__name__} has no metric to monitor.",
                fix="Return {'optimizer': ..., 'lr_scheduler': {'scheduler': ..., 'monitor': 'val_loss'}}.",
            )


def configure(trainer: Trainer) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Call ``configure_optimizers`` and read what it returns.

    Raises:
        MisconfigurationException: several optimizers with automatic optimization.
        ModuleError: what it returned has no optimizer, or an unknown key.
    """
    module = trainer.lightning_module
    returned = trainer.caller.module("configure_optimizers")
    optimizers, plans = read_optimizers(_unwrapped(returned))
    if len(optimizers) > 1 and module.automatic_optimization:
        raise MisconfigurationException(
            f"{type(module).__name__}.configure_optimizers returned {len(optimizers)} optimizers.",
            why="Automatic optimization steps one.",
            fix="Set self.automatic_optimization = False in __init__, and step each in training_step.",
        )
    return optimizers, [LRSchedulerConfig(plan) for plan in plans]


def _unwrapped(returned: Any) -> Any:
    """Return an (optimizer, scheduler) pair in the shape that has lists in it, and single ones as lists."""
    from torch.optim import Optimizer

    if isinstance(returned, tuple) and len(returned) == 2:
        first, second = returned
        if isinstance(first, Optimizer) and not isinstance(second, Optimizer):
            return [first], list(second) if isinstance(second, (list, tuple)) else [second]
        if isinstance(first, (list, tuple)) and not first:
            return None
    if isinstance(returned, (list, tuple)) and not returned:
        return None
    return returned


def advance(trainer: Trainer, interval: str, *, plateau: bool) -> None:
    """Step the schedulers of an interval whose turn it is, through the module's ``lr_scheduler_step``.

    As in Lightning a frequency counts the batches of the running epoch, or the epochs of the run.

    Raises:
        MisconfigurationException: a strict scheduler monitors what nothing logged.
    """
    if not trainer.lightning_module.automatic_optimization:
        return
    count = trainer.batch_idx + 1 if interval == "step" else trainer.current_epoch + 1
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau is not plateau or config.interval != interval or count % config.frequency:
            continue
        metric = None
        if config.reduce_on_plateau:
            metric = trainer.callback_metrics.get(str(config.monitor))
            if metric is None:
                if config.strict:
                    raise _unknown(config, trainer)
                continue
        trainer.caller.module("lr_scheduler_step", config.scheduler, metric)


def _unknown(config: LRSchedulerConfig, trainer: Trainer) -> MisconfigurationException:
    known = ", ".join(sorted(trainer.callback_metrics)) or "(none)"
    return MisconfigurationException(
        f"{type(config.scheduler).__name__} monitors {config.monitor!r}, which nothing has logged.",
        why=f"The metrics at this point are {known}.",
        fix="Log it before the scheduler's turn, choose another interval, or set strict: False.",
    )
