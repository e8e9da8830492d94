"""Answer what modules and callbacks ask their trainer: counters, limits, metrics, what runs and where."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camshaft.lightning.hooks import is_overridden
from camshaft.lightning.loopview import FitLoopView
from camshaft.lightning.seeing import StrategyView

if TYPE_CHECKING:
    from torch import Tensor

    from camshaft.lightning.loaders import Loaders


class Facade:
    """The read side of a ``Trainer``, and what its loops ask between themselves."""

    is_surface = True
    flags: dict[str, Any]
    loop_state: Any
    journal: Any
    state: Any
    engine: Any
    lightning_module: Any
    datamodule: Any
    callbacks: list[Any]
    loggers: list[Any]
    devices: Any
    # The checkpoint that the run goes on from.
    ckpt_path: str | None = None
    _engine: Any
    _train_loaders: Loaders | None
    _val_loaders: Loaders | None

    # -- counters ----------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """Epochs finished; after a run that ended inside one, that one is counted too."""
        state = self.loop_state
        return 0 if state is None else state.progress.epoch + self.has_open_epoch

    @property
    def batches_that_stepped(self) -> int:
        """Steps taken, one a window however many optimizers: the x axis of loggers."""
        state = self.loop_state
        return 0 if state is None else state.progress.step + state.progress.skipped_steps

    @property
    def is_last_batch(self) -> bool:
        """Whether the training batch in hand is the last of its epoch."""
        last: bool = self.stepper.is_last_batch
        return last

    @property
    def fit_loop(self) -> FitLoopView:
        """The limits and counters of training, under the names of Lightning's loops."""
        return FitLoopView(self)

    @property
    def has_reached_max_steps(self) -> bool:
        """Whether ``max_steps`` optimizer steps are taken."""
        return self.max_steps != -1 and self.global_step >= self.max_steps

    @property
    def may_stop(self) -> bool:
        """Whether ``min_epochs`` and ``min_steps`` are reached."""
        epochs = self.loop_state.progress.epoch + (1 if self.stepper.is_last_batch else 0)
        enough_epochs = not self.min_epochs or epochs >= self.min_epochs
        return enough_epochs and (not self.min_steps or self.global_step >= self.min_steps)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run; infinite when nobody knows."""
        epochs = self.max_epochs
        if epochs == -1 or epochs is None:
            return float("inf") if self.max_steps == -1 else self.max_steps
        self.open_train()
        batches = self.num_training_batches
        if math.isinf(batches):
            return self.max_steps if self.max_steps != -1 else float("inf")
        total = math.ceil(batches / self.accumulate_grad_batches) * max(epochs, 1)
        return min(self.max_steps, total) if self.max_steps != -1 else total

    @property
    def num_training_batches(self) -> int | float:
        """Training batches of an epoch on this rank; infinite without a length."""
        if self._train_loaders is None:
            return float("inf")
        rounds = self._train_loaders.rounds(0)
        return float("inf") if rounds is None else rounds

    @property
    def num_val_batches(self) -> list[int | float]:
        """Validation batches of each loader."""
        return _counts(self._val_loaders)

    @property
    def num_test_batches(self) -> list[int | float]:
        """Test batches of each loader."""
        return _counts(self._noted.get("test"))

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches to predict of each loader."""
        return _counts(self._noted.get("predict"))

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Validation batches of each loader that are tried before training."""
        return [min(count, self.num_sanity_val_steps) for count in self.num_val_batches]

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches of one optimizer step; may be set while training, from the next step on."""
        return self._accumulate

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, count: int) -> None:
        self._accumulate = count
        if self.loop_state is not None:
            self.loop_state.accumulate = count

    def batch_limit(self, stage: str) -> int | float:
        """Return the limit of batches of a stage."""
        names = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
        limit: int | float = getattr(self, f"limit_{names[stage]}_batches")
        return limit

    # -- validation --------------------------------------------------------------------------------

    @property
    def validates(self) -> bool:
        """Whether a fit validates at all."""
        return is_overridden("validation_step", self.lightning_module) and self.limit_val_batches > 0

    enable_validation = validates

    @property
    def validates_this_epoch(self) -> bool:
        """Whether the running epoch is one of those that are validated."""
        every = self.check_val_every_n_epoch
        return every is None or (self.loop_state.progress.epoch + 1) % every == 0

    @property
    def val_check_batch(self) -> int | float:
        """After how many batches validation is due; infinite where only the epoch's end counts."""
        interval, batches = self.val_check_interval, self.num_training_batches
        if isinstance(interval, int) and not isinstance(interval, bool):
            return interval
        if not isinstance(interval, float) or math.isinf(batches):
            return float("inf")
        return max(1, int(batches * interval))

    @property
    def optimizer_has_gradients(self) -> bool:
        """Whether a window is open, whose gradients a validation must leave alone."""
        return self.stepper.window is not None

    # -- what was logged ---------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest values, for callbacks that monitor them."""
        metrics: dict[str, Tensor] = self.journal.callback_metrics
        return metrics

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The newest values that loggers were given."""
        metrics: dict[str, Tensor] = self.journal.logged_metrics
        return metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The newest values that the progress bar shows."""
        metrics: dict[str, float] = self.journal.progress_bar_metrics
        return metrics

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [] if not logger else [logger]

    @property
    def log_dir(self) -> str | None:
        """The directory of the first logger, the same on every rank."""
        if not self.loggers:
            return self.default_root_dir
        first = self.loggers[0]
        folder = getattr(first, "log_dir", None) or first.save_dir
        return None if folder is None else str(self.engine.broadcast_object(str(folder)))

    # -- where and what runs -----------------------------------------------------------------------

    @property
    def strategy(self) -> StrategyView:
        """The strategy as modules see it: ``root_device``, ``barrier``, ``broadcast``, ``reduce``."""
        return StrategyView(self)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        """Number of this process."""
        return 0 if self._engine is None else self._engine.rank

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine."""
        return 0 if self._engine is None else self._engine.local_rank

    @property
    def node_rank(self) -> int:
        """Number of this machine."""
        return self.global_rank // max(1, self.devices.processes)

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.devices.world_size

    @property
    def num_devices(self) -> int:
        """Processes on this machine."""
        count: int = self.devices.processes
        return count

    @property
    def num_nodes(self) -> int:
        """Machines of the run."""
        count: int = self.devices.machines
        return count

    @property
    def device_ids(self) -> list[int]:
        """Numbers of the devices on this machine."""
        return list(range(self.devices.processes))

    @property
    def model(self) -> Any:
        """The module."""
        return self.lightning_module

    @property
    def train_dataloader(self) -> Any:
        """The training data as it was given."""
        return None if self._train_loaders is None else self._train_loaders.original

    @property
    def val_dataloaders(self) -> Any:
        """The validation data as it was given."""
        return None if self._val_loaders is None else self._val_loaders.original

    @property
    def test_dataloaders(self) -> Any:
        """The test data as it was given."""
        loaders = self._noted.get("test")
        return None if loaders is None else loaders.original

    @property
    def predict_dataloaders(self) -> Any:
        """The data to predict as it was given."""
        loaders = self._noted.get("predict")
        return None if loaders is None else loaders.original

    @property
    def training(self) -> bool:
        """Whether training batches run."""
        return bool(self.state.stage == "train")

    @property
    def validating(self) -> bool:
        """Whether validation batches run."""
        return bool(self.state.stage == "validate")

    @property
    def testing(self) -> bool:
        """Whether test batches run."""
        return bool(self.state.stage == "test")

    @property
    def predicting(self) -> bool:
        """Whether batches to predict run."""
        return bool(self.state.stage == "predict")

    @property
    def evaluating(self) -> bool:
        """Whether a module is evaluated."""
        return self.state.stage is not None and bool(self.state.stage.evaluating)

    @property
    def is_fitting(self) -> bool:
        """Whether a fit runs, its validation included."""
        return bool(self.state.fn == "fit") and self.state.status == "running"

    @property
    def interrupted(self) -> bool:
        """Whether the last run was cut short."""
        return bool(self.state.status == "interrupted")

    @property
    def received_sigterm(self) -> bool:
        """Whether a signal asked the run to end."""
        return self.loop_state is not None and self.loop_state.signal == "terminated"

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process."""
        if self.is_global_zero:
            print(*args, **kwargs)  # noqa: T201

    # -- callbacks ---------------------------------------------------------------------------------

    def of_type(self, name: str) -> list[Any]:
        """Return the callbacks of a bundled class, or derived from it, by the class's name."""
        return [c for c in self.callbacks if any(kind.__name__ == name for kind in type(c).__mro__)]

    @property
    def checkpoint_callback(self) -> Any:
        """The first ModelCheckpoint, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Every ModelCheckpoint."""
        return self.of_type("Checkpoint")

    @property
    def early_stopping_callback(self) -> Any:
        """The first EarlyStopping, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """Every EarlyStopping."""
        return self.of_type("EarlyStopping")

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar, or None."""
        return next(iter(self.of_type("ProgressBar")), None)


def _counts(loaders: Loaders | None) -> list[int | float]:
    if loaders is None:
        return []
    counts = [loaders.rounds(number) for number in range(len(loaders.sources))]
    return [float("inf") if count is None else count for count in counts]


def root(path: Any) -> Path:
    """Return a directory as a path."""
    return Path(str(path)).expanduser()
