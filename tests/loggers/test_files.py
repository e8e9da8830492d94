"""What loggers write can be read back: by json, by csv, and by TensorBoard itself."""

import csv
import json
import math
import subprocess
import sys
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from camshaft.errors import RecipeError
from camshaft.loggers.base import Logger, Record, Run, Sinks
from camshaft.loggers.csv import CSV
from camshaft.loggers.jsonl import JSONL
from camshaft.loggers.tensorboard import TensorBoard
from camshaft.testing import StopAt, TinyData, TinyModule, tiny_run


def record(step, kind="step", **values):
    return Record(kind, step, 0, 4 * step, 0.0, 0.5, values)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def opened(logger, directory, step=0, **run):
    logger.open(Run("a run", directory, resumed_step=step, **run))
    return logger


def test_jsonl_keeps_numbers_texts_and_the_end(tmp_path):
    logger = opened(JSONL(), tmp_path)
    logger.log_metrics(record(1, loss=0.1 + 0.2, bad=math.nan, worse=-math.inf))
    logger.log_text("sample", "Übermut\nzwei", 1)
    logger.log_hparams({"lr": 0.1}, {"val": 1.0})
    logger.close("finished")
    found = lines(tmp_path / "metrics.jsonl")
    assert found[0]["values"] == {"loss": 0.1 + 0.2, "bad": "NaN", "worse": "-Infinity"}
    assert found[1]["text"] == "Übermut\nzwei"
    assert found[2] == {"kind": "hparams", "step": 1, "hparams": {"lr": 0.1}, "metrics": {"val": 1.0}}
    assert found[3] == {"kind": "status", "step": 1, "status": "finished"}


def test_csv_gives_every_name_a_column_however_late_it_comes(tmp_path):
    logger = opened(CSV(), tmp_path)
    logger.log_metrics(record(1, loss=1.0))
    logger.log_metrics(record(2, loss=0.5, late=2.0))
    logger.close("finished")
    found = rows(tmp_path / "metrics.csv")
    assert [row["late"] for row in found] == ["", "2.0"]
    assert [float(row["loss"]) for row in found] == [1.0, 0.5]


@pytest.mark.parametrize(("kind", "name", "read"), [(JSONL, "metrics.jsonl", lines), (CSV, "metrics.csv", rows)])
def test_a_resumed_run_writes_no_step_twice_and_drops_a_line_that_was_cut(tmp_path, kind, name, read):
    first = opened(kind(), tmp_path)
    for step in (1, 2, 3):
        first.log_metrics(record(step, loss=float(step)))
    first.close("failed")
    # A kill in the middle of a line.
    with (tmp_path / name).open("a", encoding="utf-8") as file:
        file.write('{"kind": "step", "st' if kind is JSONL else "step,4,0")
    second = opened(kind(), tmp_path, step=2)
    second.log_metrics(record(3, loss=30.0))
    second.close("finished")
    steps = [int(entry["step"]) for entry in read(tmp_path / name) if entry["kind"] == "step"]
    assert steps == [1, 2, 3]


def test_a_line_whose_end_alone_was_cut_off_is_kept_apart_from_the_next(tmp_path):
    first = opened(JSONL(), tmp_path)
    first.log_metrics(record(1, loss=1.0))
    first.log_metrics(record(2, loss=2.0))
    first.close("failed")
    path = tmp_path / "metrics.jsonl"
    # The line of the end is gone too.
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    path.write_text(path.read_text().removesuffix("\n"))
    second = opened(JSONL(), tmp_path, step=2)
    second.log_metrics(record(3, loss=3.0))
    second.close("finished")
    assert [entry["step"] for entry in lines(path) if entry["kind"] == "step"] == [1, 2, 3]


def test_a_run_that_starts_anew_in_its_directory_starts_with_empty_files(tmp_path):
    for kind, name, read in ((JSONL, "metrics.jsonl", lines), (CSV, "metrics.csv", rows)):
        first = opened(kind(), tmp_path)
        first.log_metrics(record(1, loss=1.0))
        first.close("failed")
        second = opened(kind(), tmp_path)
        second.log_metrics(record(1, loss=2.0))
        second.close("finished")
        assert len([entry for entry in read(tmp_path / name) if entry["kind"] == "step"]) == 1


def test_names_of_columns_that_go_along_cannot_be_taken_by_a_metric(tmp_path):
    logger = opened(CSV(), tmp_path)
    logger.log_metrics(Record("step", 7, 0, 28, 0.0, 0.5, {"step": 99.0, "epoch": 99.0, "a,b": 1.0, 'c"d': 2.0}))
    logger.close("finished")
    (row,) = rows(tmp_path / "metrics.csv")
    assert (row["step"], row["epoch"], row["a,b"], row['c"d']) == ("7", "0", "1.0", "2.0")


def test_a_run_without_a_directory_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in (JSONL, CSV, TensorBoard):
        logger = opened(kind(), None)
        logger.log_metrics(record(1, loss=1.0))
        logger.log_text("a", "b", 1)
        logger.log_image("a", torch.zeros(1, 2, 2), 1)
        logger.log_hparams({"a": 1}, {})
        logger.close("finished")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
from pathlib import Path
from camshaft.loggers.base import Record, Run
from camshaft.loggers.csv import CSV
from camshaft.loggers.jsonl import JSONL
from camshaft.loggers.tensorboard import TensorBoard

loggers = [CSV(), JSONL(), TensorBoard()]
for logger in loggers:
    logger.open(Run("a run", Path(sys.argv[1])))
for step in range(1, 10_000_000):
    # A new name now and then makes the table be written again.
    values = {"loss": 1.0 / step, **({f"late_{step}": 1.0} if step % 40 == 0 and step < 400 else {})}
    for logger in loggers:
        logger.log_metrics(Record("step", step, 0, step, 0.0, 0.5, values))
    if step == 50:
        print("ready", flush=True)
"""


def test_a_kill_leaves_whole_lines_that_a_resumed_run_goes_on_with(tmp_path):
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE)
        try:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(0.003 * attempt)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        assert (folder / "metrics.jsonl").read_text().count("\n") >= 50
        # What the kill cut off is at most the last line, and TensorBoard reads what comes before.
        for line in (folder / "metrics.jsonl").read_text().split("\n")[:-1]:
            json.loads(line)
        assert [event.step for event in tensorboard(folder).Scalars("loss")][:50] == list(range(1, 51))
        for kind, name, read in ((JSONL, "metrics.jsonl", lines), (CSV, "metrics.csv", rows)):
            again = opened(kind(), folder, step=45)
            again.log_metrics(record(46, loss=1.0))
            again.close("finished")
            found = [entry for entry in read(folder / name) if entry["kind"] == "step"]
            assert [int(entry["step"]) for entry in found] == list(range(1, 47))


def tensorboard(directory):
    read = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    read.Reload()
    return read


def test_tensorboard_reads_scalars_texts_images_and_hyper_parameters(tmp_path):
    logger = opened(TensorBoard(), tmp_path, recipe="max_steps: 3")
    logger.log_metrics(record(1, loss=1.5))
    logger.log_text("sample", "to be\nor not", 1)
    logger.log_text("table", "```\na\nb\n```", 1)
    logger.log_image("digits", torch.rand(3, 4, 5), 1)
    logger.log_hparams({"lr": 0.1, "name": "x"}, {"loss": 1.5})
    logger.close("finished")
    read = tensorboard(tmp_path)
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, 1.5)]
    assert read.Scalars("samples")[0].value == 4
    assert b"max_steps: 3" in read.Tensors("recipe")[0].tensor_proto.string_val[0]
    # Markdown would join the lines.
    assert read.Tensors("sample")[0].tensor_proto.string_val == [b"to be  \nor not"]
    assert read.Tensors("table")[0].tensor_proto.string_val == [b"```\na\nb\n```"]
    assert (read.Images("digits")[0].width, read.Images("digits")[0].height) == (5, 4)
    assert set(read.summary_metadata) >= {"_hparams_/session_start_info", "_hparams_/experiment"}


def test_tensorboard_shows_a_resumed_run_as_one_without_steps_twice(tmp_path):
    settings = {"runs_dir": tmp_path, "checkpoint": {"every": None}, "log_every": 1, "max_steps": 6}
    torch.manual_seed(0)
    loggers = {"tensorboard": TensorBoard(), "jsonl": JSONL()}
    first = tiny_run(TinyModule(), TinyData(), callbacks={"stop": StopAt(3)}, loggers=loggers, **settings)
    # What a killed run had written beyond its checkpoint.
    stray = opened(TensorBoard(), first.run_dir, step=3)
    stray.log_metrics(record(4, **{"train/loss": 99.0}))
    stray.close("failed")
    loggers = {"tensorboard": TensorBoard(), "jsonl": JSONL()}
    tiny_run(TinyModule(), TinyData(), loggers=loggers, resume=str(first.run_dir), **settings)
    scalars = tensorboard(first.run_dir).Scalars("train/loss")
    assert [event.step for event in scalars] == [1, 2, 3, 4, 5, 6]
    assert all(event.value < 99 for event in scalars)
    written = [e["step"] for e in lines(first.run_dir / "metrics.jsonl") if e["kind"] == "step"]
    assert written == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("kind", [JSONL, CSV])
@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/x", "a/b", "a\\b", "a\0b"])
def test_a_name_that_leads_out_of_the_runs_directory_is_refused(kind, name):
    with pytest.raises(RecipeError) as error:
        kind(name)
    assert str(error.value) == (
        f"{kind.__name__}.filename is {name!r}.\n"
        "  The file lies in the run's directory, and replaces what has its name. "
        "Give a name without a folder, such as metrics.jsonl."
    )


class Broken(Logger):
    def __init__(self, on_error):
        self.on_error = on_error

    def log_metrics(self, record):
        raise OSError("the tracker is gone")


def test_a_broken_logger_is_dropped_with_a_warning_or_ends_the_run_if_it_says_so():
    with pytest.warns(UserWarning, match="logger 'broken' failed and is off from here on: OSError: the tracker is"):
        assert tiny_run(loggers={"broken": Broken("disable")}, log_every=1).status == "finished"
    with pytest.raises(OSError, match="the tracker is gone"):
        tiny_run(loggers={"broken": Broken("raise")}, log_every=1)


def test_sinks_hand_everything_to_all():
    class Count(Logger):
        calls = 0

        def log_text(self, name, text, step):
            self.calls += 1

    counts = {"a": Count(), "b": Count()}
    Sinks(counts).log_text("x", "y", 1)
    assert [count.calls for count in counts.values()] == [1, 1]
