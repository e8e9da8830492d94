"""The console prints what a person wants to read, and no more."""

import pytest
import torch
from rich.console import Console as Terminal

from camshaft import terminal
from camshaft.loggers.base import Record
from camshaft.loggers.console import Console


def record(kind, step=10, epoch=1, **values):
    return Record(kind, step, epoch, 0, 0.0, 0.0, values or {"loss": 0.123456})


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("validation", "validation step 10  epoch 2  loss 0.1235\n"),
        ("epoch", "epoch      step 10  epoch 2  loss 0.1235\n"),
        # After the last epoch: it belongs to none.
        ("test", "test       step 10  loss 0.1235\n"),
        # These are the progress bar's.
        ("step", ""),
    ],
)
def test_a_record_is_a_line(kind, line, capsys):
    Console().log_metrics(record(kind))
    assert capsys.readouterr().out == line


def test_training_steps_are_printed_when_asked(capsys):
    Console(steps=True).log_metrics(record("step"))
    assert capsys.readouterr().out == "step       step 10  epoch 2  loss 0.1235\n"


def test_a_text_is_indented_below_its_name_and_read_as_it_is(capsys):
    Console().log_text("sample", "To [bold]be[/bold]\nor not", 3)
    assert capsys.readouterr().out == "sample at step 3:\n  To [bold]be[/bold]\n  or not\n"


def test_an_image_and_hyper_parameters_print_nothing(capsys):
    Console().log_image("drawn", torch.zeros(1, 2, 2), 1)
    Console().log_hparams({"lr": 0.1}, {"loss": 1.0})
    assert capsys.readouterr().out == ""


MANY = {f"val/recognised_{digit}": 0.5 for digit in range(5)}


def test_a_long_record_is_broken_between_its_values_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "console", lambda: Terminal(force_terminal=True, width=60))
    Console().log_metrics(record("validation", **MANY))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "validation step 10  epoch 2  val/recognised_0 0.5",
        "           val/recognised_1 0.5  val/recognised_2 0.5",
        "           val/recognised_3 0.5  val/recognised_4 0.5",
    ]


def test_a_long_record_is_one_line_in_a_file(capsys):
    Console().log_metrics(record("validation", **MANY))
    assert len(capsys.readouterr().out.splitlines()) == 1
