"""Predict the price of diamonds from their size, cut, colour and clarity."""

import csv
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.regression import R2Score

from camshaft import DataModule, Module

Batch = tuple[Tensor, Tensor]
NUMBERS = ("carat", "depth", "table", "x", "y", "z")
GRADES = ("cut", "color", "clarity")
NUM_GRADES = 5 + 7 + 8


class DiamondsMLP(Module):
    """Predict the logarithm of the price, in standard deviations from its mean."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(len(NUMBERS) + NUM_GRADES, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, 1),
        )
        self.val_r2 = R2Score()
        self.test_r2 = R2Score()

    def forward(self, features: Tensor) -> Tensor:
        """Return standardised log prices: (batch,)."""
        return self.net(features).squeeze(1)

    def training_step(self, batch: Batch) -> Tensor:
        """Learn a batch of prices."""
        features, price = batch
        loss = mse_loss(self(features), price)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch) -> None:
        """Measure which part of the variance is explained, on diamonds kept out of training."""
        features, price = batch
        predicted = self(features)
        self.val_r2.update(predicted, price)
        self.log("val/loss", mse_loss(predicted, price))
        self.log("val/r2", self.val_r2, prog_bar=True)

    def test_step(self, batch: Batch) -> None:
        """Measure it on the split that no decision was based on."""
        features, price = batch
        self.test_r2.update(self(features), price)
        self.log("test/r2", self.test_r2)


class Diamonds(DataModule):
    """53,940 diamonds in an order drawn by a fixed seed: 80 % to train, 10 % to validate, 10 % to test."""

    def __init__(self, batch_size: int = 256) -> None:
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:  # every stage uses the same small arrays
        """Read the table that plotnine ships; scale by the mean and deviation of the training split alone."""
        rows = read_rows()
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        train, val, test = order.split([int(0.8 * len(rows)), *[len(rows) // 10] * 2])
        numbers = torch.tensor([[float(row[name]) for name in NUMBERS] for row in rows])
        numbers[:, [0, 3, 4, 5]] = numbers[:, [0, 3, 4, 5]].log1p()
        price = torch.tensor([float(row["price"]) for row in rows]).log()
        features = torch.cat([standardise(numbers, train), *(encode(rows, name) for name in GRADES)], dim=1)
        table = TensorDataset(features, standardise(price, train))
        self.train, self.val, self.test = (TensorDataset(*table[split]) for split in (train, val, test))

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return shuffled diamonds to learn from."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the diamonds that choose between checkpoints."""
        return DataLoader(self.val, 1024)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return the diamonds of the final measurement."""
        return DataLoader(self.test, 1024)


def read_rows() -> list[dict[str, str]]:
    """Read the table without importing the plotting library that carries it."""
    package = find_spec("plotnine")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("The diamonds come with plotnine: pip install 'camshaft[recipes]'.")
    with (Path(package.origin).parent / "data" / "diamonds.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def standardise(values: Tensor, train: Tensor) -> Tensor:
    """Shift and scale columns so that the rows ``train`` have mean 0 and deviation 1."""
    return (values - values[train].mean(0)) / values[train].std(0)


def encode(rows: list[dict[str, str]], name: str) -> Tensor:
    """Return the grades of a column as one-hot rows, in alphabetical order."""
    grades = sorted({row[name] for row in rows})
    return one_hot(torch.tensor([grades.index(row[name]) for row in rows])).float()
