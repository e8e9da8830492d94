"""Whatever ends one rank ends all of them soon, and the launching terminal says once which was first."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from launching import begin, environment, finish, fit, project

from camshaft.failure import choose_first, tell
from camshaft.worker import Report

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("faulty"))


def words(place: Path, *more: str) -> list[str]:
    return ["launch.num_processes=2", f"runs_dir={place}", *more]


def test_an_exception_on_one_rank_ends_all_with_its_traceback(recipe, tmp_path):
    done = fit(recipe, *words(tmp_path), FAULT="raise:1:3")
    assert done.code == 1
    assert done.err.count("rank 1 failed first") == 1
    assert done.err.count("ValueError: the fault that was asked for") == 1
    assert "faulty.py" in done.err
    assert done.secs < 30


def test_a_killed_rank_ends_all_and_is_named(recipe, tmp_path):
    done = fit(recipe, *words(tmp_path), FAULT="kill:1:3")
    assert done.code == 128 + signal.SIGKILL
    assert done.err.count("rank 1 failed first: it ended by SIGKILL without a word") == 1
    assert "Traceback" not in done.err
    assert done.secs < 30


def test_a_hanging_rank_ends_all_with_the_stack_of_every_rank(recipe, tmp_path):
    done = fit(recipe, *words(tmp_path, "launch.hang_timeout=4 seconds"), FAULT="hang:1:3")
    assert done.code == 1
    assert done.err.count("rank 1 hangs") == 1
    assert "Stacks of rank 0" in done.err
    assert "Stacks of rank 1" in done.err
    # Where it hangs, and where the other waits.
    assert "time.sleep(600)" in done.err
    assert "loss.backward()" in done.err
    assert done.secs < 30


def test_a_rank_that_exits_by_itself_is_named_with_its_code(recipe, tmp_path):
    done = fit(recipe, *words(tmp_path), FAULT="exit:0:2")
    assert done.code == 7
    assert done.err.count("rank 0 failed first: it ended by exit code 7") == 1


def test_an_error_of_all_ranks_is_said_once_and_its_code_passes_through(recipe, tmp_path):
    done = fit(recipe, *words(tmp_path, "batch_size=7"))
    assert done.code == 2
    assert done.err.count("batch_size is 7, which 2 processes") == 1
    assert "Traceback" not in done.err
    assert "rank" not in done.err


def test_a_request_to_stop_reaches_all_ranks_which_save_and_pass_its_code_on(recipe, tmp_path):
    command = [sys.executable, "-m", "camshaft.fit", str(recipe), *words(tmp_path)]
    command += ["+callbacks.slow._target_=faulty.Slow"]
    # Where SLURM runs the job, it is asked to run it again.
    slurm = tmp_path / "bin" / "scontrol"
    slurm.parent.mkdir()
    slurm.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    slurm.chmod(0o755)
    env = environment(recipe, PATH=f"{slurm.parent}:{os.environ['PATH']}", SLURM_JOB_ID="77")
    process = begin([*command, "max_steps=400", "launch.requeue=true"], env, recipe.parent)
    wait_for(lambda: list(tmp_path.glob("run/*/checkpoints/step_*")))
    process.send_signal(signal.SIGTERM)
    done = finish(process, 60)
    assert done.code == 143, done.err
    assert "Terminated after" in done.out
    step = int(re.search(r"Terminated after (\d+) steps", done.out)[1])
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    assert max(tmp_path.glob("run/*/checkpoints/step_*")).name.startswith(f"step_{step:08d}")


def test_ranks_whose_launcher_is_killed_end_too(recipe, tmp_path):
    command = [sys.executable, "-m", "camshaft.fit", str(recipe), *words(tmp_path, "max_steps=4000")]
    process = begin([*command, "+callbacks.slow._target_=faulty.Slow"], environment(recipe), recipe.parent)
    wait_for(lambda: list(tmp_path.glob("run/*/checkpoints/step_*")))
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 2
    process.kill()
    process.communicate(timeout=30)
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def test_the_first_is_the_one_that_brought_the_others_down():
    fault = Report(1, 1, "ValueError: x", at=5.0)
    noticed = Report(0, 1, "RuntimeError: Connection closed by peer", at=4.0)
    stopped = Report(2, 143, "", at=3.0)
    assert choose_first({0: noticed, 1: fault, 2: stopped}, {})[0] == 1
    assert choose_first({0: noticed, 2: stopped}, {1: -9})[0] == 1
    assert choose_first({0: noticed, 2: stopped}, {1: 7, 0: 1})[0] == 1
    waits = Report(0, 1, "", stalled=True, waits=True, progress=3)
    hangs = Report(1, 1, "", stalled=True, progress=4)
    behind = Report(2, 1, "", stalled=True, waits=True, progress=2)
    assert choose_first({0: waits, 1: hangs, 2: behind}, {})[0] == 1
    assert choose_first({0: waits, 2: behind}, {})[0] == 2
    text, code = tell({0: noticed}, {0: 1})
    assert "another machine" in text
    assert code == 1
