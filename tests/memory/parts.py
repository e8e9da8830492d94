"""A small stack of blocks, its data, and runs of it: what every test of this folder trains."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from camshaft import Callback, DataModule, Module
from camshaft.testing import tiny_run

WIDTH, INPUTS = 32, 16


class Block(nn.Module):
    """A normalised feed-forward layer that is added to what went in."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Stack(Module):
    """Blocks between two linear layers: a regression."""

    def __init__(self, depth: int = 4, dropout: float = 0.0, optimizer: str = "adamw", lr: float = 1e-2) -> None:
        super().__init__()
        self.inner = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, dropout) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)
        self.optimizer, self.lr = optimizer, lr
        self.seen: list[tuple[int, torch.dtype]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.inner(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        outputs = self(batch[0])
        self.seen.append((len(batch[0]), outputs.dtype))
        self.log("outputs", outputs.float().mean())
        return mse_loss(outputs.float(), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val/loss", mse_loss(self(batch[0]).float(), batch[1]))

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=self.lr)
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Pairs(DataModule):
    """Fixed inputs and targets, in a fixed order unless ``shuffle``."""

    def __init__(self, samples: int = 64, *, batch_size: int = 8, shuffle: bool = False) -> None:
        self.samples, self.batch_size, self.shuffle = samples, batch_size, shuffle

    def train_dataloader(self) -> Any:
        return DataLoader(pairs(self.samples), self.batch_size, shuffle=self.shuffle)

    def val_dataloader(self) -> Any:
        return DataLoader(pairs(16, seed=1), self.batch_size)

    def predict_dataloader(self) -> Any:
        return DataLoader(pairs(16, seed=1), self.batch_size)


def pairs(samples: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, INPUTS, generator=generator)
    return TensorDataset(inputs, inputs[:, :1] * 2 - inputs[:, 1:2])


def stack(seed: int = 0, **options: Any) -> Stack:
    torch.manual_seed(seed)
    return Stack(**options)


def fit(module: Module | None = None, callbacks: Mapping[str, Callback | None] | None = None, **settings: Any) -> Any:
    """Train a stack for ``max_steps`` (8) steps of 8 samples; return the result."""
    data = settings.pop("data", None) or Pairs()
    settings = {"max_steps": 8, "batch_size": 8, "log_every": 2, "validate": None} | settings
    return tiny_run(module if module is not None else stack(), data, callbacks=dict(callbacks or {}), **settings)


def weights(result: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in result.module.state_dict().items()}


def different(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """Return the names whose tensors are not the same, bit for bit."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return the largest relative distance of two tensors of one name."""
    return max(float((left[n] - right[n]).norm() / right[n].norm().clamp_min(1e-12)) for n in left)
