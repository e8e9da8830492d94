"""Find out which of several processes failed first, and say it once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping

from camshaft.worker import STOPPED, Report


def choose_first(reports: Mapping[int, Report], dead: Mapping[int, int]) -> tuple[int, Report | None]:
    """Return the rank whose failure brought the others down, and what it reported.

    ``dead`` holds the exit codes of processes that failed; the negative ones are signals. A rank that a
    signal killed could report nothing, and its peers only noticed. Of stalled ranks it is the one that does
    not wait for another, else the one that came least far. Else it is the one that reported first, but a rank
    that complains about a peer, or was stopped, comes after one that ended without a word.
    """
    silent = {rank: code for rank, code in dead.items() if rank not in reports and code != -signal.SIGTERM}
    killed = [rank for rank, code in silent.items() if code < 0]
    if killed:
        return min(killed), None
    failed = [report for report in reports.values() if report.code and report.code not in STOPPED]
    stalled = [report for report in failed if report.stalled]
    if stalled:
        first = min(stalled, key=lambda report: (report.waits, report.progress, report.rank))
        return first.rank, first
    own = [report for report in failed if not blames_peer(report)]
    if silent and not own:
        return min(silent), None
    if not failed:
        return min(dead, default=0), None
    first = min(own or failed, key=lambda report: report.at)
    return first.rank, first


def say_first(reports: Mapping[int, Report], dead: Mapping[int, int]) -> int:
    """Print how the first failing rank ended, and return the exit code of the run."""
    text, code = tell(reports, dead)
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the launching terminal is where a failure is read
    return code


def tell(reports: Mapping[int, Report], dead: Mapping[int, int]) -> tuple[str, int]:
    """Return what to say of a failed run, and its exit code."""
    rank, first = choose_first(reports, dead)
    if first is None or not first.text:
        code = dead.get(rank, 1) if first is None else first.code
        reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        hint = " Running out of memory is the usual reason." if code == -signal.SIGKILL else ""
        text = f"rank {rank} failed first: it ended by {reason} without a word.{hint} The other ranks were stopped."
        return text, 128 - code if code < 0 else code
    if first.expected:
        alike = all(report.text == first.text for report in reports.values())
        return (first.text if alike else f"rank {rank}: {first.text}"), first.code
    if first.stalled:
        others = [report.text for report in reports.values() if report.stalled and report is not first]
        return "\n".join([f"rank {rank} hangs, and the other ranks were stopped: {first.text}", *others]), first.code
    if blames_peer(first):
        return f"rank {rank} lost another rank, which failed on another machine; look there:\n{first.text}", first.code
    return f"rank {rank} failed first, and the other ranks were stopped:\n{first.text}", first.code


def blames_peer(report: Report) -> bool:
    """Say whether a rank only noticed that another one was gone."""
    signs = ("closed by peer", "Connection reset", "Broken pipe", "gloo/transport", "NCCL", "DistBackendError")
    return not report.expected and any(sign in report.text for sign in signs)
