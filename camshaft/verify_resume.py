"""Prove on your own recipe that a resumed run equals an uninterrupted one: ``python -m camshaft.verify_resume``."""

from __future__ import annotations

import json
import os
import random
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
        starts = trial.run("killed", arguments.steps, kills=kills)
        difference = compare(trial.digests("whole"), trial.digests("killed"), arguments.steps)
    if difference is None:
        say(f"Equal: {arguments.steps} steps, {starts} starts; samples, streams, weights and optimizer at every step.")
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

    def run(self, name: str, steps: int, *, kills: list[int]) -> int:
        """Train to the end, killing after the given steps; return how often it was started.

        Raises:
            CheckpointError: the run fails by itself; its last lines are shown.
        """
        waiting = list(kills)
        for start in range(1, _MAX_STARTS):
            if self._start(name, steps, waiting.pop(0) if waiting else None):
                return start
        raise CheckpointError(f"the run did not end within {_MAX_STARTS} starts.", fix="Ask for fewer kills.")

    def digests(self, name: str) -> dict[str, list[dict[str, object]]]:
        """Return the lines of each rank, in the order they were written."""
        found: dict[str, list[dict[str, object]]] = {}
        for path in sorted(self.folder.glob(f"{name}.digest*")):
            lines = path.read_text(encoding="utf-8").split("\n")
            # A kill can cut the line that is being written; a whole one ends in a newline.
            found[path.suffix.removeprefix(".digest")] = [json.loads(line) for line in lines[:-1] if line.endswith("}")]
        return found

    def _start(self, name: str, steps: int, kill_after: int | None) -> bool:
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
                return self._watch(process, digest, kill_after, log)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _watch(self, process: subprocess.Popen[bytes], digest: Path, kill_after: int | None, log: Path) -> bool:
        deadline = time.monotonic() + self.timeout_s
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise CheckpointError(f"the run took longer than {self.timeout_s:g} s.", fix="Raise --timeout.")
            if kill_after is not None and last_step(digest) >= kill_after:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return False
            time.sleep(0.002)
        if process.returncode != 0:
            tail = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            what = f"the run ended with code {process.returncode}:\n  {tail}"
            raise CheckpointError(what, fix="Make it train first.")
        return True


def last_step(digest: Path) -> int:
    """Return the newest whole step in a digest file, on any rank; 0 when there is none."""
    newest = 0
    for path in digest.parent.glob(f"{digest.name}*"):
        lines = path.read_bytes()[-400:].split(b"\n")
        for line in lines[-2:-1]:
            try:
                newest = max(newest, int(json.loads(line)["step"]))
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
