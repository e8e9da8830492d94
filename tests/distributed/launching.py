"""Run a recipe's command in processes of its own, as a user would, and never wait for ever."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODULE = """
import os
import signal
import sys
import time

import torch

from camshaft import Callback
from camshaft.testing import TinyData, TinyModule


class Faulty(TinyModule):
    # FAULT is kind:rank:micro-batch, and comes once where a file DONE says that it came.
    def training_step(self, batch, batch_idx):
        kind, rank, at = os.environ.get("FAULT", "none:0:0").split(":")
        done = os.environ.get("DONE")
        came = done is not None and os.path.exists(done)
        if int(rank) == self.rank and self.count == int(at) and not came:
            if done is not None:
                open(done, "w").close()
            fail(kind)
        self.count += 1
        return super().training_step(batch, batch_idx)

    count = 0

    @property
    def rank(self):
        return int(os.environ.get("RANK", "0"))


def fail(kind):
    if kind == "raise":
        raise ValueError("the fault that was asked for")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(600)
    if kind == "exit":
        sys.exit(7)


class Slow(Callback):
    def __init__(self, secs: float = 0.05):
        self.secs = secs

    def on_step(self, state):
        time.sleep(self.secs)


class Data(TinyData):
    def prepare_data(self):
        # Every rank says who it is, so that a test sees what was started.
        print(f"hello from {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')}", flush=True)
"""

RECIPE = """
module: {_target_: faulty.Faulty}
data: {_target_: faulty.Data, samples: 48}
device: cpu
strategy: ddp
batch_size: 8
max_steps: 12
test: false
validate: null
log_every: 4
checkpoint: {every: 4 steps}
loggers: {tensorboard: null}
"""


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
    secs: float


def project(folder: Path, recipe: str = RECIPE) -> Path:
    """Write a module that can fail and a recipe that trains it; return the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "faulty.py").write_text(MODULE)
    path = folder / "run.yaml"
    path.write_text(recipe)
    return path


def environment(recipe: Path, **more: str) -> dict[str, str]:
    """Return what a command finds: one thread, and trust in the recipe's folder."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1", "CAMSHAFT_TRUST": str(recipe.parent), "PYTHONUNBUFFERED": "1"} | more


def begin(command: Sequence[str], env: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
    """Start a command in a process group of its own."""
    return subprocess.Popen(
        command, env=env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def finish(process: subprocess.Popen[str], timeout: float, since: float | None = None) -> Done:
    """Wait for a command; end it and what it started when it takes too long."""
    since = time.monotonic() if since is None else since
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        raise
    return Done(process.returncode, out, err, time.monotonic() - since)


def run(command: Sequence[str], env: dict[str, str], cwd: Path, timeout: float = 90) -> Done:
    """Run a command to its end."""
    since = time.monotonic()
    return finish(begin(command, env, cwd), timeout, since)


def fit(recipe: Path, *words: str, timeout: float = 90, **more: str) -> Done:
    """Run ``python -m camshaft.fit`` on a recipe."""
    command = [sys.executable, "-m", "camshaft.fit", str(recipe), *words]
    return run(command, environment(recipe, **more), recipe.parent, timeout)
