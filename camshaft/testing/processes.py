"""Run a function in several processes that can talk to each other, and never wait for ever."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

_GRACE_S = 2.0


class _Remote(Exception):  # noqa: N818 - it is shown as the cause of the real error
    """Show the traceback that a process printed."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run_processes(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
    """Call ``fn(*args)`` in ``n`` new processes and return what each returned, in the order of ranks.

    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and a free MASTER_PORT are set, as torchrun would, so that
    a process group or a strategy can start; each process has one thread. ``fn`` is importable.

    Raises:
        Exception: what the first failing rank raised, with its rank and traceback as the cause.
        TimeoutError: not all were done after ``timeout_s``; all are ended.
    """
    context = multiprocessing.get_context("spawn")
    payload, port = pickle.dumps((fn, args)), _free_port()
    pipes, processes = [], []
    try:
        for rank in range(n):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(rank, n, port, payload, sending), daemon=False)
            process.start()
            sending.close()
            pipes.append(receiving)
            processes.append(process)
        return _collect(pipes, time.monotonic() + timeout_s, timeout_s)
    finally:
        _end(processes)
        for pipe in pipes:
            pipe.close()


def _collect(pipes: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(open_pipes.values())} are not done after {timeout_s:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                outcome, value, trace = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from a process of our own
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without a result, as after a signal or os._exit") from None
            if outcome == "raised":
                raise value from _Remote(f"rank {rank} of {len(pipes)} raised first:\n{trace}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _child(rank: int, n: int, port: int, payload: bytes, sending: Connection) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n), OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    # A spawned process would start its loader workers that way too, which takes seconds each.
    multiprocessing.set_start_method(None, force=True)
    import torch

    torch.set_num_threads(1)
    try:
        fn, args = pickle.loads(payload)  # noqa: S301 - from the process that started this one
        message = pickle.dumps(("returned", fn(*args), ""))
    except BaseException as error:  # noqa: BLE001 - raised again by the process that waits for this one
        message = _failure(error)
    sending.send_bytes(message)
    sending.close()


def _failure(error: BaseException) -> bytes:
    trace = "".join(traceback.format_exception(error))
    try:
        message = pickle.dumps(("raised", error, trace))
        pickle.loads(message)  # noqa: S301 - some exceptions can be written and not read
    except Exception:  # noqa: BLE001 - any such exception travels as text
        return pickle.dumps(("raised", RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return message


def _end(processes: list[SpawnProcess]) -> None:
    """End every process by its id: kindly, then at once."""
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
        process.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
