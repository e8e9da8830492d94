"""Write a starter project: ``python -m camshaft.init my_project``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from camshaft.cli import guard, say
from camshaft.errors import RecipeError

_MODEL = '''"""Tell two spirals apart."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from camshaft import Module


class Classifier(Module):
    """A small network: change it, and the recipe's arguments with it."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2)
        )

    def forward(self, points: Tensor) -> Tensor:
        """Return the logits of the two classes: (batch, 2)."""
        return self.net(points)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Learn a batch."""
        points, labels = batch
        loss = cross_entropy(self(points), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Measure on points that training never saw."""
        self.measure(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Measure on the points that no decision was based on."""
        self.measure(batch, "test")

    def measure(self, batch: tuple[Tensor, Tensor], split: str) -> None:
        """Log loss and accuracy."""
        points, labels = batch
        logits = self(points)
        self.log(f"{split}/loss", cross_entropy(logits, labels))
        self.log(f"{split}/acc", (logits.argmax(1) == labels).float().mean(), prog_bar=True)
'''
_DATA = '''"""Make the points of two spirals."""

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, random_split

from camshaft import DataModule


class Spirals(DataModule):
    """Points on two spirals with a little noise: replace them by your own data."""

    def __init__(self, num_points: int = 3000, noise: float = 0.05) -> None:
        self.num_points = num_points
        self.noise = noise

    def setup(self, stage: str) -> None:
        """Draw the points, and split them by a fixed seed."""
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(self.num_points) % 2
        radius = torch.rand(self.num_points, generator=generator).sqrt()
        angle = 2.5 * torch.pi * radius + torch.pi * labels
        points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
        points += self.noise * radius[:, None] * torch.randn(points.shape, generator=generator)
        parts = [0.6, 0.2, 0.2]
        self.train, self.val, self.test = random_split(TensorDataset(points, labels), parts, generator)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return shuffled points to learn from."""
        return DataLoader(self.train, 50, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return the points that choose between checkpoints."""
        return DataLoader(self.val, 200)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return the points of the final measurement."""
        return DataLoader(self.test, 200)
'''
_RECIPE = """# yaml-language-server: $schema=recipe.schema.json
module: {_target_: model.Classifier, hidden: 64}
data: {_target_: data.Spirals}
name: NAME

optimizer: {name: adamw, lr: 0.01}
scheduler: {name: cosine, warmup_steps: 50}
max_epochs: 30

callbacks:
  clip_gradients: {max_norm: 1.0}
  ema: {decay: 0.99}
checkpoint: {monitor: val/acc, mode: max}

# Values worth trying: 'camshaft check' holds each of them against the recipe.
choices:
  optimizer.lr: [0.003, 0.01, 0.03]
"""
_TEST = '''"""The recipe trains: pytest runs this in a few seconds."""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_recipe_learns_the_spirals(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "camshaft.fit", str(HERE / "recipe.yaml"), f"runs_dir={tmp_path}", "device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (status,) = tmp_path.glob("*/*/status.json")
    assert json.loads(status.read_text())["metrics"]["test/acc"] > 0.95
'''


def main(argv: Sequence[str] | None = None) -> int:
    """Write the project, trust its folder, and say what to do next."""
    parser = argparse.ArgumentParser(
        prog="camshaft init",
        description="Write a starter project: module, data, recipe and a test, which train at once.",
    )
    parser.add_argument("folder", type=Path, help="where to write it; its name becomes the name of the runs")
    folder: Path = parser.parse_args(argv).folder
    write_project(folder)
    say(f"Wrote {folder}: model.py, data.py, recipe.yaml, test_recipe.py, recipe.schema.json.")
    say(f"Train it: camshaft fit {folder / 'recipe.yaml'}")
    say(f"Test it:  pytest {folder}")
    return 0


def write_project(folder: Path) -> None:
    """Write the files of a starter project; what is there already is not touched.

    Raises:
        RecipeError: a file of that name exists, or the folder cannot be written.
    """
    import json

    from camshaft.recipe.schema import schema
    from camshaft.recipe.trust import trust

    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in folder.resolve().name).lstrip("._-") or "project"
    files = {
        "model.py": _MODEL,
        "data.py": _DATA,
        "recipe.yaml": _RECIPE.replace("NAME", json.dumps(name)),
        "test_recipe.py": _TEST,
        "recipe.schema.json": json.dumps(schema(), indent=2) + "\n",
    }
    there = [file for file in files if (folder / file).exists()]
    if there:
        raise RecipeError(
            f"{folder} already holds {', '.join(there)}.",
            why="They would be overwritten.",
            fix="Give another folder.",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{folder} cannot be written: {error.strerror}.", fix="Give another folder.") from None
    trust(str(folder))


if __name__ == "__main__":
    sys.exit(guard(main))
