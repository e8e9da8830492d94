"""Read a DeepSpeed configuration, fill its ``auto`` values in, and refuse what contradicts the recipe."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from camshaft.errors import StrategyError

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def read_config(config: str | Path | Mapping[str, Any] | None, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of its own: the file's or mapping's, with the recipe's options in it.

    Raises:
        StrategyError: the file cannot be read, or says something else than an option of the recipe.
    """
    read = _load(config)
    zero = read.setdefault("zero_optimization", {})
    stage, given = own["stage"], zero.get("stage")
    if stage is not None and given not in (None, "auto", stage):
        raise contradiction("zero_optimization.stage", given, f"stage {stage}")
    zero["stage"] = stage if stage is not None else given if isinstance(given, int) else 2
    if zero["stage"] not in (0, 1, 2, 3):
        raise StrategyError(f"ZeRO has no stage {zero['stage']}.", fix="Use 0, 1, 2 or 3.")
    _put_offload(zero, own)
    return read


def complete(
    config: Mapping[str, Any], *, world_size: int, recipe: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration to hand to DeepSpeed, and what became of each ``auto``.

    ``recipe`` may say ``batch_size`` (all ranks), ``accumulate`` and ``max_norm``. DeepSpeed itself is told that each
    backward is a step of its own: windows, clipping and schedules are the engine's.

    Raises:
        StrategyError: the configuration asks for what the recipe does otherwise.
    """
    full = copy.deepcopy(dict(config))
    filled: dict[str, Any] = {}
    accumulate = recipe.get("accumulate", 1)
    batch = recipe.get("batch_size")
    meant = {
        "train_batch_size": batch,
        "gradient_accumulation_steps": accumulate,
        "train_micro_batch_size_per_gpu": batch // (world_size * accumulate) if batch else None,
    }
    for key in _BATCH:
        value, asked = full.pop(key, None), meant[key]
        if value == "auto":
            filled[key] = asked if asked is not None else "the loader's"
        elif value is not None and asked is not None and value != asked:
            raise contradiction(key, value, f"{key.replace('train_', '')} {asked}")
    _check_clipping(full, filled, recipe)
    _check_owned(full, filled)
    _check_precision(full, filled)
    for path, section, key in list(_autos(full)):
        del section[key]
        filled[path] = "DeepSpeed's default"
    full |= {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    full.setdefault("zero_force_ds_cpu_optimizer", False)
    full.setdefault("steps_per_print", 2**31)
    return full, filled


def contradiction(key: str, value: Any, recipe: str) -> StrategyError:
    """Return the error that names a key of the configuration and what the recipe says instead."""
    return StrategyError(
        f"the DeepSpeed config says {key}: {value}, and the recipe {recipe}.",
        why="Only one of them can happen.",
        fix=f'Make them equal, or write "{key.rpartition(".")[2]}": "auto" in the config.',
    )


def _load(config: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return json.loads(json.dumps(_plain(config)))  # type: ignore[no-any-return]
    try:
        read = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StrategyError(
            f"the DeepSpeed config {config} cannot be read: {error}", fix="Give a JSON file."
        ) from error
    if not isinstance(read, dict):
        raise StrategyError(
            f"the DeepSpeed config {config} is no JSON object.", fix="Give a file as DeepSpeed takes it."
        )
    return read


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _put_offload(zero: dict[str, Any], own: Mapping[str, Any]) -> None:
    for key, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = own[key]
        given = (zero.get(key) or {}).get("device")
        if device is not None and given not in (None, "none", "auto", device):
            raise contradiction(f"zero_optimization.{key}.device", given, f"{key}: {device}")
        device = device or (given if given not in ("none", "auto") else None)
        if device is None:
            continue
        if zero["stage"] < least:
            raise StrategyError(
                f"{key} needs ZeRO stage {least} or more, and this is {zero['stage']}.",
                fix=f"Set stage: {max(least, 2)}.",
            )
        section = zero.setdefault(key, {})
        section["device"] = device
        if device == "nvme":
            section["nvme_path"] = own["nvme_path"] or section.get("nvme_path")
            if not section["nvme_path"]:
                raise StrategyError(f"{key}: nvme has no path.", fix="Set nvme_path to a directory on an NVMe disk.")


def _check_clipping(full: dict[str, Any], filled: dict[str, Any], recipe: Mapping[str, Any]) -> None:
    value, asked = full.pop("gradient_clipping", None), recipe.get("max_norm")
    if value == "auto":
        filled["gradient_clipping"] = asked if asked is not None else "off"
    elif value and value != asked:
        does = f"clips to {asked}" if asked else "does not clip"
        raise StrategyError(
            f"the DeepSpeed config says gradient_clipping: {value}, and the recipe {does}.",
            why="Clipping happens once, in the callback, the same on every strategy.",
            fix=f"Add callbacks.clip_gradients with max_norm: {value}, or take gradient_clipping out of the config.",
        )


def _check_owned(full: dict[str, Any], filled: dict[str, Any]) -> None:
    for key, owner in (("optimizer", "configure_optimizers"), ("scheduler", "configure_optimizers")):
        section = full.pop(key, None)
        if section is None:
            continue
        settled = [f"{key}.{name}" for name, value in (section.get("params") or {}).items() if value != "auto"]
        if settled:
            raise StrategyError(
                f"the DeepSpeed config sets {', '.join(settled)}, and the module's {owner} makes the {key}.",
                why="One of them would be ignored.",
                fix=f"Take {key} out of the config, or write auto there.",
            )
        filled[key] = f"the module's {owner}"


def _check_precision(full: dict[str, Any], filled: dict[str, Any]) -> None:
    for key in ("fp16", "bf16", "torch_autocast"):
        section = full.get(key)
        if isinstance(section, dict) and section.get("enabled") == "auto":
            del full[key]
            filled[f"{key}.enabled"] = "off: precision computes under autocast, parameters stay float32"
    if (full.get("fp16") or {}).get("enabled"):
        raise StrategyError(
            "the DeepSpeed config has fp16 enabled.",
            why="Its loss scaling hides inside DeepSpeed, where no callback sees a skipped step.",
            fix="Take fp16 out of the config and write precision: fp16 in the recipe.",
        )
    if (full.get("bf16") or {}).get("enabled") and full["zero_optimization"]["stage"] == 0:
        raise StrategyError(
            "the DeepSpeed config has bf16 enabled with ZeRO stage 0.",
            fix="Use stage 1 or more, or precision: bf16 without that section.",
        )


def _autos(section: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    for key, value in section.items():
        if value == "auto":
            yield f"{path}{key}", section, key
        elif isinstance(value, dict):
            yield from _autos(value, f"{path}{key}.")
