"""What the ranks of a test run: strategies that are asked for what cannot be."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from camshaft import Module, StrategyError
from camshaft.strategies.base import Strategy
from camshaft.strategies.ddp import DDP
from camshaft.strategies.deepspeed import DeepSpeed
from camshaft.strategies.fsdp import FSDP
from camshaft.strategies.tensorparallel import TensorParallel


class Net(Module):
    """Three layers; ``spare`` is never used."""

    def __init__(self, plan: dict[str, Any] | None = None, *, spare: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 1)
        if spare:
            self.spare = nn.Linear(2, 2)
        self.plan = plan
        self.automatic_optimization = True

    def training_step(self, batch: Tensor) -> Tensor:
        return self.second(self.first(batch).tanh()).square().mean()

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return self.plan or {}


def one(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(module.parameters())]


def two(module: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.first.parameters(), 0.1), torch.optim.SGD(module.second.parameters(), 0.1)]


def by_hand() -> Net:
    net = Net()
    net.automatic_optimization = False
    return net


def deepspeed(**config: Any) -> Callable[[], Strategy]:
    return lambda: DeepSpeed(config=config, device="cpu")


MISTAKES: dict[str, tuple[Callable[[], Strategy], Callable[[], Net], Any, str]] = {
    "a class that is not there": (
        lambda: FSDP(wrap=["Blokc"], device="cpu"), Net, one,
        "Net has no layer of that class.\n  Nothing would be wrapped. The classes with parameters are Linear.",
    ),
    "a size that no layer has": (
        lambda: FSDP(wrap=10**6, device="cpu"), Net, one, "The largest layer has 30.",
    ),
    "copies and shards that do not fit": (
        lambda: FSDP(dp_replicate=2, dp_shard=2, device="cpu"), Net, one,
        "dp_replicate 2 x dp_shard 2 is not the 2 processes that were started",
    ),
    "nothing to recompute": (
        lambda: FSDP(activation_checkpointing=True, device="cpu"), Net, one,
        "activation_checkpointing needs layers to recompute",
    ),
    "a precision of its own": (
        lambda: FSDP(mixed_precision={"params": "bf16"}, device="cpu"), Net, one,  # type: ignore[dict-item]
        "mixed_precision has 'params'",
    ),
    "several optimizers": (
        lambda: DeepSpeed(1, device="cpu"), Net, two,
        "configure_optimizers returned 2 optimizers, and DeepSpeed manages one",
    ),
    "optimization by hand": (
        lambda: FSDP(device="cpu"), by_hand, one, "Net optimizes by hand, and fsdp cannot reduce gradients",
    ),
    "a batch size of its own": (
        deepspeed(train_batch_size=99), Net, one,
        "the DeepSpeed config says train_batch_size: 99, and the recipe batch_size 16",
    ),
    "clipping of its own": (
        deepspeed(gradient_clipping=0.1), Net, one,
        "the DeepSpeed config says gradient_clipping: 0.1, and the recipe clips to 0.5",
    ),
    "loss scaling of its own": (deepspeed(fp16={"enabled": True}), Net, one, "the DeepSpeed config has fp16 enabled"),
    "outputs that do not divide": (
        lambda: TensorParallel(device="cpu"), lambda: Net({"second": "colwise"}), one,
        "second has 1 outputs, which 2 processes do not divide",
    ),
    "a layer that is not there": (
        lambda: TensorParallel(device="cpu"), lambda: Net({"third": "colwise"}), one,
        "tensor_parallel_plan() names 'third'",
    ),
    "a plan that splits nothing": (
        lambda: TensorParallel(device="cpu"), Net, one, "tensor_parallel_plan() split no parameter",
    ),
    "batch statistics on CPUs": (
        lambda: DDP(sync_batchnorm=True, device="cpu"), Net, one, "torch has no SyncBatchNorm on the CPU",
    ),
    "a Mac's device": (lambda: DDP(device="mps"), Net, one, "device 'mps' does not work with several processes"),
}  # fmt: skip


def make_all() -> dict[str, str]:
    """Make every mistake on this rank; return what was said."""
    said = {}
    for name, (factory, build, optimizers, _) in MISTAKES.items():
        said[name] = _said(factory, build, optimizers)
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    said["another launcher"] = _said(lambda: DDP(device="cpu"), Net, one)
    del os.environ["ACCELERATE_USE_FSDP"]
    said["unused"] = _unused()
    said["gathered"] = _gathered()
    return said


def _said(factory: Callable[[], Strategy], build: Callable[[], Net], optimizers: Any) -> str:
    strategy = None
    try:
        strategy = factory()
        strategy.recipe = {"batch_size": 16, "accumulate": 2, "max_norm": 0.5}
        strategy.launch()
        module = build()
        strategy.prepare(module, optimizers(module))
    except StrategyError as error:
        return str(error)
    finally:
        if strategy is not None:
            strategy.teardown()
    return "nothing"


def _gathered() -> str:
    """Gather objects around the size up to which one collective does."""
    strategy = DDP(device="cpu")
    strategy.launch()
    try:
        for size in (0, 1, 2000, 2040, 2050, 5000, 100_000):
            found = strategy.gather_objects({"text": "a" * (size * (1 + strategy.rank))})
            if [len(entry["text"]) for entry in found] != [size, 2 * size]:
                return f"{size} came back as {[len(entry['text']) for entry in found]}"
    finally:
        strategy.teardown()
    return "whole"


def _unused() -> str:
    """Train two steps with a layer that no step uses."""
    strategy = DDP(device="cpu")
    strategy.launch()
    try:
        module = Net(spare=True)
        strategy.prepare(module, one(module))
        for _ in range(2):
            strategy.micro_step(sync=True, precision="fp32")
            strategy.backward(strategy.run("training_step", torch.ones(2, 4), 0))
            strategy.step()
    except StrategyError as error:
        return str(error)
    finally:
        strategy.teardown()
    return "nothing"
