"""Hold the strategies to their contract on CUDA devices, as many as the machine has.

Against ``single`` on the CPU: devices sum in another order, and Adam makes the most of it.
"""

from functools import partial

import pytest
import torch

from camshaft.strategies.ddp import DDP
from camshaft.strategies.deepspeed import DeepSpeed
from camshaft.strategies.fsdp import FSDP
from camshaft.strategies.single import Single
from camshaft.strategies.tensorparallel import TensorParallel
from camshaft.testing import check_strategies, check_strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = 1e-3
OF_TWO = {
    "ddp": partial(DDP, device="cuda"),
    "fsdp": partial(FSDP, wrap=["Linear"], device="cuda"),
    "zero-1": partial(DeepSpeed, 1, device="cuda"),
    "zero-2": partial(DeepSpeed, 2, device="cuda"),
    "zero-3": partial(DeepSpeed, 3, device="cuda"),
    "tensor parallel": partial(TensorParallel, device="cuda"),
}


def need(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, and this machine has {torch.cuda.device_count()}")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_gpu_keeps_the_contract(precision):
    check_strategy(partial(Single, "cuda"), precision=precision, tolerance=TOLERANCE if precision == "fp32" else 0.1)


def test_one_process_of_ddp_on_one_gpu_keeps_the_contract():
    check_strategy(partial(DDP, device="cuda"), 1, tolerance=TOLERANCE)


def test_strategies_on_two_gpus_keep_the_contract():
    need(2)
    check_strategies(OF_TWO, 2, tolerance=TOLERANCE, timeout_s=300)


def test_copies_of_shards_on_four_gpus_keep_the_contract():
    need(4)
    check_strategy(partial(FSDP, wrap=["Linear"], dp_replicate=2, device="cuda"), 4, tolerance=TOLERANCE)
