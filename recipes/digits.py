"""Recognise handwritten digits of 8x8 pixels with a small MLP."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from camshaft import DataModule, Module

Batch = tuple[Tensor, Tensor]


class DigitsMLP(Module):
    """Two hidden layers with dropout."""

    def __init__(self, hidden: int = 128, dropout: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the ten digits for images of shape (batch, 8, 8)."""
        return self.net(images)

    def training_step(self, batch: Batch) -> Tensor:
        """Learn a batch of labelled images."""
        images, labels = batch
        loss = cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch) -> None:
        """Measure loss and accuracy on images kept out of training."""
        self.evaluate(batch, "val")

    def test_step(self, batch: Batch) -> None:
        """Measure the same on the split that no decision was based on."""
        self.evaluate(batch, "test")

    def predict_step(self, batch: Batch) -> Tensor:
        """Return the most likely digits."""
        return self(batch[0]).argmax(1)

    def evaluate(self, batch: Batch, split: str) -> None:
        """Log loss and accuracy under the name of the split."""
        images, labels = batch
        logits = self(images)
        self.log(f"{split}/loss", cross_entropy(logits, labels))
        self.log(f"{split}/acc", (logits.argmax(1) == labels).float().mean(), prog_bar=True)


class Digits(DataModule):
    """1,797 images, split by a fixed seed: 1,200 to train, 237 to validate, 360 to test."""

    def __init__(self, batch_size: int = 64) -> None:
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:  # every stage uses the same small arrays
        """Load the images that scikit-learn ships and scale their grey levels to [0, 1]."""
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32) / 16
        everything = TensorDataset(images, torch.tensor(digits.target))
        generator = torch.Generator().manual_seed(0)
        self.train, self.val, self.test = random_split(everything, [1200, 237, 360], generator)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return shuffled images to learn from."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the images that choose between checkpoints."""
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return the images of the final measurement."""
        return DataLoader(self.test, self.batch_size)

    def predict_dataloader(self) -> DataLoader[Batch]:
        """Return the test images again, to predict."""
        return self.test_dataloader()
