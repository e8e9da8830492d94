"""Compare each strategy with a hand-written loop of the same back end: ``python benchmarks/strategies.py``.

Two processes with gloo train the same blocks in turn, by hand and by camshaft, on the same batches, and end
with the same weights. Figures are of the slower rank: medians over interleaved pairs, and the ratio of the
fastest run of each, which says more on a machine that does other things too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from reference import adamw, time_steps
from torch import Tensor, nn

from camshaft import Module
from camshaft.assembly import Parts, assemble
from camshaft.data import DataModule
from camshaft.hooks import Hooks
from camshaft.loop import fit
from camshaft.recipe.settings import Settings
from camshaft.strategies.ddp import DDP
from camshaft.strategies.deepspeed import DeepSpeed
from camshaft.strategies.fsdp import FSDP
from camshaft.testing import run_processes

# An epoch is longer than a run: what is done once an epoch is not timed here.
WIDTH, DEPTH, BATCH, LR, BATCHES = 96, 3, 48, 1e-3, 250
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "ddp": ("ddp", DDP, {}),
    "fsdp": ("fsdp", FSDP, {"wrap": ["Block"]}),
    **{f"zero-{stage}": ("deepspeed", DeepSpeed, {"stage": stage}) for stage in range(4)},
}


class Block(nn.Module):
    """A residual layer of 8 * width^2 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(Module):
    """A few blocks, that both loops train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.leave = nn.Linear(WIDTH, 10)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.leave(x), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self, LR)


class Data(DataModule):
    """Batches in memory, dealt to the ranks in turn."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def train_dataloader(self) -> Any:
        return self.batches


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches in memory."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, WIDTH, generator=generator), torch.randint(10, (BATCH,), generator=generator))
        for _ in range(count)
    ]


def by_camshaft(strategy: Any, module: Net, loader: list[Any], steps: int, clock: Callable[[], float]) -> float:
    """Train with camshaft's loop on a launched strategy, and return the seconds of the loop alone."""
    settings = Settings(max_steps=steps, validate=None, checkpoint=False, log_every=50)
    parts = Parts(settings, strategy, lambda: module, lambda: Data(loader))
    assembled = assemble(parts, "fit", None)
    strategy.barrier()
    start = clock()
    fit(assembled.state, Hooks({}))
    return clock() - start


def measure(case: str, pairs: int, steps: int, clock: str) -> tuple[list[float], list[float]]:
    """Return this rank's seconds a step by hand and by camshaft, pair by pair; the first pair is dropped."""
    kind, strategy_class, options = CASES[case]
    now: Callable[[], float] = getattr(time, clock)
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # one Accelerator prepares several engines here
    with contextlib.redirect_stdout(io.StringIO()):
        strategy = strategy_class(**options, device="cpu")
        strategy.launch()
        loader = batches(BATCHES * strategy.world_size)
        own = loader[strategy.rank :: strategy.world_size]
        hand, ours = [], []
        for pair in range(pairs + 1):
            left, right = Net(), Net()
            turns = [
                lambda net=left: hand.append(
                    time_steps(kind, net, own, steps=steps, lr=LR, clock=now, stage=options.get("stage", 0))
                ),
                lambda net=right: ours.append(by_camshaft(strategy, net, loader, steps, now)),
            ]
            for turn in turns if pair % 2 else reversed(turns):
                turn()
            require_equal(left, right)
        strategy.teardown()
    return [t / steps for t in hand[1:]], [t / steps for t in ours[1:]]


def require_equal(left: nn.Module, right: nn.Module) -> None:
    """Check that both loops trained the same weights, of which this rank holds a part."""
    for a, b in zip(left.parameters(), right.parameters(), strict=True):
        one, other = (getattr(p, "_local_tensor", p.data) for p in (a, b))
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7), "the two loops trained different weights"


def run(case: str, pairs: int, steps: int, clock: str = "perf_counter") -> tuple[float, float, float, float]:
    """Return the median milliseconds a step by hand and by camshaft, their median ratio, and that of the fastest."""
    ranks = run_processes(2, measure, case, pairs, steps, clock, timeout_s=500)
    hand = [max(times) for times in zip(*(own[0] for own in ranks), strict=True)]
    ours = [max(times) for times in zip(*(own[1] for own in ranks), strict=True)]
    ratio = statistics.median(a / b for a, b in zip(ours, hand, strict=True))
    return 1e3 * statistics.median(hand), 1e3 * statistics.median(ours), ratio, min(ours) / min(hand)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--cpu", action="store_true", help="count processor time, which a busy machine changes less")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    clock = "process_time" if arguments.cpu else "perf_counter"
    print(f"{'':<10}{'by hand':>12}{'camshaft':>12}{'ratio':>8}{'fastest':>9}")
    for case in arguments.cases:
        hand, ours, ratio, fastest = run(case, arguments.pairs, arguments.steps, clock)
        print(f"{case:<10}{hand:>9.2f} ms{ours:>9.2f} ms{ratio:>8.3f}{fastest:>9.3f}", flush=True)


if __name__ == "__main__":
    main()
