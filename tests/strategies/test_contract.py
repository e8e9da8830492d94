"""Every strategy keeps the contract, one from outside the package too, and one that breaks it is found out."""

from functools import partial

import pytest
from outside import Averaging, Forgetful

from camshaft.strategies.ddp import DDP
from camshaft.strategies.deepspeed import DeepSpeed
from camshaft.strategies.fsdp import FSDP
from camshaft.strategies.single import Single
from camshaft.strategies.tensorparallel import TensorParallel
from camshaft.testing import check_strategies, check_strategy

pytestmark = pytest.mark.distributed

WRAPPED = partial(FSDP, wrap=["Linear"], device="cpu")
OF_TWO = {
    "ddp": partial(DDP, device="cpu"),
    "ddp with a static graph": partial(DDP, static_graph=True, device="cpu"),
    "fsdp": WRAPPED,
    "fsdp offloaded, recomputed, reduced once": partial(
        WRAPPED, cpu_offload=True, activation_checkpointing=True, sync_every_micro_batch=False
    ),
    "zero-0": partial(DeepSpeed, 0, device="cpu"),
    "zero-1": partial(DeepSpeed, 1, device="cpu"),
    "zero-2": partial(DeepSpeed, 2, device="cpu"),
    "zero-2 offloaded": partial(DeepSpeed, 2, offload_optimizer="cpu", device="cpu"),
    "zero-3": partial(DeepSpeed, 3, device="cpu"),
    "tensor parallel": partial(TensorParallel, device="cpu"),
}
HSDP = partial(WRAPPED, dp_replicate=2, dp_shard=2)


def test_strategies_of_two_processes_keep_the_contract_one_after_another():
    check_strategies(OF_TWO, 2, timeout_s=240)


def test_copies_of_shards_keep_the_contract():
    check_strategy(HSDP, 4)


def test_one_process_keeps_the_contract():
    check_strategy(partial(Single, "cpu"))


def test_a_strategy_from_outside_keeps_the_contract():
    check_strategy(Averaging, 2)


def test_a_strategy_that_averages_nothing_is_found_out():
    with pytest.raises(AssertionError, match="single"):
        check_strategy(Forgetful, 2)
