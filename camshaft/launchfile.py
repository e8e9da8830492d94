"""Read the YAML that ``accelerate config`` writes, key by key, as the values of a recipe."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camshaft.errors import RecipeError
from camshaft.worker import is_launched

if TYPE_CHECKING:
    from camshaft.recipe import Recipe

_KINDS = {
    "NO": "single", "MULTI_CPU": "ddp", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed",
    "MEGATRON_LM": "megatron", "XLA": "single", "TPU": "single",
}  # fmt: skip
_PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
_SILENT = {"compute_environment", "debug", "main_training_function", "same_network", "downcast_bf16"}


@dataclass(slots=True)
class Adopted:
    """What a file says in a recipe's words: ``values`` by path, and ``notes`` on what has no effect here."""

    values: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def overrides_of(path: str, recipe: Recipe) -> list[str]:
    """Return what the file adds to a recipe, as overrides, and print what of it has no effect.

    ``path`` "default" is the file that ``accelerate config`` writes.

    Raises:
        RecipeError: the file cannot be read, has a key nobody knows, or one that contradicts the recipe.
    """
    adopted = read_accelerate_config(path, said_by(recipe))
    if os.environ.get("RANK", "0") == "0" and not is_launched():
        for note in adopted.notes:
            print(f"{path}: {note}.", file=sys.stderr)  # noqa: T201 - an ignored key is never silent
    return [f"{name}={json.dumps(value)}" for name, value in adopted.values.items()]


def said_by(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe and its overrides say themselves of what such a file may say, by path."""
    said: dict[str, Any] = {}
    for path in recipe.origins:
        top = path.partition(".")[0]
        if top in ("strategy", "device", "accumulate", "launch") and top in recipe.config:
            value = recipe.config[top]
            said |= {f"launch.{k}": v for k, v in value.items() if v is not None} if top == "launch" else {top: value}
    callbacks = recipe.config["callbacks"]
    for path, name, argument in (
        ("precision", "precision", "precision"),
        ("callbacks.clip_gradients.max_norm", "clip_gradients", "max_norm"),
    ):
        if argument in (callbacks.get(name) or {}):
            said[path] = callbacks[name][argument]
    return said


def default_file() -> Path:
    """Return where ``accelerate config`` writes by default."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return home / "accelerate" / "default_config.yaml"


def read_accelerate_config(path: Path | str, said: Mapping[str, Any]) -> Adopted:
    """Return a file's settings as values of a recipe, without those that ``said`` holds already, by path.

    Raises:
        RecipeError: the file cannot be read, has a key nobody knows, or one that contradicts the recipe.
    """
    import yaml

    where = default_file() if str(path) == "default" else Path(path)
    try:
        read = yaml.safe_load(where.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise RecipeError(
            f"the accelerate config {where} cannot be read: {error}", fix="Write one with accelerate config."
        ) from error
    if not isinstance(read, dict):
        raise RecipeError(f"the accelerate config {where} holds no keys.", fix="Write one with accelerate config.")
    adopted = Adopted()
    for key, value in read.items():
        if key not in _SILENT and value not in (None, {}, [], False):
            _adopt(adopted, where, str(key), value, read)
    if adopted.strategy:
        adopted.values["strategy"] = adopted.strategy
    apart = [f"{name}: {theirs}, and the recipe {own}" for name, own, theirs in _contradictions(said, adopted.values)]
    if apart:
        raise RecipeError(
            f"{where} asks for {'; for '.join(apart)}.",
            why="Only one of them can happen.",
            fix="Make them equal, or take one of them out.",
        )
    _leave_out(adopted, said)
    return adopted


def _leave_out(adopted: Adopted, said: Mapping[str, Any]) -> None:
    """Keep what the recipe says itself as it is written there."""
    own = said.get("strategy")
    if isinstance(own, Mapping) and "strategy" in adopted.values:
        adopted.values["strategy"] = {**adopted.strategy, **own}
    adopted.values = {name: v for name, v in adopted.values.items() if name == "strategy" or name not in said}


def _adopt(adopted: Adopted, where: Path, key: str, value: Any, whole: Mapping[str, Any]) -> None:
    if key in _LAUNCH:
        adopted.values[f"launch.{key}"] = value
    elif key in _SECTIONS:
        _adopt_section(adopted, where, key, value, _SECTIONS[key])
    elif key == "use_cpu":
        adopted.values |= {"device": "cpu"} if value else {}
    elif key == "distributed_type":
        if str(value) not in _KINDS:
            raise RecipeError(
                f"{where}: distributed_type {value} has no strategy here.", fix=f"It maps {', '.join(_KINDS)}."
            )
        adopted.strategy.setdefault("name", _KINDS[str(value)])
    elif key == "num_processes":
        # Accelerate counts the processes of all machines.
        adopted.values["launch.num_processes"] = int(value) // int(whole.get("num_machines") or 1)
    elif key == "mixed_precision":
        adopted.values["precision"] = _PRECISIONS.get(str(value), str(value))
    elif key in _INSTEAD or key.startswith("tpu_"):
        adopted.notes.append(f"{key} has no effect: {_INSTEAD.get(key, _PODS)}")
    else:
        raise RecipeError(
            f"{where} has {key}, which camshaft does not map.",
            why="It would be ignored.",
            fix="Take it out, or say it in the recipe.",
        )


_LAUNCH = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "max_restarts")
_PODS = "it is for Accelerate's TPU pods"
_INSTEAD = {
    "gpu_ids": "set CUDA_VISIBLE_DEVICES",
    "dynamo_config": "compile the module itself, with module.compile()",
    "fp8_config": "precision: fp8 has options of its own",
    "enable_cpu_affinity": "torch's launcher binds processes itself",
    "mpirun_config": "torch's launcher starts the processes, not mpirun",
    "commands": _PODS,
    "command_file": _PODS,
}
_Rule = Callable[[Adopted, Any], None]


def _adopt_section(
    adopted: Adopted, where: Path, section: str, values: Mapping[str, Any], rules: Mapping[str, _Rule]
) -> None:
    for key, value in values.items():
        if value in (None, "", [], {}):
            continue
        if key not in rules:
            raise RecipeError(
                f"{where} has {section}.{key}, which camshaft does not map.",
                why="It would be ignored.",
                fix="Take it out.",
            )
        rules[key](adopted, value)


def _option(name: str, convert: Callable[[Any], Any] = lambda value: value) -> _Rule:
    def rule(adopted: Adopted, value: Any) -> None:
        adopted.strategy[name] = convert(value)

    return rule


def _value(path: str, convert: Callable[[Any], Any]) -> _Rule:
    def rule(adopted: Adopted, value: Any) -> None:
        if value not in ("auto", "none"):
            adopted.values[path] = convert(value)

    return rule


def _note(key: str, reason: str) -> _Rule:
    def rule(adopted: Adopted, value: Any) -> None:
        if value is not False:
            adopted.notes.append(f"{key}: {value} has no effect: {reason}")

    return rule


def _one(key: str, reason: str) -> _Rule:
    def rule(adopted: Adopted, value: Any) -> None:
        if int(value) > 1:
            raise RecipeError(f"{key} is {value}, and {reason}.", fix="Set it to 1.")

    return rule


def _sharding(adopted: Adopted, value: Any) -> None:
    kind = str(value).upper()
    if kind in ("FULL_SHARD", "TRUE", "1"):
        adopted.strategy["reshard_after_forward"] = True
    elif kind in ("SHARD_GRAD_OP", "FALSE", "2"):
        adopted.strategy["reshard_after_forward"] = False
    else:
        raise RecipeError(
            f"fsdp_sharding_strategy {value} has no equal in FSDP2.",
            fix="Use FULL_SHARD or SHARD_GRAD_OP. For HYBRID_SHARD write strategy: {name: fsdp, dp_replicate: 2} in "
            "the recipe, for NO_SHARD strategy: ddp.",
        )


def _wrapping(adopted: Adopted, value: Any) -> None:
    if str(value) == "NO_WRAP":
        adopted.strategy["wrap"] = None
    elif str(value) not in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"):
        raise RecipeError(
            f"fsdp_auto_wrap_policy {value} is unknown.", fix="Use TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP."
        )


def _names(value: Any) -> list[str]:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)


_CHECKPOINTS = "checkpoints fit every strategy"
_FSDP: dict[str, _Rule] = {
    "fsdp_version": lambda adopted, value: (
        None if int(value) == 2 else adopted.notes.append("fsdp_version 1 runs as FSDP2")
    ),
    "fsdp_auto_wrap_policy": _wrapping,
    "fsdp_transformer_layer_cls_to_wrap": _option("wrap", _names),
    "fsdp_min_num_params": _option("wrap", int),
    "fsdp_reshard_after_forward": _sharding,
    "fsdp_sharding_strategy": _sharding,
    "fsdp_offload_params": _option("cpu_offload", bool),
    "fsdp_activation_checkpointing": _option("activation_checkpointing", bool),
    "fsdp_state_dict_type": _note("fsdp_state_dict_type", _CHECKPOINTS),
    "fsdp_use_orig_params": _note("fsdp_use_orig_params", "FSDP2 always keeps them"),
    "fsdp_cpu_ram_efficient_loading": _note("fsdp_cpu_ram_efficient_loading", "every rank builds the module"),
    "fsdp_sync_module_states": _note("fsdp_sync_module_states", "every rank builds the module from one seed"),
    "fsdp_backward_prefetch": _note("fsdp_backward_prefetch", "FSDP2 prefetches itself"),
    "fsdp_backward_prefetch_policy": _note("fsdp_backward_prefetch_policy", "FSDP2 prefetches itself"),
    "fsdp_forward_prefetch": _note("fsdp_forward_prefetch", "FSDP2 prefetches itself"),
}
_DEEPSPEED: dict[str, _Rule] = {
    "zero_stage": _option("stage", int),
    "deepspeed_config_file": _option("config", str),
    "offload_optimizer_device": lambda adopted, value: (
        None if value == "none" else adopted.strategy.update(offload_optimizer=value)
    ),
    "offload_param_device": lambda adopted, value: (
        None if value == "none" else adopted.strategy.update(offload_param=value)
    ),
    "offload_optimizer_nvme_path": _option("nvme_path"),
    "offload_param_nvme_path": _option("nvme_path"),
    "gradient_accumulation_steps": _value("accumulate", int),
    "gradient_clipping": _value("callbacks.clip_gradients.max_norm", float),
    "deepspeed_inclusion_filter": _note("deepspeed_inclusion_filter", "launch names machines and processes"),
    "deepspeed_exclusion_filter": _note("deepspeed_exclusion_filter", "launch names machines and processes"),
    "zero3_init_flag": _note("zero3_init_flag", "modules are built whole, then partitioned"),
    "zero3_save_16bit_model": _note("zero3_save_16bit_model", _CHECKPOINTS),
    "deepspeed_multinode_launcher": _note("deepspeed_multinode_launcher", "torch's launcher starts all machines"),
    "deepspeed_hostfile": _note("deepspeed_hostfile", "launch.main_process_ip names machine 0"),
    "deepspeed_moe_layer_cls_names": _note("deepspeed_moe_layer_cls_names", "mark leaf modules in the module itself"),
}


_PARALLEL: dict[str, _Rule] = {
    "parallelism_config_dp_replicate_size": _option("dp_replicate", int),
    "parallelism_config_dp_shard_size": _option("dp_shard", int),
    "parallelism_config_tp_size": _one("parallelism_config_tp_size", "strategy: tensor_parallel splits matrices"),
    "parallelism_config_cp_size": _one("parallelism_config_cp_size", "there is no context parallelism"),
    "parallelism_config_sp_size": _one("parallelism_config_sp_size", "there is no sequence parallelism"),
}
_SECTIONS = {"fsdp_config": _FSDP, "deepspeed_config": _DEEPSPEED, "parallelism_config": _PARALLEL}


def _contradictions(said: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, what the recipe says, what the file says) wherever they differ."""
    for name, value in values.items():
        if name not in said:
            continue
        own = said[name]
        if not isinstance(value, Mapping):
            if own != value:
                yield name, own, value
            continue
        parts = {"name": own} if isinstance(own, str) else own
        yield from ((f"{name}.{k}", parts[k], item) for k, item in value.items() if k in parts and parts[k] != item)
