"""List the hooks of Lightning's surface, with what each does where nobody overrides it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class ModuleHooks:
    """What a ``LightningModule`` may override: called in Lightning's order, by the trainer of ``camshaft.lightning``."""

    # Methods of a class that says so are what others override.
    is_surface = True

    def on_fit_start(self) -> None:
        """Fire once, when everything is prepared, before the sanity check."""

    def on_fit_end(self) -> None:
        """Fire once, when training is over; not after an exception."""

    def on_train_start(self) -> None:
        """Fire once, after the sanity check."""

    def on_train_end(self) -> None:
        """Fire once, after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Fire before the first batch of an epoch."""

    def on_train_epoch_end(self) -> None:
        """Fire after the last batch of an epoch and its validation: log here what belongs to the epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Fire before each training batch; return -1 to end the epoch here."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Fire after each training batch, with what ``training_step`` returned."""

    def on_validation_start(self) -> None:
        """Fire before validation."""

    def on_validation_end(self) -> None:
        """Fire after validation, when its metrics are known."""

    def on_validation_epoch_start(self) -> None:
        """Fire before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Fire after the last validation batch: log here what belongs to the whole validation."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Fire before each validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Fire after each validation batch, with what ``validation_step`` returned."""

    def on_validation_model_eval(self) -> None:
        """Put the module in eval mode for validation."""
        self.eval()  # type: ignore[attr-defined]

    def on_validation_model_train(self) -> None:
        """Put the module back in train mode; every submodule gets its own flag back unless this is overridden."""
        self.train()  # type: ignore[attr-defined]

    def on_validation_model_zero_grad(self) -> None:
        """Free the gradients before a validation between two steps."""
        self.zero_grad()  # type: ignore[attr-defined]

    def on_test_start(self) -> None:
        """Fire before testing."""

    def on_test_end(self) -> None:
        """Fire after testing."""

    def on_test_epoch_start(self) -> None:
        """Fire before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Fire after the last test batch."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Fire before each test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Fire after each test batch, with what ``test_step`` returned."""

    def on_test_model_eval(self) -> None:
        """Put the module in eval mode for testing."""
        self.eval()  # type: ignore[attr-defined]

    def on_test_model_train(self) -> None:
        """Put the module back in train mode; every submodule gets its own flag back unless this is overridden."""
        self.train()  # type: ignore[attr-defined]

    def on_predict_start(self) -> None:
        """Fire before prediction."""

    def on_predict_end(self) -> None:
        """Fire after prediction."""

    def on_predict_epoch_start(self) -> None:
        """Fire before the first batch to predict."""

    def on_predict_epoch_end(self) -> None:
        """Fire after the last batch to predict."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Fire before each batch to predict."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Fire after each batch to predict, with what ``predict_step`` returned."""

    def on_predict_model_eval(self) -> None:
        """Put the module in eval mode for prediction."""
        self.eval()  # type: ignore[attr-defined]

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Fire before gradients are cleared, after ``training_step`` and before backward."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Fire before backward, with the loss it starts from."""

    def on_after_backward(self) -> None:
        """Fire after backward; gradients are scaled under fp16."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Fire once gradients are complete and unscaled, before they are clipped."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint, or take from it, before it is written."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read from a checkpoint before its weights are loaded."""

    def configure_model(self) -> None:
        """Build layers that are large or sharded: called before training, once or several times."""


class DataHooks:
    """What a ``LightningModule`` and a ``LightningDataModule`` may override to give data."""

    is_surface = True

    allow_zero_length_dataloader_with_multiple_devices: bool = False
    prepare_data_per_node: bool = True

    def prepare_data(self) -> None:
        """Download or convert, once on each machine. Do not set attributes here."""

    def setup(self, stage: str) -> None:
        """Open and split the data on every rank; ``stage`` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """Close what ``setup`` opened."""

    def train_dataloader(self) -> Any:
        """Return the training data: a loader, a list or dict of loaders, or any iterable of batches."""
        return None

    def val_dataloader(self) -> Any:
        """Return one validation loader or several."""
        return None

    def test_dataloader(self) -> Any:
        """Return one test loader or several."""
        return None

    def predict_dataloader(self) -> Any:
        """Return one loader to predict or several."""
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the host, before it goes to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Move a batch to the device; override it for a batch of a class of your own."""
        from camshaft.strategies.placing import move

        return move(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device."""
        return batch


MODULE_HOOKS = frozenset(name for name in vars(ModuleHooks) if name.startswith("on_"))
DATA_HOOKS = frozenset(name for name in vars(DataHooks) if not name.startswith("_"))


def is_overridden(name: str, owner: Any, parent: type | None = None) -> bool:
    """Say whether ``owner`` has a ``name`` of its own, and not the one that every such class has.

    ``parent`` is the class whose method counts as not overridden, where that is another one.
    """
    if parent is not None:
        return getattr(type(owner), name, None) is not getattr(parent, name, None)
    if name in getattr(owner, "__dict__", {}):
        return True
    definer = next((kind for kind in type(owner).__mro__ if name in vars(kind)), None)
    return definer is not None and "is_surface" not in vars(definer)
