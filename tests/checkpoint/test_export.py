"""Weights of any checkpoint come out in one file, in little memory, and only what is asked for."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from camshaft.callbacks.ema import EMA
from camshaft.checkpoint import Entries, Store
from camshaft.export import main
from camshaft.testing import TinyData, TinyModule, tiny_run

RECIPE = """
module: {_target_: exported_parts.Net}
data: {_target_: exported_parts.Data}
optimizer: {name: adamw, lr: 0.01}
max_steps: 3
callbacks: {ema: {decay: 0.5}, progress: null, summary: null}
loggers: {console: null, tensorboard: null}
runs_dir: runs
"""

PARTS = """
import torch
from torch import nn
import camshaft
from camshaft.testing import TinyData as Data


class Net(camshaft.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.layer(inputs)

    def training_step(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[1])
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run with averages, made from Python."""
    torch.manual_seed(0)
    ema = EMA(0.5)
    result = tiny_run(
        TinyModule(), TinyData(), callbacks={"ema": ema}, max_steps=3, checkpoint={"every": None},
        runs_dir=tmp_path_factory.mktemp("runs"),
    )  # fmt: skip
    return result, ema


@pytest.fixture(scope="module")
def from_recipe(tmp_path_factory):
    """Return the directory of a run that a recipe made."""
    place = tmp_path_factory.mktemp("project")
    (place / "exported_parts.py").write_text(PARTS)
    (place / "recipe.yaml").write_text(RECIPE)
    environment = os.environ | {"CAMSHAFT_TRUST": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "camshaft.fit", "recipe.yaml"], cwd=place, capture_output=True, text=True,
        timeout=120, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = (place / "runs" / "recipe").iterdir()
    return directory


def export(*words):
    from camshaft.cli import guard

    return guard(main, [str(word) for word in words])


def test_the_file_holds_the_weights_bit_for_bit(run, tmp_path):
    assert export(run[0].run_dir, "--to", tmp_path / "model.safetensors") == 0
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == run[0].module.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in run[0].module.state_dict().items())


def test_averages_come_in_place_of_the_weights(run, tmp_path):
    assert export(run[0].run_dir, "--to", tmp_path / "ema.safetensors", "--ema") == 0
    found = load_file(tmp_path / "ema.safetensors")
    assert all(torch.equal(found[name], value) for name, value in run[1].averages.items())


def test_a_dtype_converts_what_is_floating(tmp_path):
    tensors = {"model/w": torch.randn(10_000), "model/count": torch.tensor(3)}
    with Store(tmp_path / "checkpoints") as store:
        path = store.save(Entries(tensors), step=1)
    assert export(path, "--to", tmp_path / "half.safetensors", "--dtype", "bf16") == 0
    found = load_file(tmp_path / "half.safetensors")
    assert torch.equal(found["w"], tensors["model/w"].bfloat16())
    assert found["count"].dtype == torch.int64


MEMORY = """
import resource, sys
from camshaft.cli import guard
from camshaft.export import main
import torch, camshaft.exporting, camshaft.choosing
torch.ones(10).bfloat16()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert guard(main, sys.argv[1:]) == 0
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_memory_stays_below_two_tensors_however_large_the_checkpoint_is(tmp_path):
    count, size = 12, 32 << 18  # 32 MiB each, 384 in all
    with Store(tmp_path / "checkpoints") as store:
        path = store.save(Entries({f"model/{index}": torch.ones(size) for index in range(count)}), step=1)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path), "--to", str(tmp_path / "m.safetensors")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 2 * 32 + 16


def test_a_program_of_the_recipes_module_runs_anywhere(from_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("CAMSHAFT_TRUST", str(from_recipe.parents[2]))
    assert export(from_recipe, "--to", tmp_path / "net.pt2") == 0
    assert export(from_recipe, "--to", tmp_path / "net.safetensors") == 0
    weights = load_file(tmp_path / "net.safetensors")
    inputs = torch.randn(7, 4)
    found = torch.export.load(tmp_path / "net.pt2").module()(inputs)
    torch.testing.assert_close(found, inputs @ weights["layer.weight"].T + weights["layer.bias"])


def said(capsys, *words):
    code = export(*words)
    return code, capsys.readouterr().err.splitlines()[0]


def test_mistakes_are_told_and_nothing_is_overwritten(run, from_recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CAMSHAFT_TRUST", str(from_recipe.parents[2]))
    there = tmp_path / "there.safetensors"
    there.write_text("mine")
    code, line = said(capsys, run[0].run_dir, "--to", there)
    assert (code, line) == (2, f"CamshaftError: {there} exists.")
    assert there.read_text() == "mine"
    assert export(run[0].run_dir, "--to", there, "--force") == 0
    code, line = said(capsys, tmp_path, "--to", tmp_path / "a.safetensors")
    assert (code, line) == (2, f"CheckpointError: there is no checkpoint {str(tmp_path)!r}.")
    code, line = said(capsys, run[0].run_dir, "--to", tmp_path / "a.pt2")
    assert code == 2
    assert line.endswith("is of no run that a recipe started.")
    code, line = said(capsys, from_recipe, "--to", tmp_path / "folder", "--format", "hf")
    assert (code, line) == (2, "CheckpointError: Net holds 0 models of Transformers.")


def test_averages_that_are_not_there_are_told(tmp_path, capsys):
    with Store(tmp_path / "checkpoints") as store:
        path = store.save(Entries({"model/w": torch.zeros(2)}), step=1)
    code, line = said(capsys, path, "--to", tmp_path / "a.safetensors", "--ema")
    assert (code, line) == (2, f"CheckpointError: {path} holds no averages.")
    assert not (tmp_path / "a.safetensors").exists()


def test_a_damaged_checkpoint_is_not_exported(tmp_path, capsys):
    with Store(tmp_path / "checkpoints") as store:
        path = store.save(Entries({"model/w": torch.zeros(2)}), step=1)
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(bytes(content))
    code, line = said(capsys, path, "--to", tmp_path / "a.safetensors")
    assert code == 2
    assert "is damaged: model.safetensors was changed" in line
