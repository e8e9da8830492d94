"""Declare ``Callback``: hooks that get the trainer and the module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from camshaft.lightning.definition import check_callback

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from camshaft.lightning.module import LightningModule
    from camshaft.lightning.trainer import Trainer


class Callback:
    """Listen to the hooks of a run; each gets the trainer and the module first.

    Attributes:
        is_monitoring: whether it acts on a logged metric: its ``on_train_epoch_end`` then runs after the module's.
        can_stop: whether it may end a run, so that one without a limit of its own is no mistake.
    """

    is_surface = True
    is_monitoring: bool = False
    can_stop: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_callback(cls, CALLBACK_HOOKS)

    @property
    def state_key(self) -> str:
        """The key of its state in a checkpoint; two of one class need different ones."""
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        """Return a key made of the class and some of its arguments."""
        return f"{type(self).__qualname__}{kwargs!r}"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Fire when a run of ``stage`` is set up."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Fire when a run of ``stage`` is over; not after an exception."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire once, when everything is prepared, before the sanity check."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire once, when training is over; not after an exception."""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire before the validation batches that are tried before training."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire after them."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire once, after the sanity check."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire once, after the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire before the first batch of an epoch."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire after the last batch of an epoch and its validation."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Fire before each training batch."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Fire after each training batch."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire before validation."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire after validation, when its metrics are known."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire after the last validation batch."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Fire before each validation batch."""

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Fire after each validation batch."""

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire before testing."""

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire after testing."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire before the first test batch."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire after the last test batch."""

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Fire before each test batch."""

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Fire after each test batch."""

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire before prediction."""

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire after prediction."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire before the first batch to predict."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire after the last batch to predict."""

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Fire before each batch to predict."""

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Fire after each batch to predict."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Fire before gradients are cleared."""

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Fire before backward."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fire after backward."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Fire once gradients are complete and unscaled, before they are clipped."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Fire before an exception is raised again. Peers may be gone: no collectives."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint before it is written."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read from a checkpoint that a run goes on from."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: tensors and plain data."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""


CALLBACK_HOOKS = frozenset(
    name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")
)
