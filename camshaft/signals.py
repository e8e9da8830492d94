"""Turn signals into requests: a handler only sets a flag, and the loop acts at its next boundary."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from camshaft.state import State

EXIT_CODES = {"finished": 0, "stopped": 0, "failed": 1, "interrupted": 130, "terminated": 143}


@contextmanager
def heeding(state: State) -> Iterator[None]:
    """Heed signals inside the context, and give the old handlers back after it.

    SIGINT finishes the step, saves and stops the run as "interrupted"; a second one stops at once.
    SIGTERM and SIGUSR1 do the same as "terminated". Outside the main thread nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if state.signal == "interrupted":
            raise KeyboardInterrupt
        _ask(state, "interrupted", "Ctrl-C")
        print("\nFinishing this step, then saving. Ctrl-C again stops at once.", file=sys.stderr, flush=True)  # noqa: T201

    def terminate(number: int, frame: FrameType | None) -> None:
        _ask(state, "terminated", signal.Signals(number).name)

    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {signal.SIGINT: interrupt, signal.SIGTERM: terminate}
    if hasattr(signal, "SIGUSR1"):
        handlers[signal.SIGUSR1] = terminate
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _ask(state: State, status: str, name: str) -> None:
    state.signal = status
    state.control.stop(f"{name} was received", urgent=True)
