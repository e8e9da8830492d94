"""Hand-written training loops, as a careful person writes them: what camshaft is measured against.

They import nothing of camshaft, and change only for a stated reason.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

Batch = tuple[Tensor, Tensor]
Clock = Callable[[], float]


def adamw(module: nn.Module, lr: float) -> AdamW:
    """Return the optimizer that every loop here and its rival use."""
    return AdamW(module.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.1)


def train_in_windows(
    module: Any, windows: Iterable[list[Batch]], *, steps: int, warmup: int, lr: float, precision: str, world: int
) -> dict[str, dict[str, Tensor]]:
    """Train with accumulation, clipping to 1, warm-up and cosine, and an average of the weights.

    ``module.loss(batch)`` is a mean. Several processes wrap it in DDP. Returns the final weights and averages.
    """
    wrapped: Any = DistributedDataParallel(_Loss(module)) if world > 1 else _Loss(module)
    optimizer = adamw(module, lr)
    average = {name: p.detach().clone() for name, p in module.named_parameters()}
    for step, window in zip(range(steps), windows, strict=False):
        optimizer.param_groups[0]["lr"] = lr * _cosine(step, steps, warmup)
        optimizer.zero_grad()
        for index, batch in enumerate(window):
            silent = world > 1 and index < len(window) - 1
            with wrapped.no_sync() if silent else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    loss = wrapped(batch)
                (loss / len(window)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for name, p in module.named_parameters():
                average[name].lerp_(p, 1 - min(0.9, (2 + step) / (11 + step)))
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return {"weights": weights, "average": average}


def time_steps(
    kind: str, module: nn.Module, batches: list[Batch], *, steps: int, lr: float, clock: Clock, stage: int = 0
) -> float:
    """Train on batches of this rank, again and again, and return the seconds of the loop alone by ``clock``.

    ``kind`` is ddp, fsdp (every block of ``module.blocks`` and the rest) or deepspeed of that ``stage``.
    """
    stream = itertools.islice(itertools.cycle(batches), steps)
    if kind == "deepspeed":
        return _time_engine(module, stream, lr, stage, clock)
    if kind == "ddp":
        wrapped: Any = DistributedDataParallel(_Loss(module), gradient_as_bucket_view=True)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        wrapped = _Loss(module)
        for block in module.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(wrapped, mesh=mesh)
    optimizer = adamw(module, lr)
    dist.barrier()
    start = clock()
    for batch in stream:
        optimizer.zero_grad()
        loss = wrapped(batch)
        loss.backward()
        optimizer.step()
    return clock() - start


def _time_engine(module: nn.Module, stream: Iterator[Batch], lr: float, stage: int, clock: Clock) -> float:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "steps_per_print": 2**31,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # DeepSpeed clips unless told not to
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=_Loss(module), optimizer=adamw(module, lr), config=config)
    dist.barrier()
    start = clock()
    for batch in stream:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
    return clock() - start


class _Loss(nn.Module):
    """Compute the loss inside ``forward``, where wrappers look."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Batch) -> Tensor:
        return self.module.loss(batch)  # type: ignore[operator, no-any-return]


def _cosine(step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
