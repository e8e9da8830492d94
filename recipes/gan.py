"""Draw handwritten digits: a conditional GAN trained with two optimizers by hand."""

from typing import cast

import torch
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad, softplus
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from camshaft import Callback, DataModule, Module, State

Batch = tuple[Tensor, Tensor]


class Generator(nn.Module):
    """Draw 8x8 images, in [-1, 1], of given digits from noise."""

    def __init__(self, noise: int, hidden: int) -> None:
        super().__init__()
        self.noise = noise
        self.net = nn.Sequential(
            nn.Linear(noise + 10, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 64),
            nn.Tanh(),
        )

    def forward(self, labels: Tensor) -> Tensor:
        """Return one image for each label: (batch, 8, 8)."""
        noise = torch.randn(len(labels), self.noise, device=labels.device)
        return self.net(torch.cat([noise, one_hot(labels, 10)], dim=1)).unflatten(1, (8, 8))


class Critic(nn.Module):
    """Judge whether an image is a real example of a digit."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64 + 10, hidden),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(hidden, hidden),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(hidden, 1),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return logits, positive for real: (batch, 1)."""
        return self.net(torch.cat([images.flatten(1), one_hot(labels, 10)], dim=1))


class DigitsGAN(Module):
    """Train a generator against a critic with the non-saturating loss."""

    automatic_optimization = False

    def __init__(self, noise: int = 16, hidden: int = 256, lr: float = 5e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.generator = Generator(noise, hidden)
        self.critic = Critic(hidden)

    def configure_optimizers(self) -> list[Optimizer]:
        """Return one optimizer for the generator and a faster one for the critic."""
        return [
            Adam(self.generator.parameters(), self.lr, betas=(0.5, 0.99)),
            Adam(self.critic.parameters(), 2 * self.lr, betas=(0.5, 0.99)),
        ]

    def training_step(self, batch: Batch) -> None:
        """Improve the critic on real and drawn images, then the generator against it."""
        images, labels = batch
        generator_optimizer, critic_optimizer = self.optimizers()
        drawn = self.generator(labels)

        real_score, drawn_score = self.critic(images, labels), self.critic(drawn.detach(), labels)
        critic_loss = (softplus(-real_score) + softplus(drawn_score)).mean()
        critic_optimizer.zero_grad()
        self.manual_backward(critic_loss)
        critic_optimizer.step()

        generator_loss = softplus(-self.critic(drawn, labels)).mean()
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.log_dict({"train/critic_loss": critic_loss, "train/generator_loss": generator_loss}, prog_bar=True)

    def validation_step(self, batch: Batch) -> None:
        """Measure how real the critic finds images that it never saw, and drawn ones of the same digits."""
        images, labels = batch
        self.log("val/real_score", self.critic(images, labels).sigmoid().mean())
        self.log("val/drawn_score", self.critic(self.generator(labels), labels).sigmoid().mean())


class Digits(DataModule):
    """1,797 images in [-1, 1], split by a fixed seed: 1,437 to train, 360 to validate."""

    def __init__(self, batch_size: int = 64) -> None:
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:  # every stage uses the same small arrays
        """Keep the splits; they are also what the judge learns from."""
        self.train, self.val = load_splits()

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return shuffled images to imitate; a short last batch would make a noisy update."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return images that training never saw."""
        return DataLoader(self.val, 120)


class Judge(Callback):
    """Let a classifier that learned the real training digits read the drawn ones, and show them.

    Logs the share it recognises of each digit and of the worst one, and a grid of one row a digit.
    """

    def __init__(self, per_digit: int = 100) -> None:
        self.per_digit = per_digit
        train, _ = load_splits()
        images, labels = train[:]
        self.classifier = SVC().fit(images.flatten(1).numpy(), labels.numpy())

    def on_validation_start(self, state: State) -> None:
        """Draw and judge with the weights that are validated, so that checkpoints can monitor the result."""
        module = cast("DigitsGAN", state.module)
        labels = torch.arange(10, device=module.device).repeat_interleave(self.per_digit)
        drawn = module.generator(labels).float().cpu()
        read = torch.as_tensor(self.classifier.predict(drawn.flatten(1).numpy()))
        recognised = (read == labels.cpu()).view(10, -1).float().mean(1)
        for digit, share in enumerate(recognised.tolist()):
            state.metrics.log(f"val/recognised_{digit}", share, batch_size=1)
        state.metrics.log("val/recognised_worst", recognised.min(), batch_size=1)
        module.log_image("drawn", grid(drawn.view(10, -1, 8, 8)[:, :10]))


def load_splits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the validation images, with grey levels in [-1, 1], and their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, val = order.split([1437, 360])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])


def grid(images: Tensor, scale: int = 4) -> Tensor:
    """Put images of shape (rows, columns, height, width), in [-1, 1], side by side: (1, H, W), in [0, 1].

    Each has a dark edge, and every pixel is ``scale`` wide, so that a person sees something.
    """
    rows, columns, height, width = images.shape
    framed = pad((images + 1) / 2, (0, 1, 0, 1))
    joined = framed.transpose(1, 2).reshape(1, rows * (height + 1), columns * (width + 1))
    return joined.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
