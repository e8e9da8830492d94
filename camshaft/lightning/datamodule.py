"""Declare ``LightningDataModule``: the data of a run, with Lightning's surface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from torch.utils.data import DataLoader, Dataset, IterableDataset

from camshaft.lightning.hooks import DataHooks
from camshaft.lightning.hparams import HyperparametersMixin

if TYPE_CHECKING:
    from camshaft.lightning.trainer import Trainer


class LightningDataModule(DataHooks, HyperparametersMixin):
    """Own the data: ``prepare_data`` once, ``setup`` on every rank, and the loaders."""

    is_surface = True
    name: str | None = None
    trainer: Trainer | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to know of the data: tensors and plain data."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""

    def on_exception(self, exception: BaseException) -> None:
        """Fire before an exception is raised again."""

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> Self:
        """Make a data module of datasets; of each a list gives a list of loaders, a dict a dict."""

        def loader(dataset: Any, *, shuffle: bool) -> Any:
            if isinstance(dataset, Mapping):
                return {key: loader(value, shuffle=shuffle) for key, value in dataset.items()}
            if isinstance(dataset, Sequence) and not isinstance(dataset, Dataset):
                return [loader(value, shuffle=shuffle) for value in dataset]
            shuffles = shuffle and not isinstance(dataset, IterableDataset)
            return DataLoader(
                dataset, batch_size=batch_size, shuffle=shuffles, num_workers=num_workers, pin_memory=True
            ) if num_workers else DataLoader(dataset, batch_size=batch_size, shuffle=shuffles)

        made = cls(**datamodule_kwargs)
        given = {
            "train_dataloader": train_dataset, "val_dataloader": val_dataset,
            "test_dataloader": test_dataset, "predict_dataloader": predict_dataset,
        }  # fmt: skip
        for name, dataset in given.items():
            if dataset is not None:
                shuffles = name == "train_dataloader"
                setattr(made, name, lambda dataset=dataset, shuffles=shuffles: loader(dataset, shuffle=shuffles))
        return made

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, map_location: Any = None, **kwargs: Any) -> Self:
        """Build a data module from the hyper-parameters that a checkpoint has of it, and ``kwargs``."""
        from camshaft.lightning.loading import load_datamodule

        return load_datamodule(cls, checkpoint_path, kwargs)
