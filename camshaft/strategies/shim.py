"""Let Accelerate's sharded back ends run on CPUs, for tests and small machines."""

from __future__ import annotations

import torch


def pretend_gpu_kind(device: torch.device) -> None:
    """Tell Accelerate that CPU processes are of a kind it shards over.

    It would otherwise replace FSDP by DDP without a word, and refuse a ``ParallelismConfig``. Only the
    kind's name is checked; everything below works with gloo. Seen in accelerate 1.15; each strategy
    verifies afterwards that it got what it asked for.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if device.type != "cpu":
        return
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    PartialState._shared_state["device"] = device
