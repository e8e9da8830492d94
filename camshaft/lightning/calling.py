"""Call the hooks of callbacks, module and data, and know which one is running."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from camshaft.lightning.hooks import is_overridden

if TYPE_CHECKING:
    from camshaft.lightning.trainer import Trainer

# Where a value may be logged, and whether a step of its own exists there.
_EPOCH_ONLY = frozenset(
    f"on_{stage}_{moment}"
    for stage in ("train", "validation", "test")
    for moment in ("start", "epoch_start", "epoch_end")
)
STEP_HOOKS = frozenset(
    {
        "training_step", "validation_step", "test_step", "backward", "optimizer_step", "on_before_backward",
        "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "optimizer_zero_grad",
        "configure_gradient_clipping", "lr_scheduler_step", "on_validation_model_zero_grad",
        *(f"on_{stage}_batch_{moment}" for stage in ("train", "validation", "test") for moment in ("start", "end")),
    }
)  # fmt: skip
LOGS_EPOCH_ONLY = _EPOCH_ONLY


class Caller:
    """Call hooks for a trainer; ``current`` is the name of the one that runs, None between them."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.current: str | None = None

    def module(self, name: str, *args: Any) -> Any:
        """Call a hook of the module."""
        trainer = self._trainer
        return self.call(name, getattr(trainer.lightning_module, name), *args)

    def call(self, name: str, function: Any, *args: Any) -> Any:
        """Call anything as the hook ``name``: what it logs is logged there."""
        before, self.current = self.current, name
        try:
            return function(*args)
        finally:
            self.current = before

    def callbacks(self, name: str, *args: Any, monitoring: bool | None = None) -> None:
        """Call a hook of the callbacks in their order; ``monitoring`` picks those that watch a metric, or the others."""
        trainer = self._trainer
        for callback in list(trainer.callbacks):
            if monitoring is not None and callback.is_monitoring is not monitoring:
                continue
            if is_overridden(name, callback):
                self.call(name, getattr(callback, name), trainer, trainer.lightning_module, *args)

    def both(self, name: str, *args: Any) -> Any:
        """Call a hook of the callbacks, then the module's, and return what that returned."""
        self.callbacks(name, *args)
        return self.module(name, *args)

    def data(self, name: str, *args: Any) -> Any:
        """Call a hook of the datamodule where there is one that has it."""
        datamodule = self._trainer.datamodule
        if datamodule is not None and hasattr(datamodule, name):
            return self.call(name, getattr(datamodule, name), *args)
        return None

    def transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Run a batch through the transfer hooks of whoever overrides them: the datamodule, or else the module."""
        trainer = self._trainer
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            owner = trainer.datamodule
            if owner is None or not is_overridden(name, owner):
                owner = trainer.lightning_module
            if name == "transfer_batch_to_device":
                if not is_overridden(name, owner):
                    batch = trainer.engine.to_device(batch)
                    continue
                batch = self.call(name, owner.transfer_batch_to_device, batch, trainer.engine.device, dataloader_idx)
            else:
                batch = self.call(name, getattr(owner, name), batch, dataloader_idx)
        return batch
