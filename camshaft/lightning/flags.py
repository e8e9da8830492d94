"""Read the flags of a ``Trainer``: every one is heeded, or refused with the way to say it here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from camshaft.lightning.errors import MisconfigurationException

_PRECISIONS = {
    "32": "32-true", "32-true": "32-true", "64": "64-true", "64-true": "64-true", "16": "16-mixed",
    "16-mixed": "16-mixed", "16-true": "16-true", "bf16": "bf16-mixed", "bf16-mixed": "bf16-mixed",
    "bf16-true": "bf16-true",
}  # fmt: skip
ENGINE_PRECISION = {"16-mixed": "fp16", "bf16-mixed": "bf16"}


@dataclass(frozen=True, slots=True)
class Devices:
    """Where to run: the engine's device, processes on this machine, and machines."""

    device: str
    processes: int
    machines: int

    @property
    def world_size(self) -> int:
        """Processes over all machines."""
        return self.processes * self.machines


def read_precision(precision: Any) -> str:
    """Return a precision by its full name.

    Raises:
        MisconfigurationException: it is none that works here.
    """
    name = "32-true" if precision is None else str(precision)
    if name in _PRECISIONS:
        return _PRECISIONS[name]
    raise MisconfigurationException(
        f"Trainer(precision={precision!r}) is unknown here.",
        why=f"There are {', '.join(dict.fromkeys(_PRECISIONS.values()))}.",
        fix="For fp8 write a recipe with precision: fp8; for nf4 and int8 one with callbacks.quantize.",
    )


def read_devices(accelerator: Any, devices: Any, num_nodes: int) -> Devices:
    """Return where a trainer runs.

    Raises:
        MisconfigurationException: the accelerator is unknown, or the devices are none.
    """
    import torch

    kind = str(accelerator).lower()
    known = {"auto": "auto", "cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps", "tpu": "tpu"}
    if kind not in known:
        raise MisconfigurationException(
            f"Trainer(accelerator={accelerator!r}) is unknown here.", fix=f"Use one of {', '.join(known)}."
        )
    device = known[kind]
    if kind == "gpu" and not torch.cuda.is_available() and torch.backends.mps.is_available():
        device = "mps"
    count, device = _count(devices, device)
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        # A launcher has started the processes: they are what there is.
        count = max(1, int(os.environ["WORLD_SIZE"]) // num_nodes)
    return Devices(device, count, num_nodes)


def _count(devices: Any, device: str) -> tuple[int, str]:
    import torch

    gpus = torch.cuda.device_count() if device in ("auto", "cuda") and torch.cuda.is_available() else 0
    if isinstance(devices, str) and devices.strip().lstrip("-").isdigit():
        devices = int(devices)
    elif isinstance(devices, str) and devices != "auto":
        devices = [int(part) for part in devices.split(",") if part.strip()]
    if isinstance(devices, (list, tuple)):
        if not devices:
            raise MisconfigurationException("Trainer(devices=[]) names no device.", fix="Name one, or use auto.")
        if len(devices) == 1 and gpus:
            return 1, f"cuda:{devices[0]}"
        if gpus and list(devices) != list(range(len(devices))):
            raise MisconfigurationException(
                f"Trainer(devices={list(devices)}) picks GPUs out of the middle.",
                why="Each process takes the GPU of its own number.",
                fix=f"Set CUDA_VISIBLE_DEVICES={','.join(map(str, devices))} and devices={len(devices)}.",
            )
        return len(devices), device
    if devices in ("auto", -1):
        return max(1, gpus), device
    if not isinstance(devices, int) or devices < 1:
        raise MisconfigurationException(
            f"Trainer(devices={devices!r}) is no number of devices.", fix="Give 1 or more, -1 for all, or auto."
        )
    return devices, device


def read_limit(name: str, value: Any) -> int | float:
    """Return a limit of batches: a count, or a fraction where it is a float.

    Raises:
        MisconfigurationException: it is negative, or a fraction above 1.
    """
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise MisconfigurationException(f"Trainer({name}={value!r}) is no number of batches.", fix="Give 0 or more.")
    if isinstance(value, float) and value > 1:
        if not value.is_integer():
            raise MisconfigurationException(
                f"Trainer({name}={value!r}) is neither a share nor a count.", fix="Give a share up to 1.0, or an int."
            )
        return int(value)
    return value


def read_seconds(name: str, value: Any) -> float | None:
    """Return a duration in seconds: "DD:HH:MM:SS", a timedelta, or a dict of its arguments.

    Raises:
        MisconfigurationException: it is none of them.
    """
    if value is None:
        return None
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, dict):
        return timedelta(**value).total_seconds()
    if isinstance(value, str):
        parts = value.strip().split(":")
        if len(parts) == 4 and all(part.isdigit() for part in parts):
            days, hours, minutes, seconds = map(int, parts)
            return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    raise MisconfigurationException(
        f"Trainer({name}={value!r}) is no duration.", fix="Write 'DD:HH:MM:SS', a timedelta or a dict such as {'hours': 2}."
    )


def refuse_unsupported(given: dict[str, Any]) -> None:
    """Refuse flags that mean something in Lightning and nothing here.

    Raises:
        MisconfigurationException: one is set.
    """
    reasons = {
        "plugins": "Precision and strategy are flags of their own, and torchrun, SLURM and accelerate launch are "
        "recognised by themselves.",
        "model_registry": "No registry is reached from here: upload what camshaft export writes.",
    }
    for name, reason in reasons.items():
        if given.get(name):
            raise MisconfigurationException(
                f"Trainer({name}=...) does nothing here.", why="It would be accepted and ignored.", fix=reason
            )


_REMOVED = {
    "gpus": "accelerator='gpu', devices=N", "tpu_cores": "accelerator='tpu', devices=N",
    "num_processes": "accelerator='cpu', devices=N", "auto_select_gpus": "devices='auto'",
    "ipus": "accelerator='auto'",
    "resume_from_checkpoint": "trainer.fit(model, ckpt_path=...)",
    "checkpoint_callback": "enable_checkpointing=...", "weights_summary": "enable_model_summary=...",
    "progress_bar_refresh_rate": "enable_progress_bar=..., and TQDMProgressBar(refresh_rate=...) in callbacks",
    "auto_lr_find": "Tuner(trainer).lr_find(model)", "auto_scale_batch_size": "Tuner(trainer).scale_batch_size(model)",
    "amp_backend": "precision='16-mixed'", "amp_level": "precision='16-mixed'",
    "replace_sampler_ddp": "use_distributed_sampler=...", "multiple_trainloader_mode": "a CombinedLoader with that mode",
    "track_grad_norm": "grad_norm in on_before_optimizer_step", "terminate_on_nan": "callbacks=[StopOnNaN]",
    "distributed_backend": "strategy=...", "weights_save_path": "ModelCheckpoint(dirpath=...)",
    "truncated_bptt_steps": "automatic_optimization = False", "move_metrics_to_cpu": "nothing: it is done where it helps",
    "flush_logs_every_n_steps": "the logger's own argument", "prepare_data_per_node": "the data module's attribute",
    "stochastic_weight_avg": "callbacks=[StochasticWeightAveraging(...)]", "log_gpu_memory": "DeviceStatsMonitor",
}  # fmt: skip


def refuse_unknown(unknown: dict[str, Any], known: list[str]) -> None:
    """Refuse a flag that does not exist, with what to write instead.

    Raises:
        MisconfigurationException: there is one.
    """
    import difflib

    for name in unknown:
        if name in _REMOVED:
            raise MisconfigurationException(
                f"Trainer({name}=...) is a flag of Lightning 1.",
                why="It is gone since Lightning 2.",
                fix=f"Write {_REMOVED[name]}.",
            )
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise MisconfigurationException(
            f"Trainer has no flag {name!r}.", why="It would be ignored.", fix=f"Did you mean {nearest[0]!r}?"
        )
