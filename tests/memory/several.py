"""What the processes of a test of several processes run: importable, one function a thing to compare."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from parts import Stack, fit, pairs, stack
from torch import Tensor
from torch.nn.functional import mse_loss

from camshaft import Callback
from camshaft.callbacks.precision import Precision
from camshaft.strategies.base import Strategy

STEPS, SWITCH, SIZE = 8, 5, 8


def strategy(name: str) -> Strategy:
    from camshaft.strategies.ddp import DDP
    from camshaft.strategies.fsdp import FSDP

    if name == "deepspeed":
        from camshaft.strategies.deepspeed import DeepSpeed

        return DeepSpeed(2, device="cpu")
    return DDP(device="cpu") if name == "ddp" else FSDP(wrap=["Block"], device="cpu")


class Whole(Callback):
    """Keep whole copies of the weights at the end."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_step(self, state: Any) -> None:
        if state.progress.step == STEPS:
            with state.strategy.full_parameters():
                # Whole only inside; the clone outlives it.
                self.weights = {n: _whole(p) for n, p in state.module.named_parameters()}


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def switch(name: str) -> dict[str, Tensor]:
    whole = Whole()
    fit(stack(), {"precision": Precision({0: "bf16", SWITCH: "fp32"}), "whole": whole}, strategy=strategy(name))
    return whole.weights


def by_hand_ddp() -> dict[str, Tensor]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    with _group():
        module = stack()
        return _train(DistributedDataParallel(module), module, dist.get_rank())


def by_hand_fsdp() -> dict[str, Tensor]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with _group():
        module = stack()
        mesh = init_device_mesh("cpu", (2,))
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return _train(module, module, dist.get_rank())


def overflow_on_one_rank() -> dict[str, Any]:
    """Let rank 1's loss overflow in step 3 of a run in fp16."""

    class Overflows(Stack):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            # Small enough for the first scale, so that no other step overflows.
            return loss * (float("inf") if (batch_idx, os.environ["RANK"]) == (2, "1") else 1e-3)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    found: dict[str, Any] = {}

    class Look(Callback):
        def on_epoch_end(self, state: Any) -> None:
            found.update(
                skipped=state.progress.skipped_steps, step=state.progress.step,
                scheduled=state.plans[0].scheduler.last_epoch, scale=state.strategy.scaler.scale,
            )  # fmt: skip

    torch.manual_seed(0)
    finite = {"precision": Precision("fp16"), "finite": None, "look": Look()}
    fit(Overflows(), finite, strategy=strategy("ddp"), max_steps=None, max_epochs=1)
    return found


def _train(wrapped: Any, module: Stack, rank: int) -> dict[str, Tensor]:
    optimizer = module.configure_optimizers()
    data, half = pairs(64).tensors, SIZE // 2
    for step in range(STEPS):
        start = SIZE * step + half * rank
        inputs, targets = (t[start : start + half] for t in data)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=step < SWITCH):
            loss = mse_loss(wrapped(inputs).float(), targets)
        loss.backward()
        optimizer.step()
    return {name: _whole(p) for name, p in module.named_parameters()}


class _group:  # noqa: N801 - reads as the statement it is
    """Join the other process, as a script would, and leave it."""

    def __enter__(self) -> None:
        import torch.distributed as dist

        port = int(os.environ["MASTER_PORT"]) + 1
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(os.environ["RANK"]), world_size=2
        )

    def __exit__(self, *_error: object) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
