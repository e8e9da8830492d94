"""The proof finds a difference that was planted, names what differs first, and never proves nothing."""

import os
import subprocess
import sys

import pytest

from camshaft.errors import CheckpointError
from camshaft.verify_resume import Difference, compare, conclude, first_step, last_step, read_digest, sizes

PLANTED = """
import time

from camshaft import Callback


class Planted(Callback):
    # Counts steps, keeps the count from checkpoints, and lets the gradients depend on it.
    steps = 0

    def on_gradients(self, state):
        time.sleep(0.02)
        self.steps += 1
        for parameter in state.module.parameters():
            parameter.grad *= 1 + 0.01 * self.steps
"""
RECIPE = """
module: {_target_: camshaft.testing.TinyModule, dropout: 0.1}
data: {_target_: camshaft.testing.TinyData}
callbacks: {progress: null, summary: null, planted: {_target_: planted.Planted}}
loggers: {tensorboard: null, console: null, jsonl: null}
max_epochs: 2
"""


def test_a_planted_difference_is_found_and_named(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    environment = os.environ | {"CAMSHAFT_TRUST": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "camshaft.verify_resume", "recipe.yaml", "--steps", "16", "--kills", "1",
         "--save-every", "4", "--seed", "1"],
        cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    killed = int(done.stdout.split("killed after step ")[1].split(".")[0])
    # It went on from a checkpoint after the one before the kill, for the run is a little ahead of who kills it.
    assert any(
        f"Different from step {step} on; first in: weights." in done.stdout for step in (5, 9, 13) if step <= killed + 2
    ), done.stdout


def line(step, **parts):
    parts = {"samples": "a", "weights": "b", "optimizer": "c", "streams": "d", **parts}
    return {"step": step, **{name: f"{value}{step}" for name, value in parts.items()}}


@pytest.mark.parametrize("part", ["samples", "streams", "weights", "optimizer"])
def test_every_part_is_compared_at_every_step_of_every_rank_and_start(part):
    whole = {rank: [line(step) for step in range(1, 7)] for rank in ("0", "1")}
    same = [line(step) for step in (1, 2, 3, 3, 4, 5, 6)]
    assert compare(whole, {"0": same, "1": same}, 6) is None
    # The wrong line of a start comes before the right one of the next.
    wrong = [*same[:3], line(4, **{part: "x"}), *same[3:]]
    assert compare(whole, {"0": same, "1": wrong}, 6) == Difference(4, "1", (part,))
    assert compare(whole, {"0": same, "1": same[:-1]}, 6) == Difference(6, "1", ("the step was never made",))
    assert compare(whole, {"0": same}, 6) == Difference(1, "1", ("the step was never made",))


def test_lines_that_a_kill_cut_are_left_out_and_what_was_written_behind_them_is_not(tmp_path):
    path = tmp_path / "run.digest"
    path.write_text('{"step": 1, "weights": "a"}\n{"step": 2, "wei{"step": 2, "weights": "b"}\n{"step": 3, "weig')
    assert [entry["step"] for entry in read_digest(path)] == [1, 2]
    assert last_step(path) == 2
    before = sizes(path)
    assert first_step(path, before, 0) == 0
    with path.open("a") as file:
        file.write('{"step": 2, "weights": "b"}\n')
    assert first_step(path, before, 0) == 2
    assert [entry["step"] for entry in read_digest(path)] == [1, 2, 2]


def test_it_says_after_which_steps_it_continued_and_proves_nothing_without_that(capsys):
    assert conclude([4, 8], None, 12, 2) == 0
    assert "Equal: 12 steps, continued after step 4, 8;" in capsys.readouterr().out
    assert conclude([4], None, 12, 3) == 0
    assert "Only 1 of 3 kills came before the end." in capsys.readouterr().out
    assert conclude([4], Difference(5, "", ("streams",)), 12, 1) == 1
    assert "Different from step 5 on; first in: streams." in capsys.readouterr().out
    for nothing in ([], [0]):
        with pytest.raises(CheckpointError, match="nothing is proven"):
            conclude(nothing, None, 12, 1)
