"""Every key of an accelerate config is mapped, named as without effect, or refused: none is silent."""

import pytest

from camshaft import RecipeError
from camshaft.launchfile import read_accelerate_config

FSDP = {"distributed_type": "FSDP", "num_processes": 8, "num_machines": 2}
DEEPSPEED = {"distributed_type": "DEEPSPEED", "num_processes": 2}


def read(tmp_path, content, said=None):
    import yaml

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return read_accelerate_config(path, said or {})


def test_processes_are_counted_per_machine(tmp_path):
    found = read(tmp_path, FSDP | {"machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29500})
    assert found.values == {
        "strategy": {"name": "fsdp"}, "launch.num_processes": 4, "launch.num_machines": 2, "launch.machine_rank": 1,
        "launch.main_process_ip": "10.0.0.1", "launch.main_process_port": 29500,
    }  # fmt: skip


def test_settings_of_fsdp_become_those_of_the_strategy(tmp_path):
    section = {
        "fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True,
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000, "fsdp_use_orig_params": True,
        "fsdp_activation_checkpointing": True,
    }  # fmt: skip
    found = read(tmp_path, FSDP | {"fsdp_config": section})
    assert found.values["strategy"] == {
        "name": "fsdp", "reshard_after_forward": False, "cpu_offload": True, "wrap": 1000,
        "activation_checkpointing": True,
    }  # fmt: skip
    assert "fsdp_version 1 runs as FSDP2" in found.notes
    assert any(note.startswith("fsdp_use_orig_params") for note in found.notes)


def test_settings_of_deepspeed_become_those_of_the_recipe(tmp_path):
    section = {
        "zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none", "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 4, "zero3_init_flag": True,
    }  # fmt: skip
    found = read(tmp_path, DEEPSPEED | {"deepspeed_config": section, "mixed_precision": "bf16"})
    assert found.values == {
        "strategy": {"name": "deepspeed", "stage": 3, "offload_optimizer": "cpu"}, "launch.num_processes": 2,
        "callbacks.clip_gradients.max_norm": 0.5, "accumulate": 4, "precision": "bf16",
    }  # fmt: skip
    assert len(found.notes) == 1


def test_copies_of_shards_are_mapped(tmp_path):
    section = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    found = read(tmp_path, FSDP | {"parallelism_config": section})
    assert found.values["strategy"] == {"name": "fsdp", "dp_replicate": 2, "dp_shard": 4}


def test_what_the_recipe_says_too_stays_as_it_is_written(tmp_path):
    found = read(tmp_path, FSDP, {"strategy": {"name": "fsdp", "wrap": ["Block"]}, "launch.num_processes": 4})
    assert found.values == {"strategy": {"name": "fsdp", "wrap": ["Block"]}, "launch.num_machines": 2}


@pytest.mark.parametrize(
    ("content", "said", "message"),
    [
        (FSDP, {"strategy": "ddp"}, "asks for strategy.name: fsdp, and the recipe ddp"),
        (FSDP, {"launch.num_processes": 2}, "asks for launch.num_processes: 4, and the recipe 2"),
        (FSDP | {"mixed_precision": "no"}, {"precision": "bf16"}, "asks for precision: fp32, and the recipe bf16"),
        ({"distributed_type": "SAGEMAKER"}, {}, "distributed_type SAGEMAKER has no strategy here"),
        ({"nonsense": 3}, {}, "has nonsense, which camshaft does not map"),
        (FSDP | {"fsdp_config": {"fsdp_nonsense": 1}}, {}, "has fsdp_config.fsdp_nonsense"),
        (FSDP | {"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}, {}, "has no equal in FSDP2"),
        (FSDP | {"parallelism_config": {"parallelism_config_cp_size": 2}}, {}, "there is no context parallelism"),
    ],
)
def test_what_contradicts_or_is_unknown_is_named(tmp_path, content, said, message):
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, content, said)
    assert message in str(caught.value)


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"none\.yaml cannot be read"):
        read_accelerate_config(tmp_path / "none.yaml", {})
