"""The events of a run are those that docs/events.md documents, in that order, whole."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from camshaft.callback import EVENTS, Callback
from camshaft.checkpoint import Store
from camshaft.recipe.registry import CALLBACKS
from camshaft.session import execute
from camshaft.testing import Recorder, StopAt, TinyData, TinyModule, tiny_run

DOCS = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
ORDERS = [
    [line.split()[0] for line in block.splitlines()] for block in re.findall(r"```events\n(.*?)```", DOCS, re.DOTALL)
]
TABLE = re.findall(r"^\| `(on_\w+)\((.*?)\)` \|.*\| (\w+) \|$", DOCS, re.MULTILINE)
RUN = {"accumulate": 2, "limit_train_batches": 4, "limit_validation_batches": 1, "max_epochs": 2, "checkpoint": {}}


class Fail(Callback):
    """Raise in the gradients of one step."""

    def __init__(self, step):
        self.step = step

    def on_gradients(self, state):
        if state.progress.step + 1 == self.step:
            raise ArithmeticError("as asked")


def load(name):
    module, _, attribute = CALLBACKS[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_the_table_has_every_event_with_its_arguments_in_order():
    expected = [(name, list(inspect.signature(getattr(Callback, name)).parameters)[1:]) for name in EVENTS]
    assert [(name, arguments.split(", ")) for name, arguments, _ in TABLE] == expected


@pytest.mark.parametrize(("event", "user"), [(event, user) for event, _, user in TABLE])
def test_every_event_has_the_bundled_listener_that_the_table_names(event, user):
    assert getattr(load(user), event) is not getattr(Callback, event)


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """Run two epochs with validation, accumulation and checkpoints, up to an exception in step 4."""
    place, recorder = tmp_path_factory.mktemp("runs"), Recorder()
    with pytest.raises(ArithmeticError, match="as asked"):
        tiny_run(data=TinyData(16), callbacks={"record": recorder, "fail": Fail(4)}, runs_dir=place, **RUN)
    return next((place / "tinymodule").iterdir()), recorder


def test_a_run_with_validation_accumulation_checkpoint_and_exception_fires_the_documented_order(failed):
    assert failed[1].names == ORDERS[0]


def test_progress_counts_a_step_from_its_on_step_on(failed):
    steps = [step for event, step in failed[1].events if event in ("on_step_start", "on_gradients", "on_step")]
    assert steps == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_the_checkpoint_of_an_exception_is_of_the_last_whole_step_inexact_and_replaces_none(failed):
    exact = {found.manifest.step: found.manifest.exact for found in Store(failed[0] / "checkpoints").checkpoints()}
    assert exact == {2: True, 3: False}


def resumed(path, **changes):
    recorder = Recorder()
    settings = {**RUN, "max_epochs": None, "resume": str(path), **changes}
    tiny_run(data=TinyData(16), callbacks={"record": recorder}, **settings)
    return recorder.names


def test_a_continued_run_fires_the_documented_order(tmp_path):
    first = tiny_run(data=TinyData(16), runs_dir=tmp_path, **{**RUN, "max_epochs": 1})
    assert resumed(first.run_dir, max_steps=3) == ORDERS[1]


def test_a_run_resumed_inside_an_epoch_does_not_begin_it_again(tmp_path):
    stop = {"stop": StopAt(3)}
    first = tiny_run(data=TinyData(16), callbacks=stop, runs_dir=tmp_path, **RUN)
    assert resumed(first.run_dir, max_steps=4)[3:5] == ["on_fit_start", "on_step_start"]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_fires_the_documented_order(stage, tmp_path):
    from camshaft.direct import direct_parts

    trained = tiny_run(data=TinyData(8, test=True), runs_dir=tmp_path, checkpoint={}).run_dir
    recorder = Recorder()
    parts = direct_parts(
        TinyModule(), TinyData(8, test=True), strategy="single", name="tiny",
        callbacks={"record": recorder, "progress": None, "summary": None}, loggers={},
        settings={"device": "cpu", "runs_dir": tmp_path, "max_epochs": 1},
    )  # fmt: skip
    execute(parts, stage, str(trained))
    assert recorder.names == ORDERS[2]


def test_the_test_split_after_a_fit_is_part_of_it():
    recorder = Recorder(only=["on_validation_start", "on_validation_end", "on_fit_end"])
    result = tiny_run(data=TinyData(8, test=True), callbacks={"record": recorder}, validate=None)
    assert recorder.names == ["on_validation_start", "on_validation_end", "on_fit_end"]
    assert "test/loss" in result.metrics


def test_a_failure_in_the_test_split_is_one_of_the_run():
    class Bad(TinyModule):
        def test_step(self, batch):
            raise ArithmeticError("as asked")

    recorder = Recorder(only=["on_exception", "on_fit_end"])
    with pytest.raises(ArithmeticError):
        tiny_run(Bad(), TinyData(8, test=True), callbacks={"record": recorder})
    assert recorder.names == ["on_exception", "on_fit_end"]


def test_validation_before_training_comes_before_the_first_epoch_and_the_trial_batches_fire_nothing():
    recorder = Recorder()
    tiny_run(data=TinyData(4), callbacks={"record": recorder}, validate={"at_start": True})
    assert recorder.names[2:7] == [
        "on_fit_start", "on_validation_start", "on_validation_batch", "on_validation_end", "on_epoch_start",
    ]  # fmt: skip


def test_what_a_callback_logs_at_the_end_of_an_epoch_belongs_to_its_last_step():
    class Note(Callback):
        def on_epoch_end(self, state):
            state.metrics.log("own/note", state.progress.epoch)

    result = tiny_run(data=TinyData(8), callbacks={"note": Note()}, max_epochs=2)
    assert result.metrics["own/note"] == 1.0
