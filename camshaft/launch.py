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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from camshaft.errors import StrategyError
from camshaft.schedule import seconds
from camshaft.strategies.watch import VARIABLE
from camshaft.worker import FOLDER, Report, read_reports

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

_SHUTDOWN_S = 20


class LaunchSettings(Protocol):
    """What a recipe says under ``launch``."""

    num_processes: int | None
    num_machines: int
    machine_rank: int
    main_process_ip: str | None
    main_process_port: int | None
    rdzv_backend: str
    rdzv_endpoint: str | None
    max_restarts: int
    hang_timeout: str | float | None
    requeue: bool
    threads: int | None


def is_wanted(settings: LaunchSettings, strategy: str, device: str = "auto") -> bool:
    """Say whether this process should start others: it is alone, and the recipe asks for several.

    Raises:
        StrategyError: several processes for a strategy of one, or more than there are GPUs.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return False
    count = num_processes(settings, strategy, device)
    total = count * settings.num_machines
    if strategy == "single":
        if total > 1:
            raise StrategyError(
                f"launch asks for {total} processes, and strategy single is for one.",
                why="Each would train its own copy.",
                fix="Set strategy: ddp, fsdp or deepspeed, or leave launch out.",
            )
        return False
    if total == 1 and settings.num_processes is None:
        raise StrategyError(
            f"strategy {strategy} needs several processes, and none were asked for.",
            fix="Add launch.num_processes=2 to the command, or start it with torchrun or accelerate launch.",
        )
    return True


def num_processes(settings: LaunchSettings, strategy: str, device: str = "auto") -> int:
    """Return how many processes to start on this machine: as asked, or one per visible GPU."""
    import torch

    gpus = torch.cuda.device_count() if device in ("auto", "cuda") and torch.cuda.is_available() else 0
    if settings.num_processes is None:
        return max(1, gpus) if strategy != "single" else 1
    if gpus and settings.num_processes > gpus:
        raise StrategyError(
            f"launch.num_processes is {settings.num_processes}, and this machine has {gpus} GPU(s).",
            why="Two processes on one GPU would deadlock in NCCL.",
            fix=f"Start at most {gpus}, or set device: cpu.",
        )
    return settings.num_processes


def start(module: str, argv: Sequence[str], settings: LaunchSettings, strategy: str, device: str = "auto") -> int:
    """Run ``python -m module *argv`` in every process; return the exit code of the run."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    count = num_processes(settings, strategy, device)
    with _reporting(settings, count) as folder, _quiet(), _forwarding():
        config = _config(settings, count, folder)
        try:
            elastic_launch(config, sys.executable)("-m", module, *argv)
        except ChildFailedError as error:
            codes = {failure.exitcode for failure in error.failures.values()}
            dead = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return _say_first(read_reports(folder), dead, codes)
        reports = read_reports(folder)
        code = max((report.code for report in reports.values()), default=0)
    if code == 128 + signal.SIGTERM and settings.requeue:
        requeue()
    return code


def in_processes(
    function: Callable[..., Any], arguments: Sequence[Any], settings: LaunchSettings, strategy: str
) -> Any:
    """Call an importable function in every process and return what it gave on the main one.

    From a script the processes are spawned; from a notebook, whose functions cannot be imported, forked.

    Raises:
        StrategyError: the notebook has used a device already, or a process failed.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    count = num_processes(settings, strategy)
    with _reporting(settings, count) as folder, _quiet():
        config = _config(settings, count, folder)
        config.start_method = _start_method()
        try:
            return elastic_launch(config, function)(*arguments)[0]
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise StrategyError(
                f"rank {rank} failed first, with exit code {failure.exitcode}.\n{failure.message}"
            ) from error


def requeue() -> None:
    """Ask SLURM to run this job again, when there is one."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is not None:
        # SLURM's own command, wherever it is installed, with a number that SLURM set.
        subprocess.run(["scontrol", "requeue", job], check=False)  # noqa: S603, S607


def choose_first(reports: dict[int, Report], dead: dict[int, int]) -> tuple[int, Report | None]:
    """Return the rank whose failure brought the others down, and what it reported.

    A rank that a signal killed could report nothing, and its peers only noticed. Of stalled ranks it is
    the one with the least progress, since the others wait for it. Else the one that reported first, unless
    it complains about a peer.
    """
    killed = [rank for rank, code in dead.items() if code < 0 and code != -signal.SIGTERM and rank not in reports]
    failed = [report for report in reports.values() if report.code]
    if killed:
        return min(killed), None
    stalled = [report for report in failed if report.stalled]
    if stalled:
        first = min(stalled, key=lambda report: (report.progress, report.rank))
    elif failed:
        first = min(failed, key=lambda report: (_blames_peer(report), report.at))
    else:
        return min(dead, default=0), None
    return first.rank, first


def _say_first(reports: dict[int, Report], dead: dict[int, int], codes: set[int]) -> int:
    rank, first = choose_first(reports, dead)
    if first is None:
        code = dead.get(rank, 1)
        reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        hint = " Running out of memory is the usual reason." if code == -signal.SIGKILL else ""
        _print(f"rank {rank} failed first: it ended by {reason} without a word.{hint} The other ranks were stopped.")
        return 128 - code if code < 0 else code
    if first.expected:
        alike = sum(report.text == first.text for report in reports.values())
        _print(first.text if alike == len(reports) else f"rank {rank}: {first.text}")
    else:
        _print(f"rank {rank} failed first, and the other ranks were stopped:\n{first.text}")
    return first.code or max(codes, default=1)


def _blames_peer(report: Report) -> bool:
    text = report.text
    return not report.expected and any(
        sign in text
        for sign in ("closed by peer", "Connection reset", "Broken pipe", "gloo/transport", "NCCL", "DistBackendError")
    )


def _config(settings: LaunchSettings, count: int, folder: Path) -> LaunchConfig:
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
        shutdown_timeout=_SHUTDOWN_S,
    )


def _rendezvous(settings: LaunchSettings) -> tuple[str, str, dict[str, Any]]:
    """Return torchrun's backend, endpoint and options."""
    if settings.rdzv_endpoint is not None:
        return settings.rdzv_backend, settings.rdzv_endpoint, _node(settings)
    if settings.num_machines == 1 and settings.main_process_port is None:
        return "c10d", "localhost:0", {}
    host, port = settings.main_process_ip or "127.0.0.1", settings.main_process_port or 29500
    if settings.machine_rank == 0:
        _check_free(port)
    return settings.rdzv_backend, f"{host}:{port}", _node(settings)


def _node(settings: LaunchSettings) -> dict[str, Any]:
    return {"rank": settings.machine_rank} if settings.rdzv_backend == "static" else {}


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
def _reporting(settings: LaunchSettings, count: int) -> Iterator[Path]:
    """Set what the processes find in their environment, and give this one's back afterwards."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="camshaft-") as folder:
        os.environ[FOLDER] = folder
        timeout = seconds(settings.hang_timeout)
        if timeout is not None:
            os.environ[VARIABLE] = str(timeout)
        threads = settings.threads or max(1, (os.cpu_count() or 1) // count)
        if settings.threads is not None or "OMP_NUM_THREADS" not in os.environ:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        try:
            yield Path(folder)
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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


def _start_method() -> str:
    """Return spawn for a script, fork for a notebook that has not touched a device yet."""
    import torch

    if hasattr(sys.modules.get("__main__"), "__file__"):
        return "spawn"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise StrategyError(
            "this notebook has used a GPU already, so processes cannot be forked from it.",
            why="A device that is open in the parent is unusable in its children.",
            fix="Restart the kernel and start the run before anything moves to a device, or put the run in a script.",
        )
    return "fork"


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the launching terminal is where a failure is read
