"""Train a small model by hand through a strategy's contract, and put its parts together again."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from camshaft.module import Module
from camshaft.strategies.base import Strategy
from camshaft.testing.drive import gathered as whole

VOCABULARY, CONTEXT, WIDTH = 67, 16, 32


class Block(nn.Module):
    """Attention and a feed-forward layer; no bias, since a key's bias has no gradient but noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


class Small(Module):
    """A character model of two blocks, with a buffer that is saved and one that is not."""

    def __init__(self, depth: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("dropped", torch.arange(3.0), persistent=False)
        self.none_on: set[tuple[int, int]] = set()
        self.rank = 0

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        text, following = batch
        loss = cross_entropy(self(text).flatten(0, 1).float(), following.flatten())
        return None if (self.rank, batch_idx) in self.none_on else loss

    def validation_step(self, batch: Any) -> Tensor:
        text, following = batch
        return cross_entropy(self(text).flatten(0, 1).float(), following.flatten())

    def tensor_parallel_plan(self) -> dict[str, str]:
        plan = {}
        for index in range(len(self.blocks)):
            plan |= {f"blocks.{index}.up": "colwise", f"blocks.{index}.down": "rowwise"}
        return plan


@dataclass
class Outcome:
    """What a run left: the loss of every step, and whole tensors on every rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    description: str = ""


def batches(step: int, micro: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Return the whole micro-batch that all ranks share, the same in every world."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    text = torch.randint(VOCABULARY, (size, CONTEXT + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def build(seed: int = 0, depth: int = 2, width: int = WIDTH) -> Small:
    torch.manual_seed(seed)
    return Small(depth, width)


def optimizer_of(module: nn.Module, lr: float = 3e-3) -> torch.optim.Optimizer:
    decayed = [p for p in module.parameters() if p.ndim > 1]
    rest = [p for p in module.parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=lr)


def train(
    strategy: Strategy,
    module: Small,
    optimizers: list[torch.optim.Optimizer],
    *,
    steps: int = 20,
    first: int = 0,
    precision: str = "fp32",
    clip: float | None = 0.5,
    data_world: int | None = None,
    average: dict[str, Tensor] | None = None,
) -> Outcome:
    """Run steps of two micro-batches with clipping, a schedule and an average of the weights."""
    outcome = Outcome()
    world = data_world or strategy.world_size
    rank = strategy.rank if data_world is None else 0
    own = dict(strategy.named_local())
    if average is None:
        average = {name: value.float().clone() for name, value in own.items()}
    for step in range(first, first + steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * 0.5 * (1 + math.cos(math.pi * step / 40))
        strategy.zero_grad()
        total = 0.0
        for micro in range(2):
            strategy.micro_step(sync=micro == 1, precision=precision)
            text, following = batches(step, micro)
            share = len(text) // world
            batch = (text[rank * share : (rank + 1) * share], following[rank * share : (rank + 1) * share])
            loss = strategy.run("training_step", strategy.to_device(batch), 2 * step + micro)
            strategy.backward((loss if loss is not None else strategy.zero_loss()) / 2)
            total += 0.0 if loss is None else float(loss.detach()) / 2
        strategy.unscale()
        if clip is not None:
            outcome.norms.append(float(strategy.clip_grad_norm(clip)))
        assert strategy.step()
        with torch.no_grad():
            torch._foreach_lerp_(
                list(average.values()), [v.float() for v in dict(strategy.named_local()).values()], 0.1
            )
        outcome.losses.append(float(strategy.reduce(torch.tensor(total, dtype=torch.float64), "mean")))
    outcome.weights = whole(strategy, strategy.named_state())
    outcome.average = whole(strategy, average.items())
    outcome.description = strategy.describe()
    return outcome


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the greatest relative distance of a tensor in ``a`` from that in ``b``, by norm."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max(float((a[n].double() - b[n].double()).norm() / (b[n].double().norm() + 1e-12)) for n in a)


@contextlib.contextmanager
def launched(strategy: Strategy) -> Any:
    strategy.launch()
    try:
        yield strategy
    finally:
        strategy.teardown()
