"""What the ranks of a test run: training and evaluation on data that they cannot share evenly."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import torch
from torchmetrics import MeanSquaredError

import camshaft
from camshaft.strategies.base import Strategy
from camshaft.strategies.ddp import DDP
from camshaft.strategies.deepspeed import DeepSpeed
from camshaft.strategies.fsdp import FSDP
from camshaft.strategies.single import Single
from camshaft.strategies.tensorparallel import TensorParallel
from camshaft.testing import TinyData, TinyModule
from camshaft.testing.tiny import tiny_set

MAKERS: dict[str, Any] = {
    "single": lambda: Single("cpu"),
    "ddp": lambda: DDP(device="cpu"),
    "fsdp": lambda: FSDP(wrap=["Linear"], device="cpu"),
    "zero-2": lambda: DeepSpeed(2, device="cpu"),
    "zero-3": lambda: DeepSpeed(3, device="cpu"),
    "tensor parallel": lambda: TensorParallel(device="cpu"),
}


class Judged(TinyModule):
    """Log a mean, a sum of samples and a torchmetrics object; say which samples were seen."""

    def __init__(self) -> None:
        super().__init__(hidden=8)
        self.error = MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        outputs = self(inputs)
        self.log("val/loss", torch.nn.functional.mse_loss(outputs, targets))
        self.error.update(outputs, targets)
        self.log("val/metric", self.error)
        self.log("val/count", torch.tensor(float(len(inputs))), reduce="sum")

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"net.0": "colwise", "net.3": "rowwise"}


class Odd(TinyData):
    """21 samples for everything, in batches of 4."""

    def __init__(self) -> None:
        super().__init__(21, batch_size=4)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(tiny_set(21, 1), batch_size=4)


def train(name: str, place: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Train two epochs, each with a short last window, and return metrics and whole weights."""
    strategy: Strategy = MAKERS[name]()
    torch.manual_seed(0)
    module = Judged()
    whole = Whole()
    callbacks: Any = {"progress": None, "summary": None, "checkpoint": None, "whole": whole}
    loggers: Any = {"console": None, "jsonl": None, "tensorboard": None}
    with contextlib.redirect_stdout(io.StringIO()):
        result = camshaft.run(
            module, Odd(), strategy=strategy, callbacks=callbacks, loggers=loggers, batch_size=8, accumulate=2,
            max_epochs=2, runs_dir=Path(place) / (os.environ["RANK"] if name == "single" else "all"), resume="never",
        )  # fmt: skip
    return result.metrics, whole.weights


class Whole(camshaft.Callback):
    """Keep the whole weights."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def on_fit_end(self, state: Any) -> None:
        from camshaft.testing.drive import gathered

        self.weights = gathered(state.strategy, state.strategy.named_state())


def train_all(place: str) -> dict[str, Any]:
    """Train with each strategy."""
    return {name: train(name, place) for name in MAKERS}
