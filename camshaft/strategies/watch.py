"""End a process that makes no progress, with the stacks of all its threads."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

VARIABLE = "CAMSHAFT_HANG_TIMEOUT"
_GRACE_S = 3.0


class Watchdog:
    """Look at a counter of progress from a thread, and call ``on_stall(text, progress)`` when it stands still.

    The process then ends, after a moment in which the other ranks' watchdogs write theirs: they wait
    for this one, or this one for them.
    """

    def __init__(self, progress: Callable[[], int], *, timeout_s: float, on_stall: Callable[[str, int], None]) -> None:
        self._progress = progress
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="camshaft watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopping.set()

    def _watch(self) -> None:
        last, since = self._progress(), time.monotonic()
        while not self._stopping.wait(min(1.0, self._timeout_s / 4)):
            now = self._progress()
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > self._timeout_s:
                text = f"no progress for {self._timeout_s:g} s (launch.hang_timeout); its stacks:\n{stacks()}"
                print(f"rank {os.environ.get('RANK', '0')}: {text}", file=sys.stderr, flush=True)  # noqa: T201
                self._on_stall(text, now)
                time.sleep(_GRACE_S)
                os._exit(1)


def stacks() -> str:
    """Return the Python stack of every thread but the caller's own."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            found.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(found)
