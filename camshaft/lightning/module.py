"""Declare ``LightningModule``: a camshaft module with the surface of Lightning's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from camshaft.lightning.definition import check_module
from camshaft.lightning.errors import MisconfigurationException
from camshaft.lightning.hooks import DataHooks, ModuleHooks
from camshaft.lightning.hparams import HyperparametersMixin
from camshaft.lightning.toggling import toggle, untoggle
from camshaft.module import Module

if TYPE_CHECKING:
    from pathlib import Path

    from camshaft.lightning.optimizer import LightningOptimizer
    from camshaft.lightning.trainer import Trainer

_LINKS = ("_trainer", "_toggled")


class LightningModule(ModuleHooks, DataHooks, HyperparametersMixin, Module):
    """A model with its losses, optimizers, hooks and, if it likes, its data; trained by ``camshaft.lightning.Trainer``.

    Steps, hooks and helpers have Lightning's names, arguments and order.
    """

    is_surface = True
    CHECKPOINT_HYPER_PARAMS_KEY: ClassVar[str] = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME: ClassVar[str] = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE: ClassVar[str] = "hparams_type"
    example_input_array: Any = None
    _trainer: Trainer | None = None
    _toggled: dict[Tensor, bool] | None = None
    _strict_loading: bool | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    @classmethod
    def _check_definition(cls) -> None:
        check_module(cls)

    # -- what a user overrides -------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module is for."""
        return super().forward(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test a batch: log metrics."""
        raise NotImplementedError

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions for a batch: by default what ``forward`` makes of it."""
        return self(args[0] if args else next(iter(kwargs.values())))

    def configure_callbacks(self) -> Any:
        """Return callbacks that this module needs; they replace those of the trainer of the same type."""
        return []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward on the loss, which is divided for accumulation and scaled for fp16 already."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: LightningOptimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Update: calls the optimizer with the closure that runs ``training_step`` and backward."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step a scheduler that is due, with the value that it monitors."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients, which are unscaled; call ``self.clip_gradients`` with values of your own."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    # -- what a user calls -----------------------------------------------------------------------

    def log(  # type: ignore[override]
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a number, a tensor of one element, or a torchmetrics object, as Lightning does.

        Means over an epoch are over all samples of all ranks, whatever ``sync_dist`` says; it only
        asks for the mean over ranks of a step's value. ``enable_graph`` and ``metric_attribute`` change nothing here.
        """
        if self._trainer is None:
            # As in Lightning: a module used without a trainer may log into the void.
            return
        self._trainer.journal.log(
            name, value, prog_bar=prog_bar, logger=logger is not False, on_step=on_step, on_epoch=on_epoch,
            reduce_fx=reduce_fx, sync_dist=sync_dist, add_dataloader_idx=add_dataloader_idx,
            batch_size=batch_size, rank_zero_only=rank_zero_only,
        )  # fmt: skip

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:  # type: ignore[override]
        """Log each entry as ``log`` does; a MetricCollection gives its members."""
        members = dictionary.items()
        if hasattr(dictionary, "compute_groups"):
            members = dictionary.items(keep_base=False, copy_state=False)  # type: ignore[call-arg]
        for name, value in members:
            self.log(name, value, *args, **options)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process."""
        if self._trainer is None or self._trainer.is_global_zero:
            print(*args, **kwargs)  # noqa: T201

    def all_gather(self, data: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Return tensors of all ranks, stacked along a new first dim; every rank calls this."""
        from camshaft.lightning.gathering import all_gather

        return all_gather(data, self.trainer.engine, sync_grads=sync_grads)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of them when there are several."""
        trainer = self.trainer
        found = trainer.lightning_optimizers if use_pl_optimizer else trainer.optimizers
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        """Return the scheduler, the list of them when there are several, or None."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return schedulers[0] if len(schedulers) == 1 else (schedulers or None)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Run backward with the scaling that precision and strategy need."""
        self._require_manual("manual_backward")
        self.trainer.run_backward(loss, *args, **kwargs)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only the parameters of this optimizer ask for gradients, until ``untoggle_optimizer``."""
        object.__setattr__(self, "_toggled", toggle(optimizer, self.trainer.optimizers, self._toggled))

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Give every other parameter its own flag back."""
        object.__setattr__(self, "_toggled", untoggle(optimizer, self._toggled))

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Toggle inside a context."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters: their norm over all ranks' shards, or each value."""
        self.trainer.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def freeze(self) -> Self:
        """Stop all parameters from training, and go to eval mode."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """Let all parameters train, and go to train mode."""
        self.requires_grad_(True)
        return self.train()

    def to_onnx(self, file_path: str | Path, input_sample: Any = None, **options: Any) -> None:
        """Write the module as ONNX; needs the onnx package."""
        sample = self.example_input_array if input_sample is None else input_sample
        if sample is None:
            raise MisconfigurationException(
                "to_onnx has no input to trace with.", fix="Pass input_sample, or set example_input_array."
            )
        arguments = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
        torch.onnx.export(self.eval(), arguments, str(file_path), **options)

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build a module from a checkpoint's hyper-parameters and ``kwargs``, and load its weights.

        Nothing is unpickled but tensors and plain data, whatever ``weights_only`` says.

        Raises:
            CheckpointError: the file holds other objects, or does not fit the class.
        """
        from camshaft.lightning.loading import load_module

        return load_module(cls, checkpoint_path, map_location, hparams_file, strict, kwargs)

    # -- where it runs ---------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The trainer that runs this module.

        Raises:
            RuntimeError: none does.
        """
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a Trainer.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        # Not nn.Module.__setattr__: a trainer is no part of the model.
        for module in self.modules():
            if isinstance(module, LightningModule):
                object.__setattr__(module, "_trainer", trainer)

    @property
    def current_epoch(self) -> int:
        """Epochs finished; 0 without a trainer."""
        return self._trainer.current_epoch if self._trainer is not None else 0

    @property
    def global_step(self) -> int:
        """Optimizer steps taken, summed over optimizers; 0 without a trainer."""
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def global_rank(self) -> int:
        """Number of this process."""
        return self._trainer.global_rank if self._trainer is not None else 0

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine."""
        return self._trainer.local_rank if self._trainer is not None else 0

    @property
    def on_gpu(self) -> bool:
        """Whether the module lies on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating parameter; torch's default when there is none."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return self._trainer.logger if self._trainer is not None else None

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return self._trainer.loggers if self._trainer is not None else []

    @property
    def strict_loading(self) -> bool:
        """Whether a checkpoint must hold exactly the weights of the module."""
        return True if self._strict_loading is None else self._strict_loading

    @strict_loading.setter
    def strict_loading(self, strict: bool) -> None:
        self._strict_loading = strict

    def _require_manual(self, name: str) -> None:
        if self.automatic_optimization:
            raise MisconfigurationException(
                f"{type(self).__name__}.{name} was called with automatic optimization.",
                why="The trainer runs backward and steps the optimizer itself.",
                fix="Set self.automatic_optimization = False in __init__, or return the loss and leave the rest.",
            )

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        for name in _LINKS:
            state.pop(name, None)
        return state
