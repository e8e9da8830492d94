"""A strategy that camshaft knows nothing of: replicas whose gradients are averaged by hand."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft import Strategy


class Averaging(Strategy):
    """Average gradients with one reduction a tensor, after the last micro-batch of a window."""

    name = "averaging"

    def launch(self) -> None:
        self.rank = self.local_rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        self.waiting = 0
        self.sync = True

    def teardown(self) -> None:
        dist.destroy_process_group()

    def micro_step(self, *, sync: bool, precision: str) -> None:
        super().micro_step(sync=sync, precision=precision)
        self.sync = sync

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        for parameter in self.parameters() if self.sync else ():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world_size

    def any(self, flag: bool) -> bool:
        return bool(self.reduce(torch.tensor(int(flag)), "max"))

    def agree(self, requests: int, *, due: bool) -> int:
        self.waiting |= requests
        if not due:
            return 0
        bits = torch.tensor([self.waiting >> place & 1 for place in range(8)])
        dist.all_reduce(bits, dist.ReduceOp.MAX)
        self.waiting = 0
        return sum(1 << place for place, bit in enumerate(bits.tolist()) if bit)

    def reduce(self, value: Tensor, op: Any = "sum") -> Tensor:
        kinds = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        result = value.clone()
        dist.all_reduce(result, kinds.get(op, dist.ReduceOp.SUM))
        return result / self.world_size if op == "mean" else result

    def gather_objects(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def broadcast_object(self, value: Any) -> Any:
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def barrier(self) -> None:
        dist.barrier()


class Forgetful(Averaging):
    """Average nothing: every rank trains a copy of its own."""

    def backward(self, loss: Tensor) -> None:
        Strategy.backward(self, loss)
