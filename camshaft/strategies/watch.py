"""End a process that makes no progress, with the stacks of all its threads."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from camshaft.worker import report_stall

_GRACE_S = 3.0


class Watchdog:
    """Look at a counter of progress from a thread, and report a stall when it stands still.

    The process then ends, after a moment in which the other ranks' watchdogs write theirs: they wait
    for this one, or this one for them.
    """

    def __init__(self, progress: Callable[[], int], *, timeout_s: float) -> None:
        self._progress = progress
        self._timeout_s = timeout_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="camshaft watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopping.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        last, since = self._progress(), time.monotonic()
        while not self._stopping.wait(min(1.0, self._timeout_s / 4)):
            # For a process that hangs in C and never lets this thread run.
            faulthandler.dump_traceback_later(self._timeout_s + 2 * _GRACE_S, exit=True, file=2)
            now = self._progress()
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > self._timeout_s:
                rank = os.environ.get("RANK", "0")
                text = (
                    f"no progress for {self._timeout_s:g} s (launch.hang_timeout). Stacks of rank {rank}:\n{stacks()}"
                )
                report_stall(text, now, waits=waits_for_others())
                time.sleep(_GRACE_S)
                os._exit(1)


def waits_for_others() -> bool:
    """Say whether the main thread waits inside torch, for its peers, and not in code of the user's."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename


def stacks() -> str:
    """Return the Python stack of every thread but the caller's own."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            found.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(found)
