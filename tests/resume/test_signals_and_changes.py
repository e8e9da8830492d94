"""Signals, limits and requests end a run between two steps, with a checkpoint it goes on from."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from camshaft.callback import Callback
from camshaft.checkpoint import Reader, Store
from camshaft.errors import RecipeError
from camshaft.testing import StopAt, TinyData, TinyModule, tiny_run

STEPS = 12


class Signals(Callback):
    """Send this process a signal in the middle of a step, or of a validation."""

    def __init__(self, number, *, where, at):
        self.number, self.where, self.at, self.sent = number, where, at, False

    def send(self, step):
        if step == self.at and not self.sent:
            self.sent = True
            os.kill(os.getpid(), self.number)

    def on_backward(self, state, loss):
        if self.where == "training":
            self.send(state.progress.step)

    def on_validation_batch(self, state, output):
        if self.where == "validation":
            self.send(state.progress.step)


def run(place, **settings):
    torch.manual_seed(0)
    settings = {"max_steps": STEPS, "validate": "3 steps", "checkpoint": {"every": None}, **settings}
    return tiny_run(TinyModule(dropout=0.2), TinyData(), runs_dir=place, **settings)


def equal(left, right):
    return all(torch.equal(v, right.module.state_dict()[n]) for n, v in left.module.state_dict().items())


@pytest.mark.parametrize("where", ["training", "validation"])
@pytest.mark.parametrize(
    ("number", "status", "code"),
    [(signal.SIGTERM, "terminated", 143), (signal.SIGUSR1, "terminated", 143), (signal.SIGINT, "interrupted", 130)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_signal_saves_and_the_run_goes_on_exactly(tmp_path, number, status, code, where):
    whole = run(tmp_path / "whole")
    stopped = run(tmp_path / "parts", callbacks={"signals": Signals(number, where=where, at=6)})
    assert (stopped.status, stopped.exit_code) == (status, code)
    assert stopped.step == (7 if where == "training" else 6)
    again = run(tmp_path / "parts", resume=str(stopped.run_dir))
    assert again.status == "finished"
    assert equal(again, whole)
    # A validation that was cut short is made up for: its value is that of the whole run.
    assert again.metrics["val/loss"] == whole.metrics["val/loss"]


def test_a_limit_of_time_finishes_the_step_and_exits_with_0(tmp_path):
    result = run(tmp_path, max_steps=None, max_time="1 s")
    assert (result.status, result.exit_code) == ("stopped", 0)
    assert next((result.run_dir / "checkpoints").glob(f"step_{result.step:08}*")).is_dir()


class Asks(Callback):
    """Touch SAVE in the run's directory, as a person would from another shell."""

    def on_step(self, state):
        if state.progress.step == 2:
            (state.run_dir / "SAVE").touch()
        state.next_poll = 0.0


def test_a_file_save_asks_for_a_checkpoint_and_is_taken_away(tmp_path):
    result = run(tmp_path, callbacks={"asks": Asks()}, checkpoint={"every": None, "at_end": False})
    saved = [path.name for path in (result.run_dir / "checkpoints").glob("step_*")]
    assert len(saved) == 1
    assert saved[0].startswith(("step_00000002", "step_00000003"))
    assert not (result.run_dir / "SAVE").exists()


class Fails(Callback):
    def on_step_start(self, state, window):
        if state.progress.step == 5:
            raise RuntimeError("as told")


def test_what_an_exception_saves_is_never_taken_by_auto(tmp_path):
    with pytest.raises(RuntimeError, match="as told"):
        run(tmp_path, callbacks={"fails": Fails()}, checkpoint={"every": "4 steps"})
    (folder,) = tmp_path.glob("*/*/checkpoints")
    with Store(folder, read_only=True) as store:
        kept = {found.manifest.step: found.manifest.exact for found in store.checkpoints()}
        assert kept == {4: True, 5: False}
        assert store.latest().manifest.step == 4
    again = run(tmp_path, resume="auto")
    assert again.run_dir == folder.parent
    assert equal(again, run(tmp_path / "whole"))


def test_auto_goes_on_never_starts_anew_and_a_path_is_what_it_says(tmp_path):
    stop = {"stop": StopAt(5)}
    first = run(tmp_path, callbacks=stop)
    anew = run(tmp_path, callbacks={"stop": StopAt(5)}, resume="never")
    assert anew.run_dir != first.run_dir
    on = run(tmp_path, resume="auto")
    assert on.run_dir == anew.run_dir
    (path,) = (first.run_dir / "checkpoints").glob("step_00000005*")
    with Reader(path) as reader:
        assert reader.data("progress")["step"] == 5
    from_path = run(tmp_path, resume=str(path))
    assert equal(from_path, on)
    with pytest.raises(RecipeError, match="there is no such path"):
        run(tmp_path, resume=str(tmp_path / "nowhere"))


PARTS = """
import torch
from torch import nn
import camshaft
from camshaft.testing import TinyData as Data


class Net(camshaft.Module):
    def __init__(self, width=1):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch):
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])
"""
RECIPE = """
module: {_target_: parts.Net}
data: {_target_: parts.Data}
optimizer: {name: sgd, lr: 0.01}
batch_size: 4
max_steps: 6
callbacks: {progress: null, summary: null}
loggers: {tensorboard: null}
"""


def test_a_recipe_that_became_another_run_is_refused_and_other_changes_are_listed(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    environment = os.environ | {"CAMSHAFT_TRUST": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def fit(*words):
        return subprocess.run(
            [sys.executable, "-m", "camshaft.fit", "recipe.yaml", *words], cwd=tmp_path, env=environment, text=True,
            capture_output=True, timeout=120, check=False,
        )  # fmt: skip

    assert fit().returncode == 0
    (directory,) = (tmp_path / "runs" / "recipe").iterdir()
    refused = fit(f"resume={directory}", "max_steps=9", "+module.width=2")
    assert refused.returncode == 2
    assert "belongs to another recipe: module.width: None -> 2" in refused.stderr
    assert "+allow_changes=[module.width]" in refused.stderr
    words = ("max_steps=9", "+module.width=2", "optimizer.lr=0.02")
    accepted = fit(f"resume={directory}", *words, "+allow_changes=[module]")
    assert accepted.returncode == 0, accepted.stderr
    assert "changed: optimizer.lr: 0.01 -> 0.02" in accepted.stdout
    assert " at step 6." in accepted.stdout
    refused = fit(f"resume={directory}", "max_steps=12", "batch_size=8")
    assert "belongs to another recipe: batch_size: 4 -> 8" in refused.stderr
