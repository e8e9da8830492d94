"""Start the other processes of a script by running the script again, and end them with this one."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from camshaft.errors import StrategyError

if TYPE_CHECKING:
    from camshaft.lightning.flags import Devices

_POLL_S = 0.5
_GRACE_S = 10.0


def start_others(devices: Devices) -> None:
    """Run this script once more for every other process of the machine; this one becomes rank 0.

    Does nothing where a launcher (torchrun, accelerate launch, SLURM) or this function did it already.

    Raises:
        StrategyError: this process runs no script, or there are several machines and no launcher.
    """
    if devices.world_size == 1 or ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        return
    if devices.machines > 1:
        raise StrategyError(
            f"Trainer(num_nodes={devices.machines}) needs a launcher on every machine.",
            why="This process can start others on its own machine only.",
            fix="Start the script with torchrun, accelerate launch or srun.",
        )
    command = [sys.executable, *sys.orig_argv[1:]]
    if sys.orig_argv[1:2] in ([], ["-c"], ["-"]) or hasattr(sys, "ps1"):
        raise StrategyError(
            f"Trainer(devices={devices.processes}) was asked for where no script runs.",
            why="The other processes run the same script, and there is none to run.",
            fix="Write it to a file, or use camshaft.run(..., num_processes=2) from a notebook.",
        )
    environment = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(devices.processes),
        "LOCAL_WORLD_SIZE": str(devices.processes), "CAMSHAFT_SCRIPT_RANKS": "1",
    }  # fmt: skip
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // devices.processes))
    children = []
    for rank in range(1, devices.processes):
        own = {**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        children.append(subprocess.Popen(command, env=own))  # noqa: S603 - the command that runs this process
    os.environ.update(environment, RANK="0", LOCAL_RANK="0")
    atexit.register(_end, children)
    threading.Thread(target=_watch, args=(children,), daemon=True).start()


def _watch(children: list[subprocess.Popen[bytes]]) -> None:
    """End this process when another one failed: what it waits for will never come."""
    while True:
        time.sleep(_POLL_S)
        failed = [child for child in children if child.poll() not in (None, 0)]
        if failed:
            print(  # noqa: T201 - nobody else says why the run ends
                f"Process {failed[0].pid} of this run ended with code {failed[0].returncode}; its error is above.",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            _end(children)
            os._exit(1)
        if all(child.poll() == 0 for child in children):
            return


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    """Give the other processes time to end by themselves, then end them."""
    patience = time.monotonic() + _GRACE_S
    for child in children:
        try:
            child.wait(max(0.1, patience - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
