"""Declare every top-level key of a recipe: its type, its default and what it means.

The checker, the JSON schema and the documentation are generated from ``Settings``.
"""

# ruff: noqa: RUF009 - setting() returns a field, it is no default
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from camshaft.schedule import ScheduleLike


def setting(default: Any, doc: str) -> Any:
    """Return a dataclass field with its one-line documentation."""
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=default.copy, metadata={"doc": doc})
    return dataclasses.field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class Validate:
    """When to validate, and what to validate before the first step."""

    every: ScheduleLike = setting("1 epoch", "Interval: '500 steps', '1 epoch', '10 minutes'.")
    at: int | list[int] = setting((), "Steps after which to validate as well.")
    after: int | str = setting(0, "Optimizer steps before which no validation runs.")
    at_start: bool = setting(False, "Validate fully before the first step.")
    sanity_batches: int = setting(2, "Validation batches to try before the first step; their metrics are dropped.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How processes start, and on which machines."""

    num_processes: int | None = setting(None, "Processes on each machine; null takes one per visible GPU.")
    num_machines: int = setting(1, "Machines that take part.")
    machine_rank: int = setting(0, "Number of this machine, from 0.")
    main_process_ip: str | None = setting(None, "Address of machine 0.")
    main_process_port: int | None = setting(None, "Free port on machine 0.")
    rdzv_backend: str = setting("static", "Rendezvous of torchrun: static or c10d.")
    rdzv_endpoint: str | None = setting(None, "HOST:PORT of the rendezvous.")
    max_restarts: int = setting(0, "How often torchrun restarts the group after a failure.")
    hang_timeout: str | float | None = setting(
        "30 minutes", "How long a rank may wait for another before the run ends."
    )
    requeue: bool = setting(False, "Ask SLURM to run the job again after SIGTERM or SIGUSR1 stopped it.")
    threads: int | None = setting(None, "CPU threads per process; null divides the cores.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a recipe says, with its defaults."""

    module: dict[str, Any] = setting({}, "The model: {_target_: file.Class, argument: value}.")
    data: dict[str, Any] | None = setting(None, "The data module; null when the module owns its loaders.")
    seed: int = setting(0, "Seed of every random stream; shorthand for callbacks.seed.")
    strategy: str | dict[str, Any] = setting(
        "single", "Parallelism: single, ddp, fsdp, deepspeed, tensor_parallel, megatron, or a class."
    )
    device: str = setting("auto", "auto, cpu, cuda, cuda:N, mps or tpu.")
    precision: str | dict[str, Any] | None = setting(
        None, "fp32, tf32, bf16, fp16, bf16-true, fp8 or a mapping; shorthand for callbacks.precision."
    )
    batch_size: int | None = setting(None, "Samples per optimizer step over all ranks; null keeps the loader's own.")
    accumulate: int = setting(1, "Micro-batches per optimizer step.")
    optimizer: dict[str, Any] | None = setting(None, "{name: adamw, lr: 1e-3}; null calls configure_optimizers.")
    scheduler: dict[str, Any] | None = setting(None, "{name: cosine, warmup_steps: 100}; null is a constant rate.")
    max_epochs: int | None = setting(None, "Epochs to train.")
    max_steps: int | None = setting(None, "Optimizer steps to train.")
    max_time: str | float | None = setting(None, "Longest training time, such as '2 hours'.")
    validate: Validate | str | int | None = setting("1 epoch", "When to validate; null is never.")
    limit_train_batches: int | float | None = setting(None, "Batches per epoch: a number, or a share below 1.")
    limit_validation_batches: int | float | None = setting(None, "Batches per validation: a number or a share.")
    limit_test_batches: int | float | None = setting(None, "Batches per test: a number or a share.")
    limit_predict_batches: int | float | None = setting(None, "Batches per prediction: a number or a share.")
    fast_dev_run: bool | int = setting(False, "Run so many batches of everything, once, and write no checkpoint.")
    overfit_batches: int | float = setting(0, "Train on so many fixed batches again and again.")
    log_every: int = setting(50, "Optimizer steps between two records of training metrics.")
    callbacks: dict[str, dict[str, Any] | None] = setting({}, "Callbacks by name, in the order they run; null is off.")
    loggers: dict[str, dict[str, Any] | None] = setting({}, "Loggers by name; null is off.")
    checkpoint: dict[str, Any] | Literal[False] | None = setting(
        None, "Arguments of callbacks.checkpoint; false keeps no checkpoints."
    )
    resume: str = setting("auto", "auto continues the newest run of this name, never starts anew, or a path.")
    allow_changes: list[str] = setting([], "Paths of the recipe that may differ from the run that is continued.")
    test: Literal["auto"] | bool = setting("auto", "Test after fit: auto when module and data have a test split.")
    launch: Launch = setting(Launch(), "Processes and machines.")
    name: str | None = setting(None, "Name of the run; null takes the recipe's file name.")
    runs_dir: Path = setting("runs", "Directory of all runs.")
    code: str | None = setting(None, "Folder of the Python that the recipe names; null is the recipe's own.")
    plan: Literal["auto", "off"] = setting("auto", "Whether to estimate memory before training.")
    choices: dict[str, list[Any]] = setting({}, "Free choices: path of a value and the values worth trying.")


RECORDS: dict[str, type[Any]] = {"Settings": Settings, "Validate": Validate, "Launch": Launch}


def fields(record: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a record by name."""
    return {field.name: field for field in dataclasses.fields(record)}
