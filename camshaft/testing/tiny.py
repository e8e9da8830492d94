"""Small real modules, data and runs that train in milliseconds."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from camshaft.callback import Callback
from camshaft.data import DataModule
from camshaft.module import Module
from camshaft.session import Result, run
from camshaft.state import State

FEATURES = 4


class TinyModule(Module):
    """A two-layer regression; logs ``val/loss`` and ``test/loss``.

    ``dropout`` draws from the random streams. ``none_on`` lists the ``batch_idx`` whose training step
    returns None. ``pairs`` returns (loss sum, number of samples) instead of the mean. ``configure``
    makes what ``configure_optimizers`` returns from the module; SGD of ``lr`` by default.
    """

    def __init__(
        self,
        *,
        hidden: int = 8,
        dropout: float = 0.0,
        none_on: Collection[int] = (),
        pairs: bool = False,
        lr: float = 0.05,
        configure: Callable[[TinyModule], Any] | None = None,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 1))
        self.none_on = frozenset(none_on)
        self.pairs = pairs
        self.lr = lr
        self.configure = configure

    def forward(self, inputs: Tensor) -> Tensor:
        """Predict one number a sample."""
        outputs: Tensor = self.net(inputs)
        return outputs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        """Return the loss in the shape that was asked for."""
        if batch_idx in self.none_on:
            return None
        inputs, targets = batch
        loss = mse_loss(self(inputs), targets)
        return (loss * len(inputs), len(inputs)) if self.pairs else loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the mean squared error."""
        del batch_idx
        self.log("val/loss", mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the mean squared error."""
        del batch_idx
        self.log("test/loss", mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Any:
        """Return the predictions."""
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        """Return the optimizers that were asked for."""
        return self.configure(self) if self.configure is not None else torch.optim.SGD(self.parameters(), lr=self.lr)


class ManualTiny(Module):
    """Manual optimization of two layers by an optimizer each, one after the other, on the same batch."""

    automatic_optimization = False

    def __init__(self, *, lr: float = 0.05) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 1)
        self.second = nn.Linear(FEATURES, 1)
        self.lr = lr

    def losses(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of one layer; the second learns what the first leaves."""
        inputs, targets = batch
        if index == 0:
            return mse_loss(self.first(inputs), targets)
        return mse_loss(self.second(inputs), targets - self.first(inputs).detach())

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Update both layers."""
        for index, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            loss = self.losses(batch, index)
            self.manual_backward(loss)
            optimizer.step()
            self.log(f"train/loss_{index}", loss)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return one optimizer a layer."""
        return [torch.optim.SGD(layer.parameters(), lr=self.lr) for layer in (self.first, self.second)]


class TinyData(DataModule):
    """A fixed regression of ``samples`` samples, split for training, and half as many for the other splits.

    Everything but the training split is in a fixed order. ``workers`` load the training split.
    """

    def __init__(
        self,
        samples: int = 24,
        *,
        batch_size: int = 4,
        shuffle: bool = True,
        drop_last: bool = False,
        workers: int = 0,
        val: bool = True,
        test: bool = False,
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.workers = workers
        self.has_val = val
        self.has_test = test

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training loader."""
        return DataLoader(
            tiny_set(self.samples), batch_size=self.batch_size, shuffle=self.shuffle, drop_last=self.drop_last,
            num_workers=self.workers,
        )  # fmt: skip

    def val_dataloader(self) -> DataLoader[Any] | None:
        """Return the validation loader."""
        return self._other(1) if self.has_val else None

    def test_dataloader(self) -> DataLoader[Any] | None:
        """Return the test loader."""
        return self._other(2) if self.has_test else None

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the loader to predict."""
        return self._other(3)

    def _other(self, seed: int) -> DataLoader[Any]:
        return DataLoader(tiny_set(max(1, self.samples // 2), seed), batch_size=self.batch_size)


class TinyIterable:
    """Batches of the same regression without a length: ``sizes`` are the samples of each."""

    def __init__(self, sizes: Collection[int] = (4, 4, 4, 2)) -> None:
        self.sizes = tuple(sizes)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batches, the same in every epoch."""
        data = tiny_set(sum(self.sizes))
        yield from zip(*(torch.split(tensor, list(self.sizes)) for tensor in data.tensors), strict=True)


def tiny_set(samples: int, seed: int = 0) -> TensorDataset:
    """Return inputs (samples, 4) and targets (samples, 1), a fixed function of ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    noise = 0.1 * torch.randn(samples, 1, generator=generator)
    return TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + noise)


class StopAt(Callback):
    """Stop the run after ``step`` updates, as a user or a signal would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, state: State) -> None:
        """Ask to stop when it is time."""
        if state.progress.step == self.step:
            state.control.stop(f"step {self.step} is done", everywhere=True)


def tiny_run(
    module: Module | None = None,
    data: Any | None = None,
    *,
    callbacks: Mapping[str, Callback] | None = None,
    loggers: Mapping[str, Any] | None = None,
    runs_dir: Path | str | None = None,
    **settings: Any,
) -> Result:
    """Run ``camshaft.run`` on the CPU, without a word, a bundled logger or a checkpoint.

    One epoch of a TinyModule on TinyData unless told otherwise. The weights of a default module are
    those of seed 0. Without ``runs_dir`` the run's directory is deleted at the end.
    """
    if module is None:
        torch.manual_seed(0)
        module = TinyModule()
    if not {"max_epochs", "max_steps", "max_time", "fast_dev_run"} & set(settings):
        settings["max_epochs"] = 1
    settings = {"device": "cpu", "checkpoint": False, "resume": "never", **settings}
    quiet: dict[str, Any] = {"summary": None, "progress": None, **(callbacks or {})}
    silent: dict[str, Any] = {"console": None, "jsonl": None, "tensorboard": None, **(loggers or {})}
    with contextlib.ExitStack() as stack:
        settings["runs_dir"] = runs_dir or stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        return run(module, TinyData() if data is None else data, callbacks=quiet, loggers=silent, **settings)
