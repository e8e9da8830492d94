"""Call a function in several processes, from a script or from a notebook."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from camshaft import errors
from camshaft.errors import CamshaftError, StrategyError
from camshaft.failure import choose_first, tell
from camshaft.launch import configure, quiet, reporting
from camshaft.worker import follow_launcher, read_reports, report_error

if TYPE_CHECKING:
    from camshaft.recipe.settings import Launch

_PROBE_S = 5.0


def in_processes(function: Callable[..., Any], arguments: Sequence[Any], settings: Launch, count: int) -> Any:
    """Call an importable function in ``count`` processes and return what it gave on the main one.

    From a script the processes are spawned, and arguments travel pickled; from a notebook, whose own
    classes cannot be imported elsewhere, they are forked.

    Raises:
        CamshaftError: what the first failing rank raised, as a StrategyError with its traceback if it was
            none of ours; or the notebook has used a device or threads already; or an argument cannot be pickled.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _refuse_import()
    with reporting(settings, count) as folder, quiet():
        threads = int(os.environ["OMP_NUM_THREADS"])
        config = configure(settings, count, folder)
        config.start_method = _start_method(threads)
        # Pickled here: torch would hand tensors over in shared memory, and ranks train the same weights.
        given = arguments if config.start_method == "fork" else _pickled(arguments)
        try:
            results = elastic_launch(config, _child)(function, given, threads)
        except ChildFailedError as error:
            reports = read_reports(folder)
            dead = {rank: failure.exitcode for rank, failure in error.failures.items()}
            _, first = choose_first(reports, dead)
            if first is not None and first.error is not None:
                kind, what, why, fix = first.error
                raise getattr(errors, kind, CamshaftError)(what, why=why, fix=fix) from None
            raise StrategyError(tell(reports, dead)[0]) from None
    return pickle.loads(results[0])  # noqa: S301 - from a process of our own


def _child(function: Callable[..., Any], given: Any, threads: int) -> bytes:
    import torch

    torch.set_num_threads(threads)
    # A spawned process would start its loader workers that way too, which takes seconds each.
    multiprocessing.set_start_method(None, force=True)
    follow_launcher()
    try:
        arguments = pickle.loads(given) if isinstance(given, bytes) else given  # noqa: S301 - from our own parent
        return pickle.dumps(function(*arguments))
    except BaseException as error:
        report_error(error, 2 if isinstance(error, CamshaftError) else 1)
        raise


def _pickled(arguments: Sequence[Any]) -> bytes:
    try:
        return pickle.dumps(arguments)
    except Exception as error:
        raise StrategyError(
            f"what the run is made of cannot be sent to other processes: {error}",
            why="They are new Python processes, which get everything pickled.",
            fix="Define classes and functions at the top of a file, without lambdas, or train from a recipe.",
        ) from error


def _refuse_import() -> None:
    """Refuse to start processes while the main script is only being imported by one of them."""
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    error = StrategyError(
        "the script starts processes while it is imported.",
        why="Each new process imports it, and would start others without end.",
        fix="Put the call of camshaft.run below 'if __name__ == \"__main__\":'.",
    )
    report_error(error, 2)
    os._exit(2)


def _start_method(threads: int) -> Literal["spawn", "fork"]:
    """Return spawn for a script, fork for a notebook that has not used a device or threads yet."""
    import torch

    # Only a file can be imported by the new processes; standard input, for one, is named and is none.
    if Path(getattr(sys.modules.get("__main__"), "__file__", None) or "").is_file():
        return "spawn"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise StrategyError(
            "this notebook has used a GPU already, so processes cannot be forked from it.",
            why="A device that is open in the parent is unusable in its children.",
            fix="Restart the kernel and start the run before anything moves to a device, or put the run in a script.",
        )
    if threads > 1 and not _can_fork(threads):
        raise StrategyError(
            "this notebook has computed with several threads already, so processes cannot be forked from it.",
            why="The children would wait for threads that only the parent has.",
            fix="Restart the kernel and start the run before other tensors are computed, set OMP_NUM_THREADS=1, "
            "or put the run in a script.",
        )
    return "fork"


def _can_fork(threads: int) -> bool:
    """Try it: a child that multiplies matrices on several threads ends, or hangs for good."""
    process = multiprocessing.get_context("fork").Process(target=_multiply, args=(threads,), daemon=True)
    process.start()
    process.join(_PROBE_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode == 0


def _multiply(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    torch.ones(512, 512) @ torch.ones(512, 512)
    torch.ones(1 << 20).add(1.0)
