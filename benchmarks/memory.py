"""Measure what each memory saver saves and costs on a GPT: ``python benchmarks/memory.py``.

Each variant trains the same model on the same batches twice: once for the peak of all tensors, and once for the
time of a step and the loss. The peak is that of torch's own allocator on a GPU, and elsewhere the weights plus the
profiler's trace of the allocator (``MemTracker`` cannot follow modules with frozen parameters).
The loss is the mean of the last five of ``--steps`` steps, beside that of the plain run. ``--only`` picks variants.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is imported

import torch
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

from chargpt import CharGPT, encode, read_plays

from camshaft import Callback, State
from camshaft.callbacks.activation_checkpointing import ActivationCheckpointing
from camshaft.callbacks.lora import LoRA
from camshaft.callbacks.micro_batch import MicroBatch
from camshaft.callbacks.precision import Precision
from camshaft.callbacks.quantize import Quantize
from camshaft.testing import tiny_run

MIB = 2**20
TARGETS = ["qkv", "out", "up", "down"]
ADAPTERS = {"rank": 8, "train": ["head"]}

# name -> callbacks, and whether the optimizer is AdamW in 8 bits.
VARIANTS: dict[str, tuple[Callable[[], dict[str, Callback]], bool]] = {
    "none": (dict, False),
    "activation checkpointing": (lambda: {"a": ActivationCheckpointing("Block")}, False),
    "every other block": (lambda: {"a": ActivationCheckpointing("Block", stride=2)}, False),
    "lora": (lambda: {"l": LoRA(TARGETS, **ADAPTERS)}, False),
    "qlora (nf4)": (lambda: {"q": Quantize("blocks"), "l": LoRA(TARGETS, **ADAPTERS)}, False),
    "8-bit optimizer": (dict, True),
    "bf16": (lambda: {"p": Precision("bf16")}, False),
    "bf16-true": (lambda: {"p": Precision("bf16-true")}, False),
    "fp8 (emulated off a GPU)": (lambda: {"p": Precision({"fp8": {"emulate": not torch.cuda.is_available()}})}, False),
    "auto micro-batch": (lambda: {"m": MicroBatch()}, False),
    "lora, bf16, checkpointing": (
        lambda: {"p": Precision("bf16"), "l": LoRA(TARGETS, **ADAPTERS), "a": ActivationCheckpointing("Block")},
        False,
    ),
}


class Model(CharGPT):
    """The GPT of the recipe, with its optimizer; in the last variant but one it has room for ``room`` samples only."""

    def __init__(self, options: dict[str, int], *, eight_bit: bool, room: int | None) -> None:
        super().__init__(**options)
        # The recipe's begin at zero, which would hide a base that is wrong.
        for block in self.blocks:
            torch.nn.init.normal_(block.out.weight, std=0.02)
            torch.nn.init.normal_(block.down.weight, std=0.02)
        self.eight_bit = eight_bit
        self.room = room

    def training_step(self, batch: Any) -> torch.Tensor:
        if self.room is not None and len(batch[0]) > self.room:
            raise torch.OutOfMemoryError(f"no room for {len(batch[0])} samples: the benchmark's own limit")
        return super().training_step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.eight_bit:
            from camshaft.eightbit import AdamW8bit

            return AdamW8bit(trained, lr=1e-3)
        return torch.optim.AdamW(trained, lr=1e-3)


class Peak(Callback):
    """Find the peak of the memory of all tensors: weights, what the run allocates on top of them."""

    def __init__(self) -> None:
        self.bytes = 0
        self._profile: Any = None

    def on_fit_start(self, state: State) -> None:
        if state.strategy.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.module.state_dict().values())
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        self._profile.start()

    def on_fit_end(self, state: State) -> None:
        if self._profile is None:
            self.bytes = torch.cuda.max_memory_allocated()
            return
        self._profile.stop()
        events = self._profile.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        self.bytes += max(itertools.accumulate((size for _, size in changes), initial=0))


class Steps(Callback):
    """Time every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_step_start(self, state: State, window: list[Any]) -> None:
        self._last = self._last or time.perf_counter()

    def on_step(self, state: State) -> None:
        if state.strategy.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def passages(context: int, count: int) -> TensorDataset:
    """Return passages of one play, and the same one character further on."""
    indices = encode(read_plays()["hamlet"])[: context * count + 1]
    return TensorDataset(indices[:-1].view(-1, context), indices[1:].view(-1, context))


def run(name: str, options: dict[str, int], batch: int, steps: int, extra: Callback) -> Any:
    make, eight_bit = VARIANTS[name]
    torch.manual_seed(0)
    module = Model(options, eight_bit=eight_bit, room=batch // 4 if name == "auto micro-batch" else None)
    data = DataLoader(passages(options["context"], batch * steps), batch)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return tiny_run(
        module, data, callbacks={**make(), "extra": extra}, max_steps=steps, log_every=5, validate=None, device=device
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS))
    arguments = parser.parse_args()
    options = {"width": arguments.width, "depth": arguments.depth, "heads": 8, "context": arguments.context}
    size = sum(p.numel() for p in Model(options, eight_bit=False, room=None).parameters())
    print(f"GPT of {size / 1e6:.1f} M parameters, batch {arguments.batch} x {arguments.context} characters")
    print(f"{'variant':28} {'peak MiB':>9} {'of none':>8} {'step ms':>8} {'of none':>8} {'loss':>7} {'of none':>8}")
    plain: tuple[float, float, float] | None = None
    for name in ["none", *(n for n in arguments.only or VARIANTS if n != "none")]:
        peak, timed = Peak(), Steps()
        run(name, options, arguments.batch, 3, peak)
        result = run(name, options, arguments.batch, arguments.steps, timed)
        found = (peak.bytes / MIB, 1e3 * statistics.median(timed.seconds[2:]), result.metrics["train/loss"])
        plain = plain or found
        print(
            f"{name:28} {found[0]:9.1f} {found[0] / plain[0]:8.2f} {found[1]:8.1f} {found[1] / plain[1]:8.2f} "
            f"{found[2]:7.3f} {found[2] - plain[2]:+8.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
