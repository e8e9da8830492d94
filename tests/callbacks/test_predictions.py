"""Predictions stream to files, a row a sample, in the order of the data."""

import json

import numpy as np
import pytest
import torch

from camshaft.callbacks.predictions import PredictionWriter
from camshaft.errors import CallbackError, RecipeError
from camshaft.testing import Recorder, TinyData, TinyModule, tiny_run


class Predicts(TinyModule):
    """Return what was asked for, in training's evaluation too."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def predict_step(self, batch):
        return self.shape(self(batch[0]))


def write(tmp_path, shape, **options):
    """Train a step, then predict by hand with the writer; return its index and directory."""
    recorder = Recorder()
    torch.manual_seed(0)
    writer = PredictionWriter(str(tmp_path / "out"), **options)
    result = tiny_run(
        Predicts(shape), TinyData(22, batch_size=4), callbacks={"record": recorder, "writer": writer}, max_steps=1
    )
    state = recorder.state
    state.stage = "predict"
    batches = list(TinyData(22, batch_size=4).predict_dataloader())
    writer.on_validation_start(state)
    with torch.no_grad():
        outputs = [result.module.predict_step(batch) for batch in batches]
    for output in outputs:
        writer.on_validation_batch(state, output)
    writer.on_validation_end(state, {})
    return json.loads((tmp_path / "out" / "index.json").read_text()), tmp_path / "out", result.module, batches


def test_arrays_hold_a_row_a_sample_and_files_a_number_of_batches(tmp_path):
    index, folder, module, batches = write(tmp_path, lambda out: out, batches_per_file=2)
    assert [file["rows"] for file in index["files"]] == [[4, 4], [3]]
    assert index["samples"] == 11
    found = np.concatenate([np.load(folder / file["file"])["output"] for file in index["files"]])
    with torch.no_grad():
        expected = torch.cat([module(batch[0]) for batch in batches]).numpy()
    assert np.array_equal(found, expected)


def test_dicts_and_tuples_become_named_arrays(tmp_path):
    index, folder, *_ = write(tmp_path, lambda out: {"value": out, "positive": (out > 0).squeeze(1)})
    arrays = np.load(folder / index["files"][0]["file"])
    assert sorted(arrays) == ["positive", "value"]
    assert arrays["positive"].dtype == bool


def test_jsonl_is_a_line_a_sample(tmp_path):
    index, folder, *_ = write(tmp_path, lambda out: (out.bfloat16(), ["a"] * len(out)), format="jsonl")
    lines = [json.loads(line) for line in (folder / index["files"][0]["file"]).read_text().splitlines()]
    assert len(lines) == 11
    assert lines[0]["1"] == "a"


def test_a_file_of_an_earlier_run_does_not_stay(tmp_path):
    (tmp_path / "out").mkdir()
    old = tmp_path / "out" / "rank00000-000009.npz"
    old.write_bytes(b"old")
    other = tmp_path / "out" / "notes.txt"
    other.write_text("mine")
    write(tmp_path, lambda out: out)
    assert not old.exists()
    assert other.read_text() == "mine"


def test_another_index_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "index.json").write_text('{"mine": 1}')
    with pytest.raises(CallbackError, match=r"index\.json is no index of predictions"):
        write(tmp_path, lambda out: out)
    assert (tmp_path / "out" / "index.json").read_text() == '{"mine": 1}'


@pytest.mark.parametrize("shape", [lambda out: out.mean(), lambda out: None, lambda out: {"a": out, "b": out[:1]}])
def test_what_is_no_row_a_sample_is_refused(tmp_path, shape):
    with pytest.raises(CallbackError, match="one row a sample"):
        write(tmp_path, shape)


@pytest.mark.parametrize("options", [{"format": "csv"}, {"batches_per_file": 0}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(RecipeError, match="PredictionWriter has"):
        PredictionWriter(**options)
