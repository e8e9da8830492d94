"""What a person sees: the summary, the lines of progress, and the bar on a real terminal."""

import os
import pty
import re
import subprocess
import sys

import pytest
import torch
import torchmetrics

import camshaft
from camshaft.callbacks.progress import ProgressBar
from camshaft.callbacks.summary import ModelSummary
from camshaft.errors import RecipeError
from camshaft.testing import TinyData, TinyModule

QUIET = {"jsonl": None, "tensorboard": None, "console": None}


def printed(capsys, tmp_path, **settings):
    camshaft.run(TinyModule(), TinyData(), loggers=QUIET, runs_dir=tmp_path, device="cpu", checkpoint=False, **settings)
    return capsys.readouterr().out


def test_the_summary_counts_parameters_and_names_what_runs(capsys, tmp_path):
    lines = printed(capsys, tmp_path, max_steps=1).splitlines()
    rows = {line.split()[0]: line.split() for line in lines[:3]}
    assert rows["net"][1:5] == ["Sequential", "49", "49", "float32"]
    assert rows["total"][1:4] == ["TinyModule", "49", "49"]
    assert any(line.startswith("single on cpu") for line in lines)


class Measured(TinyModule):
    def __init__(self):
        super().__init__()
        self.measure = torchmetrics.MeanSquaredError()


def test_metrics_are_no_part_of_the_summary(capsys, tmp_path):
    settings = {"loggers": QUIET, "runs_dir": tmp_path, "device": "cpu", "checkpoint": False, "max_steps": 1}
    camshaft.run(Measured(), TinyData(), **settings)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:3]] == ["name", "net", "total"]


def test_lines_name_epoch_step_and_values_where_there_is_no_terminal(capsys, tmp_path):
    lines = [line for line in printed(capsys, tmp_path, max_epochs=2, log_every=3).splitlines() if "  step " in line]
    steps = [re.search(r"epoch (\d)/2  step (\d+)/12", line) for line in lines]
    assert [match.groups() for match in steps] == [("1", "3"), ("1", "6"), ("2", "9"), ("2", "12")]
    assert all("train/loss " in line for line in lines)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from ((torch.ones(4), torch.ones(1)) for _ in range(12))


def test_what_nobody_knows_the_length_of_is_counted_without_a_total(capsys, tmp_path):
    data = torch.utils.data.DataLoader(Endless(), batch_size=4)
    settings = {"loggers": QUIET, "runs_dir": tmp_path, "device": "cpu", "checkpoint": False}
    camshaft.run(TinyModule(), data, max_epochs=2, log_every=3, **settings)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert [re.match(r"epoch (\d)/2  step (\d+)  \S+ steps/s  train", line).groups() for line in lines] == [
        ("1", "3"),
        ("2", "6"),
    ]


def test_console_lines_count_epochs_as_the_bar_does(capsys, tmp_path):
    quiet = {"jsonl": None, "tensorboard": None}
    settings = {"runs_dir": tmp_path, "device": "cpu", "checkpoint": False}
    camshaft.run(TinyModule(), TinyData(test=True), max_epochs=2, loggers=quiet, **settings)
    lines = re.findall(r"^((?:validation|test) .*) (?:val|test)/loss", capsys.readouterr().out, re.MULTILINE)
    assert lines == ["validation step 6  epoch 1 ", "validation step 12  epoch 2 ", "test       step 12 "]


SCRIPT = """
import camshaft
from camshaft.testing import TinyData, TinyModule
quiet = {"jsonl": None, "tensorboard": None}
camshaft.run(TinyModule(), TinyData(400), loggers=quiet, runs_dir="runs", device="cpu", checkpoint=False, max_epochs=12)
"""


def test_a_terminal_gets_one_bar_that_is_redrawn(tmp_path):
    """A real pseudo-terminal: the bar is there, redrawn in place, and the last words come after it."""
    main, child = pty.openpty()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "140"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=child, stderr=child, stdin=child, cwd=tmp_path, env=environment
    )
    os.close(child)
    shown = b""
    try:
        while True:
            try:
                part = os.read(main, 4096)
            except OSError:
                break
            if not part:
                break
            shown += part
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)
    text = shown.decode(errors="replace")
    assert "━" in text
    assert "epoch 12/12" in text
    assert "\x1b[2K" in text  # the line is erased and drawn again
    assert "Finished after 1200 steps, 12 epochs." in text
    assert text.rindex("Finished after") > text.rindex("━")


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: ModelSummary(depth=-1), "ModelSummary.depth is -1."),
        (lambda: ProgressBar(refresh_secs=0), "ProgressBar.refresh_secs is 0."),
    ],
)
def test_options_that_make_no_sense_are_refused(make, line):
    with pytest.raises(RecipeError) as error:
        make()
    assert str(error.value).splitlines()[0] == line
