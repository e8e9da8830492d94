"""Time for which saving stops training, beside safetensors, torch.save and DCP writing the same bytes.

    python benchmarks/checkpoint.py [--mb 512] [--rounds 5] [--dir DIR]

Every save is durable: the others' files get the fsync that ours has. Rounds alternate, so that a disk that
slows down slows all of them. Bars: `camshaft` at most 1.1 of `safetensors`; `camshaft async`, stall, at most
1.2 of `copy`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from camshaft.checkpoint import Entries, Reader, Store


def sync_tree(path: Path) -> None:
    for item in [path, *path.rglob("*")] if path.is_dir() else [path]:
        fd = os.open(item, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def make_state(mb: int) -> dict[str, torch.Tensor]:
    """Return a state like a transformer's with Adam: wide matrices, and as many small vectors."""
    torch.manual_seed(0)
    side, state = 1024, {}
    for index in range(max(1, mb // 12)):
        for group in ("model/", "optimizer/0/exp_avg/", "optimizer/0/exp_avg_sq/"):
            state[f"{group}layers.{index}.weight"] = torch.randn(side, side)
            state[f"{group}layers.{index}.bias"] = torch.randn(side)
    return state


def cases(state: dict[str, torch.Tensor], root: Path, store: Store) -> dict[str, Callable[[int], float]]:
    """Return what is timed: each returns the seconds for which training would stand still."""

    def timed(act: Callable[[], None]) -> float:
        start = time.perf_counter()
        act()
        return time.perf_counter() - start

    def flat(step: int) -> None:
        save_file(state, root / f"flat-{step}.safetensors")
        sync_tree(root / f"flat-{step}.safetensors")

    def pickled(step: int) -> None:
        torch.save(state, root / f"pickle-{step}.pt")
        sync_tree(root / f"pickle-{step}.pt")

    def distributed(step: int) -> None:
        dcp.save(state, checkpoint_id=root / f"dcp-{step}", no_dist=True)
        sync_tree(root / f"dcp-{step}")

    def behind(step: int) -> float:
        stall = timed(lambda: store.save_async(Entries(tensors=dict(state)), step=step))
        store.wait()
        return stall

    copies = {name: torch.empty_like(tensor) for name, tensor in state.items()}

    def copy(step: int) -> None:
        for name, tensor in state.items():
            copies[name].copy_(tensor)

    return {
        "safetensors + fsync": lambda step: timed(lambda: flat(step)),
        "camshaft": lambda step: timed(lambda: store.save(Entries(tensors=dict(state)), step=step) and None),
        "torch.save + fsync": lambda step: timed(lambda: pickled(step)),
        "dcp.save + fsync": lambda step: timed(lambda: distributed(step)),
        "copy": lambda step: timed(lambda: copy(step)),
        "camshaft async, stall": behind,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None)
    args = parser.parse_args(argv)
    root = Path(tempfile.mkdtemp(dir=args.dir))
    state = make_state(args.mb)
    size = sum(tensor.nbytes for tensor in state.values()) / 2**20
    times: dict[str, list[float]] = {}
    try:
        with Store(root / "store") as store:
            prepared = cases(state, root, store)
            for step in range(args.rounds + 1):
                for name, run in prepared.items():
                    os.sync()
                    seconds = run(step)
                    if step:  # the first round fills caches and buffers
                        times.setdefault(name, []).append(seconds)
                store.prune(keep_last=1)
                for old in root.iterdir():
                    if old.name != "store":
                        shutil.rmtree(old) if old.is_dir() else old.unlink()
            last = store.checkpoints()[0].path
            start = time.perf_counter()
            with Reader(last, check="full"):
                checked = time.perf_counter() - start
    finally:
        shutil.rmtree(root, ignore_errors=True)
    base, copied = (statistics.median(times[name]) for name in ("safetensors + fsync", "copy"))
    print(f"{size:.0f} MiB, {len(state)} tensors, median of {args.rounds} rounds, {os.cpu_count()} cores")
    for name, values in times.items():
        median, beside = statistics.median(values), copied if "async" in name or name == "copy" else base
        print(f"{name:24} {median:7.3f} s  {size / median:7.0f} MiB/s  x {median / beside:5.2f}  min {min(values):.3f}")
    print(f"{'full check on opening':24} {checked:7.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
