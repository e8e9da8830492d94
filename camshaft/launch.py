"""Start the processes of a run through torch's elastic launcher, and say once how they ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camshaft.errors import StrategyError
from camshaft.failure import say_first
from camshaft.recipe.registry import STRATEGIES
from camshaft.terminal import say
from camshaft.worker import FOLDER, is_launched, read_reports

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

    from camshaft.recipe.settings import Launch, Settings

# How long ranks whose run has failed may take to end before they are killed.
_SHUTDOWN_S = 10
# How long SLURM may take to answer.
_SLURM_S = 60
# Strategies for which no process is started: megatron refuses to run, and says why.
_ALONE = ("single", "megatron")


def started(module: str, argv: Sequence[str], settings: Settings, strategy: Any) -> int | None:
    """Run ``python -m module *argv`` in the processes that a recipe asks for, and return their exit code.

    Returns None when this process is one of them, or all there is to be: it then runs itself.

    Raises:
        StrategyError: the recipe asks for several processes of a strategy for one, for one of a strategy for
            several, or for more than there are GPUs.
    """
    name, launch = name_of(strategy), settings.launch
    _require_same_precision(settings, strategy)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _require_several(name, int(os.environ["WORLD_SIZE"]))
        return None
    count = choose_count(launch, name, settings.device)
    is_alone = count * launch.num_machines == 1 and launch.num_processes is None
    return None if is_alone or name in _ALONE else start(module, argv, launch, count)


def choose_count(launch: Launch, strategy: str, device: str) -> int:
    """Return how many processes this machine has: as asked, or one per visible GPU.

    Raises:
        StrategyError: as ``started`` says.
    """
    count = num_processes(launch, strategy, device)
    total = count * launch.num_machines
    _require_several(strategy, total)
    if total == 1 and launch.num_processes is None and strategy in STRATEGIES and strategy not in _ALONE:
        raise StrategyError(
            f"strategy {strategy} needs several processes, and none were asked for.",
            why="Alone this one would train on one device.",
            fix="Add launch.num_processes=2 to the command, or start it with torchrun or accelerate launch.",
        )
    return count


def _require_several(strategy: str, total: int) -> None:
    if strategy == "single" and total > 1:
        raise StrategyError(
            f"{total} processes were asked for, and strategy single is for one.",
            why="Each would train its own copy.",
            fix="Set strategy: ddp, fsdp or deepspeed, or start one process.",
        )


def _require_same_precision(settings: Settings, strategy: Any) -> None:
    """Refuse a precision that accelerate launch asks for and the recipe does not."""
    asked = {"no": "fp32"}.get(given := os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), given)
    said: Any = settings.precision
    said = said.get("precision", "fp32") if isinstance(said, dict) else said or "fp32"
    policy = strategy.get("mixed_precision") if isinstance(strategy, dict) else None
    if asked not in ("fp32", said) and not policy:
        raise StrategyError(
            f"accelerate launch asks for mixed precision {given}, and the recipe for {said}.",
            why="Only one of them can happen.",
            fix=f"Write precision: {asked} in the recipe, or launch with --mixed_precision no.",
        )


def name_of(strategy: Any) -> str:
    """Return the name of a recipe's strategy: a built-in's, or the class of a user's own."""
    return strategy if isinstance(strategy, str) else str(strategy.get("_target_") or strategy.get("name", "single"))


def num_processes(settings: Launch, strategy: str, device: str) -> int:
    """Return how many processes to start on this machine: as asked, or one per visible GPU."""
    import torch

    gpus = torch.cuda.device_count() if device in ("auto", "cuda") and torch.cuda.is_available() else 0
    if settings.num_processes is None:
        return max(1, gpus) if strategy in STRATEGIES and strategy not in _ALONE else 1
    if gpus and settings.num_processes > gpus:
        raise StrategyError(
            f"launch.num_processes is {settings.num_processes}, and this machine has {gpus} GPU(s).",
            why="Two processes on one GPU would deadlock in NCCL.",
            fix=f"Start at most {gpus}, or set device: cpu.",
        )
    return settings.num_processes


def start(module: str, argv: Sequence[str], settings: Launch, count: int) -> int:
    """Run ``python -m module *argv`` in ``count`` processes; return the exit code of the run."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with reporting(settings, count) as folder, quiet(), _forwarding():
        config = configure(settings, count, folder)
        try:
            elastic_launch(config, sys.executable)("-m", module, *argv)
        except ChildFailedError as error:
            return say_first(read_reports(folder), {r: f.exitcode for r, f in error.failures.items()})
        return max((report.code for report in read_reports(folder).values()), default=0)


def requeue(code: int, settings: Launch) -> None:
    """Ask SLURM to run this job again, if the recipe wants that and the run was asked to stop before its end.

    Called after a run, of which ``code`` is the end: one process asks, on the first machine. What keeps SLURM
    from being asked is said and fails nothing, for the checkpoint is there and ``resume: auto`` continues it.
    """
    if not settings.requeue or code != 128 + signal.SIGTERM or not _speaks_for_all(settings):
        return
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        say("Not requeued: launch.requeue is true, but SLURM_JOB_ID is not set, so this is no job of SLURM.")
        return
    by_hand = f"Ask for it from a login node: scontrol requeue {job}"
    try:
        # SLURM's own command, wherever it is installed, with a number that SLURM set.
        answer = subprocess.run(["scontrol", "requeue", job], check=False, timeout=_SLURM_S)  # noqa: S603, S607
    except FileNotFoundError:
        say(f"Not requeued: there is no scontrol on the PATH of this machine. {by_hand}")
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"Not requeued: {error}. {by_hand}")
    else:
        failed = f"Not requeued: scontrol ended with exit code {answer.returncode}. {by_hand}"
        say(failed if answer.returncode else f"Asked SLURM to run job {job} again.")


def _speaks_for_all(settings: Launch) -> bool:
    """Say whether this process was started by hand on the first machine, or is rank 0 of another launcher's."""
    rank = os.environ.get("RANK")
    return settings.machine_rank == 0 if rank is None else rank == "0" and not is_launched()


def configure(settings: Launch, count: int, folder: Path) -> LaunchConfig:
    """Say in torch's words how many processes start, and where they meet.

    Raises:
        StrategyError: the port is in use.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    backend, endpoint, options = _rendezvous(settings)
    return LaunchConfig(
        min_nodes=settings.num_machines,
        max_nodes=settings.num_machines,
        nproc_per_node=count,
        run_id=os.environ.get("SLURM_JOB_ID", str(uuid.uuid4()) if settings.num_machines == 1 else "camshaft"),
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs=options,
        max_restarts=settings.max_restarts,
        start_method="spawn",
        local_addr="127.0.0.1" if settings.num_machines == 1 else None,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
        signals_to_handle="SIGHUP,SIGQUIT",
    )


def _rendezvous(settings: Launch) -> tuple[str, str, dict[str, Any]]:
    """Return torchrun's backend, endpoint and options."""
    # With the static one a machine would not learn that another has to start again.
    backend = "c10d" if settings.max_restarts and settings.rdzv_backend == "static" else settings.rdzv_backend
    options = {"rank": settings.machine_rank} if backend == "static" else {}
    if settings.rdzv_endpoint is not None:
        return backend, settings.rdzv_endpoint, options
    if settings.num_machines == 1 and settings.main_process_port is None:
        return "c10d", "localhost:0", {}
    host, port = settings.main_process_ip or "127.0.0.1", settings.main_process_port or 29500
    if settings.machine_rank == 0:
        _check_free(port)
    if backend == "c10d":
        options = {"is_host": settings.machine_rank == 0}
    return backend, f"{host}:{port}", options


def _check_free(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise StrategyError(
                f"port {port} of this machine is in use ({error.strerror}).",
                why="The processes meet there.",
                fix="Give another launch.main_process_port, or leave it out on one machine: a free one is then taken.",
            ) from error


@contextlib.contextmanager
def reporting(settings: Launch, count: int) -> Iterator[Path]:
    """Set what the processes find in their environment, and give this one's back afterwards."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="camshaft-") as folder:
        os.environ[FOLDER] = folder
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_S))
        threads = settings.threads or max(1, (os.cpu_count() or 1) // count)
        if settings.threads is not None or "OMP_NUM_THREADS" not in os.environ:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        try:
            yield Path(folder)
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the launcher's own log of a failure off the terminal: what matters is printed here."""
    loggers = [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if name.startswith("torch.distributed.elastic")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _forwarding() -> Iterator[None]:
    """Pass requests to stop on to the processes, which save before they end."""
    import psutil

    def forward(number: int, _frame: Any) -> None:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    handlers = dict.fromkeys((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), forward)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
