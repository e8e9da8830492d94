"""A run's directory repeats the run; whatever goes wrong with a secret in hand, no file and no error holds it."""

import json
import warnings

import pytest

from camshaft import fit, validate
from camshaft.checkpoint.reader import Reader
from camshaft.cli import guard

OTHER = """
import torch
from torch.utils.data import DataLoader, TensorDataset

from camshaft import DataModule, Logger, Module


class Line(Module):
    def __init__(self, width: int = 3):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1))

    def training_step(self, batch):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("val/loss", torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1]))


class Data(DataModule):
    def train_dataloader(self):
        inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return self.train_dataloader()


class Tracker(Logger):
    def __init__(self, api_key: str, fails: str = ""):
        self.api_key, self.fails = api_key, fails
        if fails == "build":
            raise ValueError(f"the key {api_key} is wrong")

    def log_metrics(self, record):
        if self.fails == "log":
            raise OSError(f"https://tracker.example/{self.api_key} is not there")
"""
RECIPE = """module: {_target_: other.Line}
data: {_target_: other.Data}
optimizer: {name: adamw, lr: 0.01}
max_steps: 8
log_every: 2
device: cpu
checkpoint: {every: null}
loggers: {tensorboard: null, mine: {_target_: other.Tracker, api_key: "${oc.env:TRACKER_API_KEY}"}}
"""
KEY = "0123456789-the-key-itself"
ALLOW = ["--allow", "env:TRACKER_API_KEY"]


@pytest.fixture
def place(trusted, monkeypatch):
    (trusted / "other.py").write_text(OTHER)
    (trusted / "r.yaml").write_text(RECIPE)
    monkeypatch.setenv("TRACKER_API_KEY", KEY)
    return trusted


def newest(place, name="r"):
    return max((place / "runs" / name).iterdir(), key=lambda path: path.stat().st_mtime_ns)


def records(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["values"]) for line in lines if line["kind"] == "step"]


def weights(path):
    with Reader(path / "checkpoints" / "step_00000008-end") as reader:
        return {name: reader.tensor(name) for name in reader.names("model")}


def test_the_recipe_in_a_runs_directory_repeats_it(place):
    assert fit.main(["r.yaml", "seed=3", "module.width=5", *ALLOW]) == 0
    first = newest(place)
    assert fit.main([str(first / "recipe.yaml"), *ALLOW]) == 0
    second = newest(place)
    assert second != first
    assert records(second) == records(first) != []
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys() != set()
    assert all(one[name].equal(tensor) for name, tensor in other.items())
    assert (second / "recipe.yaml").read_text() == (first / "recipe.yaml").read_text()
    assert (first / "recipe.source.yaml").read_text().endswith("# command line\n# seed=3\n# module.width=5\n")
    record = json.loads((first / "provenance.json").read_text())
    assert (record["seed"], record["overrides"]) == (3, ["seed=3", "module.width=5"])
    assert record["packages"]["torch"]


def test_a_recipe_in_a_runs_directory_evaluates_that_run_and_another_the_newest(place, capsys):
    for seed in (1, 2):
        assert fit.main(["r.yaml", f"seed={seed}", *ALLOW]) == 0
    first, second = sorted((place / "runs" / "r").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    capsys.readouterr()
    for recipe, run in ((first / "recipe.yaml", first), (second / "recipe.yaml", second), ("r.yaml", second)):
        assert validate.main([str(recipe), *ALLOW]) == 0
        assert f"{run.name}/checkpoints/step_00000008-end (step 8)" in capsys.readouterr().out


def test_a_run_that_goes_on_says_with_what_and_from_which_checkpoint(place):
    fit.main(["r.yaml", *ALLOW])
    first = newest(place)
    assert fit.main([str(first / "recipe.yaml"), f"resume={first}", "max_steps=10", *ALLOW]) == 0
    record = json.loads((first / "provenance.from-step-8.json").read_text())
    assert record["parent_checkpoint"] == str(first / "checkpoints" / "step_00000008-end")
    assert json.loads((first / "provenance.json").read_text())["parent_checkpoint"] is None


@pytest.mark.parametrize("fails", ["", "build", "log", "log, and raise"])
def test_a_secret_is_in_no_file_and_in_no_error(place, fails, capfd):
    words = ["r.yaml", f"+loggers.mine.fails={fails.partition(',')[0]}", *ALLOW] if fails else ["r.yaml", *ALLOW]
    words += ["+loggers.mine.on_error=raise"] if "raise" in fails else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if "raise" in fails:
            with pytest.raises(OSError, match="is not there"):
                guard(fit.main, words)
        else:
            assert guard(fit.main, words) == (2 if fails == "build" else 0)
    said = capfd.readouterr()
    assert ("***" in said.err) == (fails == "build")
    assert any("***" in str(warning.message) for warning in caught) == (fails == "log")
    assert KEY not in said.out + said.err + "".join(str(warning.message) for warning in caught)
    files = [path for path in (place / "runs").rglob("*") if path.is_file()] if (place / "runs").exists() else []
    assert bool(files) == (fails != "build")
    for path in files:
        assert KEY.encode() not in path.read_bytes(), path
