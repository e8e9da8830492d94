"""What a strategy cannot do is said before training, with what to do instead."""

import sys
from importlib.util import find_spec

import pytest
import torch
from mistakes import MISTAKES, make_all

from camshaft import StrategyError
from camshaft.strategies.deepspeed import DeepSpeed
from camshaft.strategies.megatron import Megatron
from camshaft.strategies.single import Single
from camshaft.testing import run_processes

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks():
    return run_processes(2, make_all, timeout_s=120)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_said_on_every_rank(ranks, name):
    for said in ranks:
        assert MISTAKES[name][3] in said[name]


def test_a_launcher_that_asks_for_another_strategy_is_contradicted(ranks):
    assert (
        "the launcher asks for fsdp (ACCELERATE_USE_FSDP is set), and the recipe for strategy: ddp"
        in ranks[0]["another launcher"]
    )


def test_parameters_without_a_gradient_are_named(ranks):
    said = ranks[0]["unused"]
    assert "the last training step gave no gradient to spare.weight, spare.bias" in said
    assert "find_unused_parameters: true" in said


def test_objects_of_any_size_come_back_whole_from_every_rank(ranks):
    assert [rank["gathered"] for rank in ranks] == ["whole", "whole"]


def test_a_strategy_without_a_launcher_says_how_to_start(monkeypatch):
    from camshaft.strategies.ddp import DDP

    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(StrategyError, match="no launcher started this one"):
        DDP(device="cpu").launch()


def test_deepspeed_that_is_not_installed_is_said_with_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(StrategyError, match=r"pip install 'camshaft\[deepspeed\]'"):
        DeepSpeed(2, device="cpu").launch()


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("tpu", "pip install torch_xla"),
        ("mps", "this machine has no Metal device"),
        ("cuda", "sees no CUDA device"),
        ("quantum", "device 'quantum' is unknown"),
    ],
)
def test_a_device_that_is_not_there_is_said_with_what_it_needs(device, said):
    missing = {"mps": not torch.backends.mps.is_available(), "cuda": not torch.cuda.is_available()}
    missing["tpu"] = find_spec("torch_xla") is None
    if not missing.get(device, True):
        pytest.skip(f"this machine has {device}")
    with pytest.raises(StrategyError) as caught:
        Single(device).launch()
    assert said in str(caught.value)


def test_megatron_says_what_is_missing_and_what_to_use_instead():
    with pytest.raises(StrategyError, match="strategy: fsdp or deepspeed for large modules"):
        Megatron().launch()
