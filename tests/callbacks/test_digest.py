"""Lines of two runs are equal where the runs are, and differ in what differs."""

import json

import pytest
import torch

from camshaft.callback import Callback
from camshaft.callbacks.digest import Digest
from camshaft.errors import CallbackError
from camshaft.testing import StopAt, TinyData, TinyModule, tiny_run


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def fit(path, more=None, max_steps=8, **settings):
    """Train a module with dropout and momentum, so that everything that a line holds changes each step."""
    torch.manual_seed(0)
    module = TinyModule(
        dropout=0.1, configure=lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    )
    callbacks = {**(more or {}), "digest": Digest(str(path))}
    result = tiny_run(module, TinyData(22), callbacks=callbacks, max_steps=max_steps, **settings)
    return lines(path), result


def test_two_equal_runs_have_equal_lines_and_every_step_another(tmp_path):
    first, _ = fit(tmp_path / "a.jsonl")
    assert fit(tmp_path / "b.jsonl")[0] == first
    assert [line["step"] for line in first] == list(range(1, 9))
    for part in ("samples", "weights", "optimizer", "streams"):
        assert len({line[part] for line in first[:5]}) == 5, part


def test_a_resumed_run_goes_on_with_the_lines_of_the_whole(tmp_path):
    whole, _ = fit(tmp_path / "whole.jsonl")
    settings = {"runs_dir": tmp_path, "checkpoint": {"every": None}}
    _, stopped = fit(tmp_path / "parts.jsonl", {"stop": StopAt(3)}, **settings)
    assert fit(tmp_path / "parts.jsonl", resume=str(stopped.run_dir), **settings)[0] == whole


def test_a_file_that_holds_something_else_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine\n")
    with pytest.raises(CallbackError) as error:
        fit(path)
    assert str(error.value).splitlines()[0] == (
        f"callbacks.digest.path is {str(path)!r}, which holds something else than digests."
    )
    assert path.read_text() == "mine\n"
    with pytest.raises(CallbackError, match="holds something else"):
        fit(tmp_path)
    with pytest.raises(CallbackError, match="there is no directory"):
        fit(tmp_path / "nowhere" / "digest")


class Touch(Callback):
    """Change one thing after a step."""

    def __init__(self, what):
        self.what = what

    def on_step(self, state):
        if state.progress.step != 3:
            return
        with torch.no_grad():
            if self.what == "weights":
                next(state.module.parameters()).view(-1)[0].add_(1e-6)
            elif self.what == "optimizer":
                next(iter(state.optimizers[0].state.values()))["momentum_buffer"].view(-1)[0].add_(1e-6)
            else:
                torch.rand(())


def test_the_smallest_difference_shows_where_it_is(tmp_path):
    whole, _ = fit(tmp_path / "whole.jsonl")
    for what in ("weights", "optimizer", "streams"):
        found, _ = fit(tmp_path / f"{what}.jsonl", {"touch": Touch(what)}, max_steps=3)
        assert found[:2] == whole[:2]
        assert {name for name in found[2] if found[2][name] != whole[2][name]} == {what}
