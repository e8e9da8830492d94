"""A DeepSpeed configuration is filled in from the recipe, and contradicts it nowhere."""

import json

import pytest

from camshaft import StrategyError
from camshaft.strategies.deepspeed import DeepSpeed
from camshaft.strategies.dsconfig import complete, read_config

NOTHING = {"stage": None, "offload_optimizer": None, "offload_param": None, "nvme_path": None}
RECIPE = {"batch_size": 32, "accumulate": 4, "max_norm": 1.0}


def test_auto_values_are_filled_from_the_recipe_and_reported():
    given = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "bf16": {"enabled": "auto"},
    }  # fmt: skip
    full, filled = complete(read_config(given, NOTHING), world_size=2, recipe=RECIPE)
    assert filled["train_batch_size"] == 32
    assert filled["train_micro_batch_size_per_gpu"] == 4
    assert filled["gradient_accumulation_steps"] == 4
    assert filled["gradient_clipping"] == 1.0
    assert filled["optimizer"] == "the module's configure_optimizers"
    assert "auto" not in json.dumps(full)
    # Windows and clipping are the engine's: DeepSpeed sees steps of one micro-batch.
    assert full["gradient_accumulation_steps"] == 1
    assert full["gradient_clipping"] == 0.0


def test_a_file_is_read_and_a_wrong_one_is_named(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 3}}')
    assert DeepSpeed(config=path).stage == 3
    path.write_text("{")
    with pytest.raises(StrategyError, match=r"ds\.json cannot be read"):
        DeepSpeed(config=path)


@pytest.mark.parametrize(
    ("config", "own", "said"),
    [
        ({"zero_optimization": {"stage": 1}}, {"stage": 2}, "zero_optimization.stage: 1, and the recipe stage 2"),
        ({}, {"stage": 4}, "ZeRO has no stage 4"),
        ({}, {"stage": 2, "offload_param": "cpu"}, "offload_param needs ZeRO stage 3"),
        ({}, {"stage": 3, "offload_param": "nvme"}, "offload_param: nvme has no path"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            {"offload_optimizer": "cpu"},
            "offload_optimizer.device: nvme, and the recipe offload_optimizer: cpu",
        ),
    ],
)
def test_a_contradiction_is_named_when_the_strategy_is_built(config, own, said):
    with pytest.raises(StrategyError) as caught:
        read_config(config, NOTHING | own)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu: 8, and the recipe"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps: 2, and the recipe"),
        ({"scheduler": {"params": {"warmup_num_steps": 5}}}, "sets scheduler.warmup_num_steps"),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}, "bf16 enabled with ZeRO stage 0"),
    ],
)
def test_what_the_recipe_does_otherwise_is_refused(config, said):
    with pytest.raises(StrategyError) as caught:
        complete(read_config(config, NOTHING), world_size=2, recipe=RECIPE)
    assert said in str(caught.value)
