"""SLURM is asked to run a job again once its checkpoint is there, and what keeps it from that is said."""

import os
import subprocess
import sys

import pytest

from camshaft.launch import requeue
from camshaft.recipe.settings import Launch

TOLD = """
import os
import signal

from camshaft import Callback


class Told(Callback):
    # As SLURM does some time before a job's end.
    def on_backward(self, state, loss):
        if state.progress.step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
"""
RECIPE = """
module: {_target_: camshaft.testing.TinyModule}
data: {_target_: camshaft.testing.TinyData}
max_steps: 6
launch: {requeue: true}
callbacks: {progress: null, summary: null, told: {_target_: told.Told}}
loggers: {tensorboard: null}
"""


def stand_in(folder, text):
    """Write an executable in place of SLURM's, and return the PATH that finds nothing else."""
    folder.mkdir()
    (folder / "scontrol").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "scontrol").chmod(0o755)
    return str(folder)


def test_a_job_that_slurm_warned_saves_asks_to_run_again_and_continues(tmp_path):
    (tmp_path / "told.py").write_text(TOLD)
    (tmp_path / "job.yaml").write_text(RECIPE)
    path = stand_in(
        tmp_path / "bin", f'echo "$@" >> {tmp_path}/asked; ls {tmp_path}/runs/job/*/checkpoints > {tmp_path}/saved'
    )
    environment = os.environ | {
        "CAMSHAFT_TRUST": str(tmp_path), "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "4711",
        "PATH": f"{path}:{os.environ['PATH']}",
    }  # fmt: skip

    def fit():
        command = [sys.executable, "-m", "camshaft.fit", "job.yaml"]
        return subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=120)

    stopped = fit()
    assert stopped.returncode == 143, stopped.stderr
    assert "Asked SLURM to run job 4711 again." in stopped.stdout
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"
    assert "step_00000003" in (tmp_path / "saved").read_text()
    again = fit()
    assert again.returncode == 0, again.stderr
    assert " at step 3." in again.stdout
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"  # a run that ended is not run again


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Make this process look like one of a job."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("PATH", stand_in(tmp_path / "bin", f'echo "$@" >> {tmp_path}/asked'))
    return tmp_path / "asked"


def test_only_a_run_that_was_told_to_stop_and_wants_it_is_run_again(slurm):
    for code in (0, 1, 2, 130, 137):
        requeue(code, Launch(requeue=True))
    requeue(143, Launch(requeue=False))
    requeue(143, Launch(requeue=True, machine_rank=1))
    assert not slurm.exists()
    requeue(143, Launch(requeue=True))
    assert slurm.read_text() == "requeue 12\n"


def test_of_the_ranks_that_another_launcher_started_the_first_asks(slurm, monkeypatch):
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        requeue(143, Launch(requeue=True))
    assert slurm.read_text() == "requeue 12\n"
    monkeypatch.setenv("CAMSHAFT_REPORTS", "anywhere")  # its own launcher asks after it
    requeue(143, Launch(requeue=True))
    assert slurm.read_text() == "requeue 12\n"


def test_it_says_what_keeps_slurm_from_being_asked(slurm, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    requeue(143, Launch(requeue=True))
    assert capsys.readouterr().out == (
        "Not requeued: there is no scontrol on the PATH of this machine. "
        "Ask for it from a login node: scontrol requeue 12\n"
    )
    monkeypatch.setenv("PATH", stand_in(tmp_path / "refuses", "exit 3"))
    requeue(143, Launch(requeue=True))
    assert "Not requeued: scontrol ended with exit code 3." in capsys.readouterr().out
    monkeypatch.delenv("SLURM_JOB_ID")
    requeue(143, Launch(requeue=True))
    assert "SLURM_JOB_ID is not set" in capsys.readouterr().out
