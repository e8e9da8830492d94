"""Keep a second run out of a directory of checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import warnings
from pathlib import Path

from camshaft.errors import CheckpointError

LOCK = ".lock"
_held: dict[str, int] = {}


class Lock:
    """Hold a directory until ``release`` or the end of the process, however it ends.

    A record lock, not ``flock``: a data loader's forked worker would inherit the latter and keep a dead
    run's directory locked.

    Raises:
        CheckpointError: another run holds it; the message names its host and process.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._key = str(self._path.resolve())
        # A process's own record locks do not exclude each other, and closing any descriptor would drop them.
        if _held.get(self._key) == os.getpid():
            raise _refused(directory, "this process")
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.pread(self._fd, 4096, 0).decode(errors="replace")
            os.close(self._fd)
            raise _refused(directory, holder or "another process") from error
        except OSError as error:
            warnings.warn(
                f"{directory} cannot be locked ({error}); nothing keeps a second run from writing there.", stacklevel=2
            )
        _held[self._key] = os.getpid()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)

    def release(self) -> None:
        """Let the next run in."""
        if _held.get(self._key) == os.getpid():
            del _held[self._key]
            os.close(self._fd)


def _refused(directory: Path, holder: str) -> CheckpointError:
    return CheckpointError(
        f"{directory} is in use by another run ({holder}).",
        why="Two runs would overwrite and delete each other's checkpoints.",
        fix="Wait for it, end it, or give this run a directory of its own.",
    )
