"""Declare ``Trainer``: Lightning's flags and methods over camshaft's loop."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from camshaft.lightning import running, saving, scheduling
from camshaft.lightning.attaching import attach, default_callbacks, default_loggers
from camshaft.lightning.cadence import Cadence
from camshaft.lightning.calling import Caller
from camshaft.lightning.flags import (
    read_devices,
    read_limit,
    read_precision,
    read_seconds,
    refuse_unknown,
    refuse_unsupported,
)
from camshaft.lightning.journal import Journal
from camshaft.lightning.launching import start_others
from camshaft.lightning.loaders import Loaders, request
from camshaft.lightning.optimizer import LightningOptimizer
from camshaft.lightning.states import TrainerState
from camshaft.lightning.stepping import Stepper
from camshaft.lightning.strategies import build, choose
from camshaft.strategies.base import Strategy as EngineStrategy

if TYPE_CHECKING:
    from torch import Tensor

    from camshaft.lightning.datamodule import LightningDataModule
    from camshaft.lightning.module import LightningModule
    from camshaft.state import State

_TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
_DEFAULTS: dict[str, Any] = {
    "accelerator": "auto", "strategy": "auto", "devices": "auto", "num_nodes": 1, "precision": None, "logger": None,
    "callbacks": None, "fast_dev_run": False, "max_epochs": None, "min_epochs": None, "max_steps": -1,
    "min_steps": None, "max_time": None, "limit_train_batches": None, "limit_val_batches": None,
    "limit_test_batches": None, "limit_predict_batches": None, "overfit_batches": 0.0, "val_check_interval": None,
    "check_val_every_n_epoch": 1, "num_sanity_val_steps": None, "log_every_n_steps": None,
    "enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None,
    "accumulate_grad_batches": 1, "gradient_clip_val": None, "gradient_clip_algorithm": None, "deterministic": None,
    "benchmark": None, "inference_mode": True, "use_distributed_sampler": True, "profiler": None,
    "detect_anomaly": False, "barebones": False, "plugins": None, "sync_batchnorm": False,
    "reload_dataloaders_every_n_epochs": 0, "default_root_dir": None, "enable_autolog_hparams": True,
    "model_registry": None,
}  # fmt: skip


class Trainer(Cadence):
    """Run a ``LightningModule``: ``fit``, ``validate``, ``test``, ``predict``.

    Takes Lightning's flags, by keyword, with Lightning's meaning and defaults.

    Raises:
        MisconfigurationException: a flag is unknown, contradicts another, or has no equal here.
    """

    def __init__(self, **flags: Any) -> None:
        refuse_unknown({name: value for name, value in flags.items() if name not in _DEFAULTS}, list(_DEFAULTS))
        refuse_unsupported(flags)
        self.flags = {**_DEFAULTS, **flags}
        self._read_run()
        self._read_limits()
        self._read_rest()
        self.caller = Caller(self)
        self.journal = Journal(self)
        self.stepper = Stepper(self)
        self._begin()

    # -- what a user calls -------------------------------------------------------------------------

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train, from the start or from a checkpoint: a path, "last" or "best". Every rank calls this."""
        train_dataloaders, datamodule = _as_datamodule(train_dataloaders, datamodule)
        attach(self, model, datamodule)
        self.passed_train_loaders, self._passed_val = train_dataloaders, val_dataloaders
        self._train_loaders = self._val_loaders = None
        self.journal.clear()
        with self.running("fit"):
            self._guard(lambda: running.fit(self, ckpt_path))

    def validate(
        self, model: Any = None, dataloaders: Any = None, ckpt_path: Any = None, verbose: bool = True,
        datamodule: Any = None, weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """Evaluate on the validation data; return the metrics of each loader. Every rank calls this."""
        return self._evaluate("validate", model, dataloaders, ckpt_path, verbose, datamodule)[0]

    def test(
        self, model: Any = None, dataloaders: Any = None, ckpt_path: Any = None, verbose: bool = True,
        datamodule: Any = None, weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """Evaluate on the test data; return the metrics of each loader. Every rank calls this."""
        return self._evaluate("test", model, dataloaders, ckpt_path, verbose, datamodule)[0]

    def predict(
        self, model: Any = None, dataloaders: Any = None, datamodule: Any = None, return_predictions: bool | None = None,
        ckpt_path: Any = None, weights_only: bool | None = None,
    ) -> Any:  # fmt: skip
        """Return what ``predict_step`` gives for each batch: a list, or a list of lists for several loaders."""
        self.returns_predictions = return_predictions is not False
        _, predictions = self._evaluate("predict", model, dataloaders, ckpt_path, False, datamodule)
        if not self.returns_predictions:
            return None
        return predictions[0] if len(predictions) == 1 else predictions

    def save_checkpoint(self, filepath: Any, weights_only: bool = False, storage_options: Any = None) -> None:
        """Write a checkpoint now. Every rank calls this."""
        saving.save(self, filepath, weights_only=weights_only)

    def to_recipe(self) -> str:
        """Return the recipe that says what these flags say, as YAML: the way from Lightning code to a recipe."""
        from camshaft.lightning.recipe import to_recipe

        return to_recipe(self)

    # -- how a run goes ----------------------------------------------------------------------------

    def launch(self) -> None:
        """Join the other processes, once; start them first where this script is alone. Every rank calls this."""
        if self._engine is not None:
            return
        start_others(self.devices)
        strategy = build(self._chosen, device=self.devices.device, sync_batchnorm=self.flags["sync_batchnorm"])
        strategy.launch()
        self._engine = strategy

    @property
    def engine(self) -> EngineStrategy:
        """The engine's strategy; one process and no launch yet where nothing has run."""
        if self._engine is None:
            self.launch()
        assert self._engine is not None
        return self._engine

    def kept_state(self, stage: Any) -> State:
        """Return the engine's state of a stage; a fit goes on from the counters of the fit before it."""
        state = running.make_state(self, stage)
        before = self.loop_state
        if before is not None:
            state.progress = before.progress
        return state

    def prepare_for_evaluation(self) -> None:
        """Place the module for an evaluation, unless a run of this trainer did it already."""
        if self.engine.module is not self.lightning_module:
            self.engine.prepare(self.lightning_module, [])

    def wrap_optimizers(self) -> None:
        """Make the wrappers that the module sees."""
        self.lightning_optimizers = [LightningOptimizer(optimizer, self) for optimizer in self.optimizers]

    def to_precision(self) -> None:
        """Convert the module's floating tensors where the precision is a "true" one."""
        if self.precision in _TRUE:
            self.lightning_module.to(_TRUE[self.precision])

    def converted(self, batch: Any) -> Any:
        """Return a batch with its floating tensors in a "true" precision."""
        if self.precision not in _TRUE:
            return batch
        from camshaft.lightning.gathering import map_tensors

        kind = _TRUE[self.precision]
        return map_tensors(batch, lambda tensor: tensor.to(kind) if tensor.is_floating_point() else tensor)

    def run_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward for manual optimization."""
        self.stepper.backward(loss, *args, **kwargs)

    def clip_gradients(self, optimizer: Any, limit: float | None, algorithm: str | None) -> None:
        """Clip what an optimizer holds, by norm or by value; without a limit nothing happens."""
        limit = self.gradient_clip_val if limit is None else limit
        algorithm = str(getattr(algorithm, "value", algorithm) or self.gradient_clip_algorithm or "norm")
        if not limit:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, limit)
        else:
            self.engine.clip_grad_norm(limit, parameters)

    def advance_schedulers(self, interval: str, *, plateau: bool) -> None:
        """Step the schedulers whose turn it is."""
        scheduling.advance(self, interval, plateau=plateau)

    def open_train(self) -> Loaders | None:
        """Ask for the training data, once a run or as often as it is reloaded."""
        if self._train_loaders is None:
            loaders = request(self, "fit", self.passed_train_loaders)
            if loaders is None:
                raise running.loading.no_data("fit")
            self._train_loaders = loaders
            self.open_sources(loaders)
        return self._train_loaders

    def open_validation(self, *, always: bool = False) -> Loaders | None:
        """Ask for the validation data where it is due to be used."""
        wanted = self.validates and (always or self.validates_this_epoch)
        if self._val_loaders is None and wanted:
            self._val_loaders = request(self, "validate", self._passed_val)
        return self._val_loaders

    @contextmanager
    def running(self, stage: str) -> Iterator[None]:
        """Say inside the context what the trainer does."""
        before = (self.state.fn, self.state.stage)
        self.state.enter(stage, is_inner=self.is_fitting)
        try:
            yield
        finally:
            self.state.fn, self.state.stage = before

    # -- inside ------------------------------------------------------------------------------------

    def _evaluate(
        self, stage: str, model: Any, dataloaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> tuple[list[dict[str, float]], list[list[Any]]]:
        dataloaders, datamodule = _as_datamodule(dataloaders, datamodule)
        attach(self, model if model is not None else self.lightning_module, datamodule)
        self.journal.clear()
        results: Any = None

        def run() -> None:
            nonlocal results
            results = running.evaluate(self, stage, dataloaders, ckpt_path)

        with self.running(stage):
            self._guard(run)
        if verbose and self.is_global_zero:
            saving.show_results(stage, results[0])
        return results  # type: ignore[no-any-return]

    def _guard(self, run: Any) -> None:
        try:
            run()
        except KeyboardInterrupt:
            self.state.status = "interrupted"
            raise SystemExit(130) from None
        except BaseException:
            self.state.status = "interrupted"
            raise
        self.state.status = "finished"

    def _read_run(self) -> None:
        flags = self.flags
        self.precision = read_precision(flags["precision"])
        asked = flags["strategy"]
        self.devices = read_devices(flags["accelerator"], flags["devices"], flags["num_nodes"])
        self._chosen = choose(asked, processes=self.devices.world_size)
        self._engine: EngineStrategy | None = None
        self.data_seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self.default_root_dir = str(Path(flags["default_root_dir"] or Path.cwd()).expanduser())

    def _read_limits(self) -> None:
        flags = dict(self.flags)
        fast = int(flags["fast_dev_run"])
        if fast:
            flags |= dict.fromkeys((f"limit_{part}_batches" for part in ("train", "val", "test", "predict")), fast)
            flags |= {"max_epochs": 1, "max_steps": fast, "num_sanity_val_steps": 0, "val_check_interval": 1.0,
                      "check_val_every_n_epoch": 1, "log_every_n_steps": 1}  # fmt: skip
        self.fast_dev_run = flags["fast_dev_run"]
        self.max_epochs, self.max_steps = flags["max_epochs"], flags["max_steps"]
        self.min_epochs, self.min_steps = flags["min_epochs"], flags["min_steps"]
        self.max_secs = read_seconds("max_time", flags["max_time"])
        for part in ("train", "val", "test", "predict"):
            setattr(self, f"limit_{part}_batches", read_limit(f"limit_{part}_batches", flags[f"limit_{part}_batches"]))
        self.overfit_batches = read_limit("overfit_batches", flags["overfit_batches"])
        if self.overfit_batches:
            self.limit_train_batches = self.limit_val_batches = self.overfit_batches
        self.check_val_every_n_epoch = flags["check_val_every_n_epoch"]
        self.val_check_interval = 1.0 if flags["val_check_interval"] is None else flags["val_check_interval"]
        sanity = flags["num_sanity_val_steps"]
        self.num_sanity_val_steps: int | None = 2 if sanity is None else sanity
        self.log_every_n_steps = 50 if flags["log_every_n_steps"] is None else flags["log_every_n_steps"]

    def _read_rest(self) -> None:
        flags = self.flags
        self.gradient_clip_val = flags["gradient_clip_val"]
        self.gradient_clip_algorithm = flags["gradient_clip_algorithm"]
        self.inference_mode = flags["inference_mode"]
        self._accumulate = flags["accumulate_grad_batches"]
        self.reload_dataloaders_every_n_epochs = flags["reload_dataloaders_every_n_epochs"]
        self.lightning_module: Any = None
        self.datamodule: Any = None
        self.loop_state: Any = None
        self.loggers: list[Any] = default_loggers(self)
        self.callbacks: list[Any] = default_callbacks(self)
        self.state = TrainerState()

    def _begin(self) -> None:
        """Set what a run changes."""
        self.optimizers: list[Any] = []
        self.lightning_optimizers: list[LightningOptimizer] = []
        self.lr_scheduler_configs: list[Any] = []
        self.passed_train_loaders: Any = None
        self._passed_val: Any = None
        self._noted: dict[str, Loaders] = {}
        self._is_due = False
        self._train_loaders: Loaders | None = None
        self._val_loaders: Loaders | None = None
        self.global_step = 0
        self.should_stop = self.sanity_checking = self.is_closing = self.has_open_epoch = self.validation_due = False
        self.returns_predictions = True
        self.batch_idx = -1
        self.last_validation = self.clock()

    @staticmethod
    def clock() -> float:
        """Return seconds of a clock that never goes back."""
        return time.monotonic()


def _as_datamodule(first: Any, datamodule: Any) -> tuple[Any, Any]:
    """Accept a data module where loaders are expected."""
    from camshaft.lightning.datamodule import LightningDataModule

    if isinstance(first, LightningDataModule):
        return None, first
    return first, datamodule

