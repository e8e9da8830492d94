"""Train one recipe on every strategy and compare with one process: ``python benchmarks/parity.py``.

The recipe is ``recipes/chargpt.yaml``, made smaller: accumulation, clipping, a schedule, an average of the
weights, validation on the average, in float32 and in bf16. Figures are relative distances by the norm, of
the tensor that is furthest from the one of ``single``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from reference import train_in_windows
from torch import Tensor
from torch.distributed.tensor import DTensor

from camshaft.callback import Callback
from camshaft.loader import Placement, open_source
from camshaft.loggers.base import Logger
from camshaft.testing import run_processes
from camshaft.testing.drive import gathered

ROOT = Path(__file__).resolve().parents[1]
STEPS, WARMUP, LR, BATCH, CONTEXT = 20, 5, 3e-3, 32, 32
SINGLE, PRECISIONS = "single", ("fp32", "bf16")
TWO: dict[str, Any] = {
    "ddp x2": "ddp",
    "fsdp x2": {"name": "fsdp", "wrap": ["Block"]},
    "zero-0 x2": {"name": "deepspeed", "stage": 0},
    "zero-1 x2": {"name": "deepspeed", "stage": 1},
    "zero-2 x2": {"name": "deepspeed", "stage": 2},
    # Without this DeepSpeed keeps parameters as small as these whole on every rank.
    "zero-3 x2": {
        "name": "deepspeed",
        "stage": 3,
        "config": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    },
    "tp x2": "tensor_parallel",
}
FOUR: dict[str, Any] = {"hsdp 2x2": {"name": "fsdp", "wrap": ["Block"], "dp_replicate": 2, "dp_shard": 2}}


@dataclass
class Trained:
    """What a run left on one rank: whole tensors, and how many bytes this rank holds."""

    losses: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    description: str = ""
    parameter_bytes: int = 0
    state_bytes: int = 0
    average_bytes: int = 0


class Measure(Callback):
    """Take down what a run left, while its processes are still together."""

    def __init__(self) -> None:
        self.trained = Trained()

    def on_fit_end(self, state: Any) -> None:
        strategy, trained = state.strategy, self.trained
        average = state.callbacks["ema"].averages
        trained.description = strategy.describe()
        trained.parameter_bytes = _held(state.module)
        trained.state_bytes = sum(_bytes(strategy.local(t)) for *_, t in strategy.optimizer_tensors())
        trained.average_bytes = sum(_bytes(strategy.local(t)) for t in average.values())
        trained.weights = gathered(strategy, strategy.named_state())
        trained.average = gathered(strategy, average.items())


class Memory(Logger):
    """Keep the losses."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained

    def log_metrics(self, record: Any) -> None:
        if record.kind == "step":
            self.trained.losses.append(record.values["train/loss"])
        if record.kind == "validation":
            self.trained.validation.append(record.values["val/loss"])


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _held(module: torch.nn.Module) -> int:
    """Return the bytes of all parameters that lie in this process, each piece of memory once."""
    pieces: dict[int, int] = {}
    for parameter in module.parameters():
        for part in (parameter.data, getattr(parameter, "_local_tensor", None), getattr(parameter, "ds_tensor", None)):
            if part is not None and not isinstance(part, DTensor):
                storage = part.untyped_storage()
                pieces[storage.data_ptr()] = storage.nbytes()
    return sum(pieces.values())


def train(strategy: Any, precision: str, place: str) -> Trained:
    """Train the recipe on this rank."""
    from camshaft.fit import recipe_parts
    from camshaft.recipe import load
    from camshaft.session import execute

    overrides = [
        f"strategy={json.dumps(strategy)}", "device=cpu", f"+precision={precision}", f"runs_dir={place}",
        "module.width=64", "module.depth=2", f"module.context={CONTEXT}", f"data.context={CONTEXT}", "resume=never",
        f"max_steps={STEPS}", f"scheduler.warmup_steps={WARMUP}", f"batch_size={BATCH}", "log_every=1", "test=false",
        f"validate={STEPS} steps", "+callbacks.ema.decay=0.9",
    ]  # fmt: skip
    recipe = load([ROOT / "recipes" / "chargpt.yaml"], overrides)
    parts = recipe_parts(recipe)
    kept = ("seed", "precision", "finite", "clip_gradients", "ema", "lr_monitor")
    measure = Measure()
    parts.callbacks = {name: c for name, c in parts.callbacks.items() if name in kept} | {"measure": measure}
    parts.loggers = {"memory": Memory(measure.trained)}
    with contextlib.redirect_stdout(io.StringIO()):
        execute(parts)
    return measure.trained


def train_cells(cells: dict[str, Any], place: str) -> dict[tuple[str, str], Trained]:
    """Train every cell on this rank, one after another; ``single`` is trained by each rank alone.

    The cells "hand single" and "hand ddp" are the hand-written loop.
    """
    found = {}
    for precision in PRECISIONS:
        found |= by_hand(precision, place)
        for name, strategy in {SINGLE: SINGLE, **cells}.items():
            own = Path(place) / (os.environ["RANK"] if strategy == SINGLE else "all")
            found[name, precision] = train(strategy, precision, str(own))
    return found


def by_hand(precision: str, place: str) -> dict[tuple[str, str], Trained]:
    """Train the same model by hand, on one process and with DDP, and return both results."""
    chargpt = _prepare()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = chargpt.Plays(context=CONTEXT)
    data.setup("fit")
    torch.distributed.init_process_group("gloo", f"file://{place}/{precision}", rank=rank, world_size=world)
    results = {}
    for name, (own, count) in {"hand single": (0, 1), "hand ddp": (rank, world)}.items():
        torch.manual_seed(0)
        module = chargpt.CharGPT(width=64, depth=2, context=CONTEXT)
        windows = _windows(data, own, count)
        left = train_in_windows(module, windows, steps=STEPS, warmup=WARMUP, lr=LR, precision=precision, world=count)
        results[name, precision] = Trained(weights=left["weights"], average=left["average"])
    torch.distributed.destroy_process_group()
    return results


def _windows(data: Any, rank: int, world: int) -> Iterator[list[Any]]:
    """Yield the samples that the recipe's run trains on, in the same order."""
    source = open_source(
        data.train_dataloader(), Placement(rank, world, seed=0), name="train", micro_batch=BATCH // 2 // world
    )
    batches = (micro.data for micro in source.iterate(0))
    while window := list(itertools.islice(batches, 2)):
        yield window


def _prepare() -> Any:
    """Import the recipe's Python; its texts are read once for all cells."""
    os.environ["CAMSHAFT_TRUST"] = str(ROOT / "recipes")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.path.insert(0, str(ROOT / "recipes"))
    import chargpt

    if not hasattr(chargpt.encode, "cache_info"):
        plays = chargpt.read_plays()
        chargpt.read_plays = lambda: dict(plays)
        chargpt.encode = functools.cache(chargpt.encode)
    return chargpt


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the greatest relative distance of a tensor from the expected one, by norm."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    pairs = [(found[name].double(), tensor.double()) for name, tensor in expected.items()]
    return max(float((left - right).norm() / right.norm().clamp_min(1e-12)) for left, right in pairs)


def losses_apart(found: Trained, expected: Trained) -> float:
    """Return the greatest relative distance of a training or validation loss from the expected one."""
    pairs = [
        *zip(found.losses, expected.losses, strict=True),
        *zip(found.validation, expected.validation, strict=True),
    ]
    return max(abs(left - right) / abs(right) for left, right in pairs)


def launch(world: int, timeout_s: float = 240) -> list[dict[tuple[str, str], Trained]]:
    """Train all cells of a world size in one launch; return what each rank found."""
    cells = TWO if world == 2 else FOUR
    with tempfile.TemporaryDirectory() as place:
        return run_processes(world, train_cells, cells, place, timeout_s=timeout_s)


def compare(found: dict[tuple[str, str], Trained], name: str, base: str) -> list[float | None]:
    """Return how far a cell is from another, in losses, weights and averages, for each precision."""
    figures: list[float | None] = []
    for precision in PRECISIONS:
        cell, other = found[name, precision], found[base, precision]
        figures += [losses_apart(cell, other) if cell.losses and other.losses else None]
        figures += [furthest(cell.weights, other.weights), furthest(cell.average, other.average)]
    return figures


def row(name: str, figures: list[float | None]) -> str:
    """Return a line of the table."""
    return f"{name:<28}" + "".join(" " * 11 if figure is None else f"{figure:>11.2e}" for figure in figures)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"{'':<28}" + "".join(f"{precision:>33}" for precision in PRECISIONS))
    print(f"{'':<28}" + "".join(f"{column:>11}" for column in ("losses", "weights", "average") * 2))
    for world in (2, 4):
        found = launch(world)[0]
        for name in TWO if world == 2 else FOUR:
            print(row(name, compare(found, name, SINGLE)))
        print(row(f"by hand: DDP x{world} to single", compare(found, "hand ddp", "hand single")))
        print(row("single to single by hand", compare(found, SINGLE, "hand single")), flush=True)


if __name__ == "__main__":
    main()
