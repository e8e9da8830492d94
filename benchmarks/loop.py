"""Compare camshaft with a hand-written loop on a tiny MLP: ``python benchmarks/loop.py``.

Both run in this process, in turn, on the same batches, and end with the same weights. Figures are
ratios: medians over interleaved pairs. ``--memory`` runs 100,000 steps and prints how memory grew.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from camshaft import Module
from camshaft.assembly import Parts, assemble
from camshaft.callback import Callback
from camshaft.callbacks.clip import ClipGradients
from camshaft.callbacks.ema import EMA
from camshaft.data import DataModule
from camshaft.hooks import Hooks
from camshaft.loop import fit
from camshaft.recipe.settings import Settings
from camshaft.strategies.single import Single

WIDTH, CLASSES, BATCH = 64, 10, 64


def net() -> nn.Sequential:
    """Return the tiny MLP, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def batches(count: int = 50) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return an epoch of batches in memory."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 32, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator))
        for _ in range(count)
    ]


class Tiny(Module):
    """The MLP as a camshaft module."""

    def __init__(self, *, typical: bool, steps: int) -> None:
        super().__init__()
        self.net = net()
        self.typical = typical
        self.steps = steps

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.net(inputs), targets)
        if self.typical:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        if not self.typical:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Data(DataModule):
    """The batches as camshaft data."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader


class Bar(Callback):
    """Stand in for a progress bar that draws five times a second, as the hand-written loop does."""

    def __init__(self) -> None:
        self.drawn = 0.0

    def on_step(self, state: Any) -> None:
        if state.progress.step % 16 == 0 and time.monotonic() - self.drawn > 0.2:
            self.drawn = time.monotonic()


def hand_bare(loader: list[Any], steps: int) -> tuple[float, nn.Module]:
    """Train by hand: the loop a person writes."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    stream = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps)
    start = time.perf_counter()
    for inputs, targets in stream:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return time.perf_counter() - start, model


def hand_typical(loader: list[Any], steps: int) -> tuple[float, nn.Module]:
    """Train by hand with EMA, clipping, a schedule, the mean loss every 50 steps and a progress line."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    parameters = list(model.parameters())
    average = [p.detach().clone() for p in parameters]
    total, drawn, logged = 0.0, 0.0, []
    stream = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps)
    start = time.perf_counter()
    for step, (inputs, targets) in enumerate(stream, start=1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1 - min(0.999, (1 + step) / (10 + step)))
        total += loss.item()
        if step % 50 == 0:
            logged.append(total / 50)
            total = 0.0
        if step % 16 == 0 and time.monotonic() - drawn > 0.2:
            drawn = time.monotonic()
    return time.perf_counter() - start, model


def camshaft(
    loader: list[Any], steps: int, callbacks: dict[str, Callback], *, typical: bool
) -> tuple[float, nn.Module]:
    """Train with camshaft's loop, and return the seconds of the loop alone."""
    settings = Settings(max_steps=steps, validate=None, checkpoint=False)
    strategy = Single("cpu")
    strategy.launch()
    parts = Parts(settings, strategy, lambda: Tiny(typical=typical, steps=steps), lambda: Data(loader), callbacks)
    assembled = assemble(parts, "fit", None)
    hooks = Hooks(callbacks)
    start = time.perf_counter()
    fit(assembled.state, hooks)
    return time.perf_counter() - start, assembled.state.module.net  # type: ignore[return-value]


def ratios(
    pairs: int, left: Callable[[], tuple[float, nn.Module]], right: Callable[[], tuple[float, nn.Module]]
) -> list[float]:
    """Time both in turn, check that they trained alike, and return left over right, pair by pair."""
    result = []
    for _ in range(pairs):
        (own, one), (other, two) = left(), right()
        for a, b in zip(one.parameters(), two.parameters(), strict=True):
            assert torch.equal(a, b), "the two loops trained different weights"
        result.append(own / other)
    return result


def measure(pairs: int, steps: int) -> dict[str, float]:
    """Return the median ratio of each case."""
    loader = batches()
    cases = {
        "hand-written against itself": (lambda: hand_bare(loader, steps), lambda: hand_bare(loader, steps)),
        "bare": (lambda: camshaft(loader, steps, {}, typical=False), lambda: hand_bare(loader, steps)),
        "typical": (
            lambda: camshaft(
                loader, steps, {"clip": ClipGradients(1.0), "ema": EMA(0.999), "bar": Bar()}, typical=True
            ),
            lambda: hand_typical(loader, steps),
        ),
    }
    for left, right in cases.values():
        left(), right()  # warm
    return {name: statistics.median(ratios(pairs, left, right)) for name, (left, right) in cases.items()}


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        loader = batches()
        camshaft(loader, 2000, {}, typical=True)
        before = resident_bytes()
        camshaft(loader, 100_000, {}, typical=True)
        print(f"memory grew by {(resident_bytes() - before) / 2**20:.1f} MiB over 100,000 steps")
        return
    for name, ratio in measure(arguments.pairs, arguments.steps).items():
        print(f"{name:<30} {ratio:.3f}")


if __name__ == "__main__":
    main()
