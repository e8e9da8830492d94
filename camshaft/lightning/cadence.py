"""Decide when a fit validates, reloads and logs."""

from __future__ import annotations

import math
from typing import Any

from camshaft.agreement import URGENT, exchange
from camshaft.lightning.errors import MisconfigurationException
from camshaft.lightning.facade import Facade
from camshaft.lightning.flags import read_seconds
from camshaft.lightning.hparams import HyperparametersMixin
from camshaft.lightning.loaders import Loaders, NativeSource


class Cadence(Facade):
    """The part of a trainer that knows what is due."""

    # -- data --------------------------------------------------------------------------------------

    def open_sources(self, loaders: Loaders) -> None:
        """Hand the training data to the loop, and check what counts in its length."""
        source = loaders.sources[0]
        limit = loaders.limit(0)
        self.loop_state.limits.train_batches = limit
        self.loop_state.train_data = source
        if limit != 0 and isinstance(source, NativeSource):
            # Made now, as Lightning makes it: it draws from the random stream.
            source.open()
        self._require_validation_fits()

    def _require_validation_fits(self) -> None:
        interval, batches = self.val_check_interval, self.num_training_batches
        if isinstance(interval, int) and self.check_val_every_n_epoch is not None and interval > batches:
            raise MisconfigurationException(
                f"Trainer(val_check_interval={interval}) is more than the {batches} training batches of an epoch.",
                why="No epoch would ever be validated.",
                fix="Make it smaller, or set check_val_every_n_epoch=None to count across epochs.",
            )
        if isinstance(interval, float) and math.isinf(batches) and interval != 1.0 and self.validates:
            raise MisconfigurationException(
                f"Trainer(val_check_interval={interval}) is a share of a loader without a length.",
                fix="Give a number of batches.",
            )

    def reload_if_due(self) -> None:
        """Ask for the loaders again where ``reload_dataloaders_every_n_epochs`` says so."""
        every, epoch = self.reload_dataloaders_every_n_epochs, self.loop_state.progress.epoch
        if every and epoch and epoch % every == 0 and not self.loop_state.progress.epoch_batches:
            self._train_loaders = self._val_loaders = None
            self.open_train()

    def note_loaders(self, stage: str, loaders: Loaders) -> None:
        """Keep the loaders of an evaluation for those who ask."""
        self._noted[stage] = loaders
        if stage == "validate":
            self._val_loaders = loaders

    # -- validation --------------------------------------------------------------------------------

    def plan_validation(self, batch_idx: int, *, is_last: bool, is_stepping: bool) -> None:
        """Ask for a validation after this batch if one is due; inside a window it waits for the update.

        Gradients of half a window belong to no weights that are validated.
        """
        self.batch_idx = batch_idx
        self._is_due = self._is_due or self._validation_is_due(batch_idx, is_last=is_last)
        if is_stepping and self._is_due:
            self._is_due = False
            self.validation_due = True
            self.loop_state.control.validate(everywhere=True)

    def _validation_is_due(self, batch_idx: int, *, is_last: bool) -> bool:
        if not self.validates or not self.validates_this_epoch:
            return False
        seconds = self._validation_seconds()
        if seconds is not None:
            late = self.clock() - self.last_validation >= seconds
            return bool(self.engine.any(late)) if self.engine.world_size > 1 else late
        check = self.val_check_batch
        if is_last and math.isinf(check):
            return True
        if self.should_stop and self.may_stop:
            return True
        if math.isinf(check):
            limit = self.limit_train_batches
            return isinstance(limit, int) and (batch_idx + 1) % limit == 0
        across = self.check_val_every_n_epoch is None
        return (self._batches_so_far(batch_idx) if across else batch_idx + 1) % check == 0

    def _batches_so_far(self, batch_idx: int) -> int:
        """Return the batches of the whole run, the one in hand included."""
        count: int = self.loop_state.progress.micro_step
        return count

    def _validation_seconds(self) -> float | None:
        interval = self.val_check_interval
        return None if isinstance(interval, (int, float)) else read_seconds("val_check_interval", interval)

    def must_abandon(self, index: int) -> bool:
        """Say whether a signal asks to cut a validation short, alike on every rank."""
        state = self.loop_state
        if not self.is_fitting or self.sanity_checking or (state.signal is None and state.strategy.world_size == 1):
            return False
        return bool(exchange(state, index) & URGENT)

    # -- logging -----------------------------------------------------------------------------------

    def log_step(self) -> None:
        """Hand what steps logged to the loggers, every ``log_every_n_steps`` steps."""
        due = self.log_every_n_steps and self.batches_that_stepped % self.log_every_n_steps == 0
        if (due or self.should_stop) and self.loggers:
            self.log_metrics(self.journal.to_log(), back=1)

    def log_evaluation(self, stage: str) -> None:
        """Hand what an evaluation gave to the loggers."""
        if not self.sanity_checking and stage != "predict":
            self.log_metrics(self.journal.to_log())

    def log_metrics(self, metrics: dict[str, Any], *, back: int = 0) -> None:
        """Hand values to the loggers of the main process.

        ``back`` is how many steps are counted already that the values do not belong to.
        """
        if not metrics or not self.loggers or not self.is_global_zero:
            return
        values = {name: float(value) for name, value in metrics.items() if value is not None}
        given = values.pop("step", None)
        step = int(given) if given is not None else self._x_axis()
        values.setdefault("epoch", self.loop_state.progress.epoch)
        for logger in self.loggers:
            logger.log_metrics(metrics=values, step=step)
            logger.save()

    def _x_axis(self) -> int:
        """Return the number of the last step, which starts at 0: what the loggers draw over."""
        return max(0, self.batches_that_stepped - 1) if self.is_fitting else self.batches_that_stepped

    def log_hparams(self) -> None:
        """Hand hyper-parameters of the module and the data to the loggers."""
        if not self.flags["enable_autolog_hparams"] or not self.is_global_zero:
            return
        merged: dict[str, Any] = {}
        for owner in (self.datamodule, self.lightning_module):
            if isinstance(owner, HyperparametersMixin) and owner._logs_hparams:  # noqa: SLF001 - our own mixin
                merged |= owner.hparams_initial
        for logger in self.loggers:
            if merged:
                logger.log_hyperparams(merged)
            logger.save()
