"""Choose the device of one of several processes."""

from __future__ import annotations

import os

import torch

from camshaft.errors import StrategyError
from camshaft.strategies.group import Launched


def choose_local_device(wanted: str, launched: Launched) -> torch.device:
    """Return this process's device: the CUDA device of its local rank, or the CPU.

    Raises:
        StrategyError: there are more processes on this machine than devices, or no such device.
    """
    if wanted in ("auto", "cpu") and os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted in ("tpu", "xla", "mps"):
        raise StrategyError(
            f"device {wanted!r} does not work with several processes here.",
            why="This strategy moves gradients with gloo or NCCL, which know CPUs and NVIDIA GPUs.",
            fix="Use strategy: single on that device, or device: cpu or cuda.",
        )
    if wanted != "cuda":
        raise StrategyError(
            f"device is {wanted!r}, and each process takes the device of its local rank.", fix="Use auto, cpu or cuda."
        )
    if not torch.cuda.is_available():
        raise StrategyError(
            f"device is 'cuda', and torch {torch.__version__} sees no CUDA device.",
            fix="Use a machine with an NVIDIA GPU and a CUDA build of torch, or device: cpu.",
        )
    count = torch.cuda.device_count()
    if launched.local_world_size > count:
        raise StrategyError(
            f"{launched.local_world_size} processes were started on a machine with {count} GPU(s).",
            why="Two processes on one GPU would deadlock in NCCL.",
            fix=f"Start at most {count} processes a machine, or use device: cpu.",
        )
    device = torch.device("cuda", launched.local_rank)
    torch.cuda.set_device(device)
    return device
