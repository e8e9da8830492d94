"""Prove on your own recipe that a resumed run equals an uninterrupted one: ``python -m camshaft.verify_resume``."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from camshaft.cli import guard, read_recipe, recipe_parser, say, split
from camshaft.errors import CheckpointError

PARTS = ("samples", "streams", "weights", "optimizer")
_MAX_STARTS = 50
_LINE = '{"step": '  # how a line begins


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step at which two runs differ, and in what."""

    step: int
    rank: str
    parts: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Train once without and once with kills, and compare a digest of every step; return 0 when they are equal."""
    parser = recipe_parser("verify_resume", "Train, kill -9 at random steps, resume, and compare every step.")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps to train (default 40)")
    parser.add_argument("--kills", type=int, default=3, help="how often to kill the second run (default 3)")
    parser.add_argument("--save-every", type=int, default=7, help="steps between checkpoints (default 7)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each run (default 900)")
    arguments = parser.parse_args(argv)
    read_recipe(arguments)  # every mistake shows here, once
    with tempfile.TemporaryDirectory(prefix="camshaft-") as folder:
        trial = Trial(Path(folder), arguments.recipe, arguments.allow, arguments.save_every, arguments.timeout)
        say(f"Training {arguments.steps} steps without a kill.")
        trial.run("whole", arguments.steps, kills=[])
        chosen = random.Random(arguments.seed)  # noqa: S311 - moments, not secrets
        first = min(arguments.save_every + 1, arguments.steps - 1)
        kills = sorted(chosen.randint(first, arguments.steps - 1) for _ in range(arguments.kills))
        say(f"Training them again, killed after step {', '.join(map(str, kills))}.")
        begun = trial.run("killed", arguments.steps, kills=kills)
        difference = compare(trial.digests("whole"), trial.digests("killed"), arguments.steps)
    return conclude(begun[1:], difference, arguments.steps, arguments.kills)


def conclude(continued: list[int], difference: Difference | None, steps: int, kills: int) -> int:
    """Say what came of it and return the exit code; ``continued`` are the steps that the later starts began after.

    Raises:
        CheckpointError: the runs are equal, but nothing was continued, so that nothing is proven.
    """
    if difference is None:
        if kills and not any(continued):
            raise CheckpointError(
                "no start continued from a checkpoint, so nothing is proven.",
                why="Every kill came before the first checkpoint." if continued else "The run ended before a kill.",
                fix="Train more steps or save more often: --steps, --save-every.",
            )
        missed = f" Only {len(continued)} of {kills} kills came before the end." if len(continued) < kills else ""
        where = f"continued after step {', '.join(map(str, continued))}" if continued else "not killed"
        say(f"Equal: {steps} steps, {where}; samples, streams, weights and optimizer at every step.{missed}")
        return 0
    where = f" on rank {difference.rank}" if difference.rank else ""
    say(f"Different from step {difference.step} on{where}; first in: {', '.join(difference.parts)}.")
    return 1


@dataclass(slots=True)
class Trial:
    """Two runs of one recipe, in a folder of their own."""

    folder: Path
    words: list[str]
    allow: list[str]
    save_every: int
    timeout_s: float

    def run(self, name: str, steps: int, *, kills: list[int]) -> list[int]:
        """Train to the end, killing after the given steps; return, for each start, after which step it began.

        Raises:
            CheckpointError: the run fails by itself; its last lines are shown.
        """
        waiting, begun = list(kills), list[int]()
        digest = self.folder / f"{name}.digest"
        for _ in range(1, _MAX_STARTS):
            before = sizes(digest)
            is_over = self._start(name, steps, waiting.pop(0) if waiting else None, before)
            begun.append(first_step(digest, before, steps + 1) - 1)
            if is_over:
                return begun
        raise CheckpointError(f"the run did not end within {_MAX_STARTS} starts.", fix="Ask for fewer kills.")

    def digests(self, name: str) -> dict[str, list[dict[str, object]]]:
        """Return the lines of each rank, in the order they were written."""
        found: dict[str, list[dict[str, object]]] = {}
        for path in sorted(self.folder.glob(f"{name}.digest*")):
            found[path.name.removeprefix(f"{name}.digest").removeprefix(".")] = read_digest(path)
        return found

    def _start(self, name: str, steps: int, kill_after: int | None, before: dict[Path, int]) -> bool:
        files, overrides = split(self.words)
        digest, log = self.folder / f"{name}.digest", self.folder / f"{name}.log"
        command = [
            sys.executable, "-m", "camshaft.fit", *files, *overrides, f"max_steps={steps}", "max_epochs=null",
            f"+callbacks.digest={{path: {digest}}}", f"callbacks.checkpoint.every={self.save_every} steps",
            f"runs_dir={self.folder / name}", "resume=auto", *(f"--allow={entry}" for entry in self.allow),
        ]  # fmt: skip
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)  # noqa: S603
            try:
                return self._watch(process, digest, kill_after, before, log)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _watch(
        self, process: subprocess.Popen[bytes], digest: Path, kill_after: int | None, before: dict[Path, int], log: Path
    ) -> bool:
        deadline = time.monotonic() + self.timeout_s
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise CheckpointError(f"the run took longer than {self.timeout_s:g} s.", fix="Raise --timeout.")
            # A start that is killed before it made a step of its own shows nothing.
            is_due = kill_after is not None and last_step(digest) >= kill_after
            if is_due and first_step(digest, before, 0):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return False
            time.sleep(0.002)
        if process.returncode != 0:
            tail = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            what = f"the run ended with code {process.returncode}:\n  {tail}"
            raise CheckpointError(what, fix="Make it train first.")
        return True


def read_digest(path: Path) -> list[dict[str, object]]:
    """Return the whole lines of a digest file, in the order they were written.

    A kill can cut a line, and the next start then writes on behind it.
    """
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line[line.rfind(_LINE) :]) for line in lines if _LINE in line and line.endswith("}")]


def sizes(digest: Path) -> dict[Path, int]:
    """Return how long the digest files of all ranks are, in bytes."""
    return {path: path.stat().st_size for path in digest.parent.glob(f"{digest.name}*")}


def first_step(digest: Path, before: dict[Path, int], default: int) -> int:
    """Return the first step that any rank wrote since the files had the sizes of ``before``, or ``default``."""
    found = []
    for path in sizes(digest):
        written = path.read_bytes()[before.get(path, 0) :].decode(errors="replace")
        match = re.search(_LINE + r"(\d+),", written)
        if match is not None:
            found.append(int(match[1]))
    return min(found, default=default)


def last_step(digest: Path) -> int:
    """Return the newest whole step in a digest file, on any rank; 0 when there is none."""
    newest = 0
    for path in digest.parent.glob(f"{digest.name}*"):
        lines = path.read_bytes()[-400:].split(b"\n")
        for line in lines[-2:-1]:
            try:
                newest = max(newest, int(json.loads(line[line.rfind(_LINE.encode()) :])["step"]))
            except (ValueError, KeyError):
                continue
    return newest


def compare(
    whole: dict[str, list[dict[str, object]]], killed: dict[str, list[dict[str, object]]], steps: int
) -> Difference | None:
    """Return the first step of any start of the killed run that differs from the whole run's; None when all agree."""
    for rank, lines in whole.items():
        expected = {line["step"]: line for line in lines}
        seen = set()
        for line in sorted(killed.get(rank, []), key=lambda entry: int(str(entry["step"]))):
            step = int(str(line["step"]))
            seen.add(step)
            parts = tuple(part for part in PARTS if line[part] != expected.get(step, {}).get(part))
            if parts:
                return Difference(step, rank, parts)
        missing = set(range(1, steps + 1)) - seen
        if missing:
            return Difference(min(missing), rank, ("the step was never made",))
    return None


if __name__ == "__main__":
    sys.exit(guard(main))
