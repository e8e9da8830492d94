"""Report how one of several launched processes ended, so that its launcher can say it once."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from camshaft.errors import CamshaftError

FOLDER = "CAMSHAFT_REPORTS"
STOPPED = (130, 143)
_FILE = "TORCHELASTIC_ERROR_FILE"
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Report:
    """How a process ended.

    ``text`` is what to print: an error's three sentences, or a traceback. ``expected`` errors are the
    user's to read without one, and ``error`` holds their class and parts. Stalled ranks are told apart by
    ``waits``, whether the rank waits for others, and ``progress``.
    """

    rank: int
    code: int
    text: str
    expected: bool = False
    error: list[str] | None = None
    stalled: bool = False
    waits: bool = False
    progress: int = 0
    at: float = 0.0


def is_launched() -> bool:
    """Say whether a launcher of this project started this process, and will print what it reports."""
    return FOLDER in os.environ


def was_restarted() -> bool:
    """Say whether an elastic launcher started this process in place of one that failed."""
    return _attempt() > 0


def follow_launcher() -> None:
    """Begin as one of the processes of a launcher of ours: say so, and end when it is killed (on Linux)."""
    if not is_launched() or "RANK" not in os.environ:
        return
    (Path(os.environ[FOLDER]) / f"{_attempt():03d}-began").touch()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def report_error(error: BaseException, code: int) -> bool:
    """Hand an error to the launcher; say whether somebody else prints it.

    That is a launcher of ours. Under another elastic one (torchrun, accelerate) its own error file is
    written, so that its summary names the traceback, and of ranks with the same error one prints it.
    """
    trace = "".join(traceback.format_exception(error))
    parts = [type(error).__name__, error.what, error.why, error.fix] if isinstance(error, CamshaftError) else None
    text = f"{type(error).__name__}: {error}" if parts else trace.rstrip()
    _write_elastic(type(error).__name__, str(error), text)
    report = Report(_rank(), code, text, expected=bool(parts), error=parts, at=time.time())
    return _write(report) or _is_said(text)


def report_exit(code: int) -> bool:
    """Tell the launcher that this process ends by itself, without an error; say whether one of ours was told."""
    return code not in (0, *STOPPED) and _write(Report(_rank(), code, "", at=time.time()))


def report_stall(text: str, progress: int, *, waits: bool) -> None:
    """Hand the stacks of a process that makes no progress to the launcher, or print them."""
    _write_elastic("Stalled", text, text)
    if not _write(Report(_rank(), 1, text, stalled=True, waits=waits, progress=progress, at=time.time())):
        print(f"rank {_rank()}: {text}", file=sys.stderr, flush=True)  # noqa: T201 - there is nobody else to say it


def end(code: int) -> NoReturn:
    """Leave with an exit code.

    One of several processes that failed does so at once, without waiting for threads of communication
    libraries whose peers are gone. A run that was asked to stop is no failure that a launcher of ours should
    restart: it leaves with 0, and the launcher with its code.
    """
    if "RANK" not in os.environ:
        sys.exit(code)
    if code in STOPPED and _write(Report(_rank(), code, "", at=time.time())):
        sys.exit(0)
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(0)


def read_reports(folder: Path) -> dict[int, Report]:
    """Return the report of each rank that made one in the last attempt; an elastic launcher makes several."""
    last = max((path.name[:3] for path in folder.glob("[0-9]*-*")), default="000")
    found = [Report(**json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob(f"{last}-*.json")]
    return {report.rank: report for report in found}


def _write(report: Report) -> bool:
    if not is_launched():
        return False
    path = Path(os.environ[FOLDER]) / f"{_attempt():03d}-{report.rank:05d}.json"
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(asdict(report)), encoding="utf-8")
    temporary.replace(path)
    return True


def _write_elastic(kind: str, message: str, trace: str) -> None:
    if _FILE not in os.environ:
        return
    extra: dict[str, Any] = {"py_callstack": trace, "timestamp": str(int(time.time()))}
    content = {"message": {"message": f"{kind}: {message}", "extraInfo": extra}}
    Path(os.environ[_FILE]).write_text(json.dumps(content), encoding="utf-8")


def _is_said(text: str) -> bool:
    """Say whether a process of this machine has printed a text already, under a launcher like torchrun."""
    if _FILE not in os.environ:
        return False
    # torchrun gives each attempt a folder, and each rank one inside it.
    attempt = Path(os.environ[_FILE]).parent.parent
    name = f"said-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        (attempt / name).touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:
        return False
    return False


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
