"""A person's own files, named by a recipe, train, stop, go on and predict; nothing else is edited."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from camshaft.callback import EVENTS
from camshaft.checkpoint import Store

OWN = '''
import json
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from camshaft import Callback, DataModule, Logger, Module


class Line(Module):
    def __init__(self, slow_s: float = 0.0):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, inputs):
        return self.layer(inputs)

    def training_step(self, batch):
        time.sleep(self.hparams.slow_s)
        return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log("val/loss", torch.nn.functional.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch):
        return self(batch[0])


class Data(DataModule):
    def loader(self, count):
        inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=count == 24)

    def train_dataloader(self):
        return self.loader(24)

    def val_dataloader(self):
        return self.loader(10)

    def predict_dataloader(self):
        return self.loader(11)


class StopOnce(Callback):
    """Stop after a step of the first epoch."""

    def __init__(self, step: int = 4):
        self.step = step

    def on_step(self, state):
        if state.progress.step == self.step:
            state.control.stop("as asked", everywhere=True)


class Lines(Logger):
    """One line of JSON a record, in the run's directory."""

    def open(self, run):
        self.file = (run.directory / "lines.txt").open("a")

    def log_metrics(self, record):
        self.file.write(json.dumps([record.kind, record.step, sorted(record.values)]) + "\\n")

    def close(self, status):
        self.file.write(status + "\\n")
        self.file.close()
'''

RECIPE = """module: {_target_: own.Line}
data: {_target_: own.Data}
batch_size: 4
optimizer: {name: adamw, lr: 0.01}
max_epochs: 2
validate: 1 epoch
log_every: 3
device: cpu
callbacks:
  clip_gradients: {max_norm: 1.0, every: 2 steps}
  ema: {decay: 0.9}
  stop: {_target_: own.StopOnce, step: 4}
loggers:
  mine: {_target_: own.Lines}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "own.py").write_text(OWN)
    (folder / "line.yaml").write_text(RECIPE)
    return folder


def start(folder, entry, *arguments):
    """Start a command in the project; nothing of it is remembered outside of that."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CAMSHAFT_HOME": str(folder / "home")}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", f"camshaft.{entry}", "line.yaml", *arguments],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def command(folder, entry, *arguments, code=0):
    process = start(folder, entry, *arguments)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, out + err
    return out, err


@pytest.fixture(scope="module")
def stopped(project):
    """Train until the person's own callback stops the run; return its directory and what was printed."""
    printed = command(project, "fit", "--trust")[0]
    return next((project / "runs" / "line").iterdir()), printed


def test_a_folder_that_was_not_trusted_runs_nothing(tmp_path):
    (tmp_path / "own.py").write_text(OWN + "\nraise SystemExit('ran')\n")
    (tmp_path / "line.yaml").write_text(RECIPE)
    err = command(tmp_path, "fit", code=2)[1]
    assert "ran" not in err.split()
    assert "a folder that you have not trusted" in err
    assert not (tmp_path / "runs").exists()


def test_own_callback_and_logger_work_by_being_named(stopped):
    run_dir, printed = stopped
    assert "Stopped after 4 steps, 0 epochs (as asked)." in printed
    lines = (run_dir / "lines.txt").read_text().splitlines()
    assert lines == ['["step", 3, ["train/grad_norm", "train/loss"]]', "stopped"]


def test_the_last_words_say_where_the_run_is_and_how_to_go_on(stopped):
    run_dir, printed = stopped
    relative = run_dir.relative_to(run_dir.parents[2])
    assert printed.splitlines()[-2:] == [
        f"Run directory: {relative}",
        f"Continue it: python -m camshaft.fit {relative}/recipe.yaml resume={relative}",
    ]


def test_a_run_has_a_directory_of_its_own(stopped):
    names = {path.name for path in stopped[0].iterdir() if not path.name.startswith("events.")}
    assert names >= {
        "recipe.yaml",
        "recipe.source.yaml",
        "provenance.json",
        "status.json",
        "metrics.jsonl",
        "checkpoints",
    }
    status = json.loads((stopped[0] / "status.json").read_text())
    assert (status["state"], status["step"], status["epoch"]) == ("stopped", 4, 0)


def test_explain_prints_every_event_with_its_listeners_in_order(project, stopped):
    printed = command(project, "fit", "--explain")[0].splitlines()
    assert [line.split()[0] for line in printed] == list(EVENTS)
    listeners = {line.split()[0]: line.split(maxsplit=1)[1] for line in printed}
    assert listeners["on_gradients"] == "finite, clip_gradients (every 2 steps)"
    assert listeners["on_step"] == "finite, ema, stop, checkpoint"
    assert listeners["on_validation_start"] == "ema, progress (main process)"
    assert listeners["on_validation_end"] == "progress (main process), checkpoint, ema"
    assert listeners["on_module"] == "-"


def test_the_same_command_goes_on_and_ends_as_if_it_had_never_stopped(project, stopped):
    printed = command(project, "fit")[0]
    run_dir = stopped[0]
    assert f"Resumed from {run_dir.relative_to(project)}/checkpoints/step_00000004-end at step 4." in printed
    assert "Finished after 12 steps, 2 epochs." in printed
    assert [path.name for path in (project / "runs" / "line").iterdir()] == [run_dir.name]
    lines = [json.loads(line) for line in (run_dir / "lines.txt").read_text().splitlines() if line.startswith("[")]
    steps = [step for kind, step, _ in lines if kind == "step"]
    assert steps == [3, 6, 9, 12]
    command(project, "fit", "resume=never", "name=whole", "callbacks.stop=null", "validate=1 epoch")
    whole = next((project / "runs" / "whole").iterdir())
    files = [next(path.glob("checkpoints/step_00000012*/model.safetensors")) for path in (run_dir, whole)]
    own, expected = map(load_file, files)
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], expected[name]) for name in own)


def test_predictions_go_to_files_and_are_those_of_the_checkpoint(project, stopped):
    (checkpoint,) = (stopped[0] / "checkpoints").glob("step_*")
    command(project, "predict", "--checkpoint", str(checkpoint))
    (file,) = (stopped[0] / "predictions").glob("*.npz")
    with np.load(file) as written:
        (found,) = (written[name] for name in written if written[name].shape == (11, 1))
    inputs = torch.randn(11, 3, generator=torch.Generator().manual_seed(11))
    averages = load_file(checkpoint / "ema.safetensors")
    expected = inputs @ averages["layer.weight"].T + averages["layer.bias"]
    assert torch.allclose(torch.from_numpy(found), expected, rtol=1e-6, atol=1e-6), "EMA evaluates on the averages"


# -- signals


def wait_for(process, text, folder):
    """Wait until a run has logged ``text``."""
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline and process.poll() is None:
        files = list(folder.rglob("metrics.jsonl"))
        if files and text in files[0].read_text():
            return
        time.sleep(0.02)
    process.kill()
    pytest.fail(f"no {text!r}: {process.communicate()}")


def interrupted(folder, name, presses, *arguments):
    """Interrupt a slow run ``presses`` times; return its directory and what it printed."""
    process = start(
        folder, "fit", "--trust", f"name={name}", "log_every=1", "callbacks.stop=null", "max_epochs=100", *arguments
    )
    try:
        wait_for(process, f'"step": {presses}', folder / "runs" / name)
        for press in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3 if press + 1 < presses else 0)
        out, err = process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == 130, out + err
    return next((folder / "runs" / name).iterdir()), out + err


def test_ctrl_c_once_finishes_the_step_saves_and_returns(project):
    run_dir, printed = interrupted(project, "once", 1, "+module.slow_s=0.05")
    assert "Finishing this step, then saving. Ctrl-C again stops at once." in printed
    step = json.loads((run_dir / "status.json").read_text())["step"]
    assert f"Interrupted after {step} steps, 0 epochs (Ctrl-C was received)." in printed
    (found,) = [entry for entry in Store(run_dir / "checkpoints").checkpoints() if entry.manifest.step == step]
    assert found.manifest.exact
    assert "Traceback" not in printed


def test_ctrl_c_twice_stops_at_once_and_leaves_nothing_half_written(project):
    # A step takes 1.5 s here, so the run is inside the third, with the first saved and the second not.
    run_dir, printed = interrupted(
        project, "twice", 2, "+module.slow_s=1.5", "limit_validation_batches=0", "checkpoint.every={at: [1]}"
    )
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], status["step"]) == ("interrupted", 2), "it did not wait for the step"
    store = Store(run_dir / "checkpoints")
    assert [(entry.manifest.step, entry.manifest.exact) for entry in store.checkpoints()] == [(1, True)]
    assert store.latest() is not None, "whole, with every hash as written"
    assert "Traceback" not in printed
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"step_00000001-step", "last", ".lock"}
