"""Train on one rank, whole and in two parts, and note every step's digest: what the test of resume compares."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from camshaft import DataModule, Module
from camshaft.callback import Callback
from camshaft.callbacks.clip import ClipGradients
from camshaft.callbacks.digest import Digest
from camshaft.callbacks.ema import EMA
from camshaft.loggers.base import Logger
from camshaft.testing import StopAt, tiny_run
from camshaft.testing.drive import gathered

SAMPLES, BATCH, ACCUMULATE, WIDTH = 44, 8, 2, 16
# Six steps an epoch, the last of half a window.
STEPS = 14
PERSISTENT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
TWO: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp": {"name": "fsdp", "wrap": ["Layer"]},
    "zero-1": {"name": "deepspeed", "stage": 1},
    "zero-2": {"name": "deepspeed", "stage": 2},
    "zero-3": {"name": "deepspeed", "stage": 3, "config": PERSISTENT},
}
HSDP = {"name": "fsdp", "wrap": ["Layer"], "dp_replicate": 2, "dp_shard": 2}


class Noisy(Dataset[Any]):
    """Samples that are augmented from the global streams each time they are read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        values = torch.sin(torch.arange(WIDTH) * (index + 1.0))
        return values + 0.1 * torch.randn(WIDTH), values.sum().reshape(1), index


class Noise(DataModule):
    """Augmented samples where ``workers`` read them, which makes them the same in every world."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def train_dataloader(self) -> Any:
        return DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        return DataLoader(Noisy(), batch_size=4, num_workers=self.workers)


class Layer(nn.Module):
    """A residual layer with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.dropout(torch.tanh(self.linear(inputs)))


class Model(Module):
    """Two layers, AdamW and a schedule; logs what it sees."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.seen: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, targets, indices = batch
        self.seen.extend(indices.tolist())
        loss = nn.functional.mse_loss(self(inputs), targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val/loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Memory(Logger):
    """Keep every record."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def log_metrics(self, record: Any) -> None:
        self.records.append((record.kind, record.step, record.epoch, record.samples, dict(record.values)))


class Ending(Callback):
    """Gather weights and averages while the processes are still together."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.averages: dict[str, torch.Tensor] = {}

    def on_fit_end(self, state: Any) -> None:
        self.weights = gathered(state.strategy, state.strategy.named_state())
        self.averages = gathered(state.strategy, state.callbacks["ema"].averages.items())


def train(
    strategy: Any, place: Path, *, resume: str = "never", stop: int | None = None, **options: Any
) -> dict[str, Any]:
    """Train to the end or to ``stop``; return what this rank noted."""
    place.mkdir(parents=True, exist_ok=True)
    memory, ending, ema, digest = Memory(), Ending(), EMA(0.9), place / "digest"
    callbacks: dict[str, Callback] = {
        "clip": ClipGradients(1.0), "ema": ema, "digest": Digest(str(digest)), "ending": ending,
    }  # fmt: skip
    if stop is not None:
        callbacks["stop"] = StopAt(stop)
    torch.manual_seed(0)
    dropout, workers = options.get("dropout", 0.0), options.get("workers", 0)
    result = tiny_run(
        Model(dropout), Noise(workers), callbacks=callbacks, loggers={"memory": memory}, strategy=strategy,
        runs_dir=place, max_steps=STEPS, batch_size=BATCH, accumulate=ACCUMULATE, validate="1 epoch", log_every=2,
        checkpoint={"every": "3 steps", "keep_last": 5}, resume=resume, seed=3,
    )  # fmt: skip
    return {
        "lines": digests(digest), "records": memory.records, "weights": ending.weights, "averages": ending.averages,
        "directory": str(result.run_dir), "seen": result.module.seen,
    }  # fmt: skip


def digests(path: Path) -> dict[int, Any]:
    """Return the lines of this rank by step; a step that was made twice was made alike."""
    own = path if path.exists() else path.with_name(f"{path.name}.{os.environ['RANK']}")
    lines: dict[int, Any] = {}
    for text in own.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        assert lines.setdefault(line["step"], line) == line, f"step {line['step']} differs from itself"
    return lines


def in_two_parts(strategy: Any, place: Path, stop: int, **options: Any) -> list[dict[str, Any]]:
    """Train to ``stop``, then to the end from what that left; return both parts."""
    first = train(strategy, place, stop=stop, **options)
    return [first, train(strategy, place, resume=first["directory"], **options)]


# Steps after which a run stops: inside an epoch and between two log steps, at an epoch's end, and inside the next.
DROPPING, WORKING = {"dropout": 0.3}, {"workers": 2}
INSIDE, AT_END, LATER = 5, 6, 9


def on_ranks(strategies: dict[str, Any], place: str, single: str) -> dict[str, Any]:
    """Run every strategy on this rank, whole and in parts; then each goes on with the checkpoint of another."""
    found: dict[str, Any] = {}
    for name, strategy in strategies.items():
        where = Path(place) / name
        found[name, "whole"] = [train(strategy, where / "whole", **DROPPING)]
        for stop in (INSIDE, AT_END):
            found[name, stop] = in_two_parts(strategy, where / f"parts-{stop}", stop, **DROPPING)
        found[name, "whole with workers"] = [train(strategy, where / "worked", **WORKING)]
        found[name, LATER] = in_two_parts(strategy, where / f"parts-{LATER}", LATER, **WORKING)
    names = list(strategies)
    for source, target in zip([*names[1:], "single"], names, strict=True):
        left = single if source == "single" else found[source, LATER][0]["directory"]
        checkpoint = checkpoint_of(left, LATER)
        moved = Path(place) / f"{source} to {target}"
        found[target, "moved"] = [train(strategies[target], moved, resume=checkpoint, **WORKING)]
    return found


def checkpoint_of(directory: str, step: int) -> str:
    """Return the checkpoint that the first part left when it stopped."""
    (path,) = (Path(directory) / "checkpoints").glob(f"step_{step:08}*")
    return str(path)


def counts(ranks: list[dict[str, Any]]) -> Counter[int]:
    """Count how often each sample was trained on, over all ranks."""
    return Counter(index for rank in ranks for index in rank["seen"])
