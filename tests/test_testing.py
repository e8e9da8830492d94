"""What camshaft.testing gives to the tests of others: recorders, tiny parts, processes, and checks of contracts."""

import multiprocessing
import os
import time

import pytest
import torch

from camshaft import Callback, DataError, StateError
from camshaft.callbacks.clip import ClipGradients
from camshaft.callbacks.ema import EMA
from camshaft.callbacks.stopping import EarlyStopping
from camshaft.strategies.single import Single
from camshaft.testing import (
    ManualTiny,
    Recorder,
    StopAt,
    TinyData,
    TinyIterable,
    TinyModule,
    check_callback,
    check_strategy,
    run_processes,
    tiny_run,
)

# -- recorders and tiny parts


def test_a_recorder_keeps_events_with_their_steps_and_knows_the_state():
    recorder = Recorder(only=["on_step", "on_fit_end"])
    result = tiny_run(TinyModule(), TinyData(8), callbacks={"record": recorder})
    assert recorder.events == [("on_step", 1), ("on_step", 2), ("on_fit_end", 2)]
    assert recorder.names == ["on_step", "on_step", "on_fit_end"]
    assert recorder.state.module is result.module


def test_recorders_that_share_a_list_say_who_heard_what():
    heard = []
    both = {name: Recorder(only=["on_step"], into=heard, label=name) for name in ("a", "b")}
    tiny_run(data=TinyData(4), callbacks=both)
    assert heard == [("a.on_step", 1), ("b.on_step", 1)]


@pytest.mark.parametrize("module", [TinyModule, ManualTiny])
@pytest.mark.parametrize("data", [TinyData, TinyIterable])
def test_tiny_parts_learn(module, data):
    torch.manual_seed(0)
    losses = []

    class Keep(Callback):
        def on_backward(self, state, loss):
            losses.append(loss.item())

    tiny_run(module(), data(), callbacks={"keep": Keep()}, max_steps=60)
    assert sum(losses[-8:]) < 0.5 * sum(losses[:8])


def test_a_tiny_run_is_silent_leaves_nothing_and_is_the_same_each_time(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = tiny_run(), tiny_run()
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
    assert first.metrics == second.metrics
    assert not first.run_dir.exists()
    for own, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(own, other)


def test_a_tiny_run_may_keep_its_directory(tmp_path):
    result = tiny_run(callbacks={"stop": StopAt(2)}, runs_dir=tmp_path, checkpoint={})
    assert (result.status, result.step) == ("stopped", 2)
    assert (result.run_dir / "checkpoints").is_dir()


# -- processes


def rank_and_world(offset):
    return int(os.environ["RANK"]) + offset, int(os.environ["WORLD_SIZE"]), torch.get_num_threads()


def fail_on_one():
    if os.environ["RANK"] == "1":
        raise StateError("rank 1 is wrong.", why="It matters.")
    time.sleep(30)


def fail_strangely():
    raise StrangeError(lambda: None)


def sleep():
    time.sleep(30)


class StrangeError(Exception):
    pass


@pytest.mark.distributed
def test_processes_return_in_the_order_of_ranks():
    assert run_processes(2, rank_and_world, 10) == [(10, 2, 1), (11, 2, 1)]


@pytest.mark.distributed
def default_start_method():
    return multiprocessing.get_start_method()


def test_loader_workers_start_in_them_as_anywhere_else():
    assert run_processes(1, default_start_method) == [multiprocessing.get_context().get_start_method()]


def test_the_first_failing_rank_is_raised_whole_and_the_others_are_ended():
    start = time.monotonic()
    with pytest.raises(StateError) as caught:
        run_processes(2, fail_on_one)
    assert (caught.value.what, caught.value.why) == ("rank 1 is wrong.", "It matters.")
    assert "rank 1 of 2 raised first:" in str(caught.value.__cause__)
    assert "fail_on_one" in str(caught.value.__cause__)
    assert time.monotonic() - start < 20


@pytest.mark.distributed
def test_an_error_that_cannot_travel_is_told_as_text():
    with pytest.raises(RuntimeError, match=r"^StrangeError: <function "):
        run_processes(1, fail_strangely)


@pytest.mark.distributed
def test_an_end_without_a_word_is_noticed():
    with pytest.raises(RuntimeError, match="rank 0 ended without a result, as after a signal"):
        run_processes(1, os._exit, 3)


@pytest.mark.distributed
def test_processes_that_take_too_long_are_ended():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[0\] are not done after 1 s"):
        run_processes(1, sleep, timeout_s=1)
    assert time.monotonic() - start < 10


# -- contracts of callbacks


@pytest.mark.parametrize("factory", [lambda: EMA(0.9), lambda: EarlyStopping("val/loss", patience=9)])
def test_callbacks_that_keep_their_contract_pass(factory):
    check_callback(factory)


def test_a_callback_may_say_that_it_changes_training():
    check_callback(lambda: ClipGradients(0.01), changes_training=True)
    with pytest.raises(AssertionError, match="a run without the callback has other weights"):
        check_callback(lambda: ClipGradients(0.01))


class Counting(Callback):
    """Count steps; subclasses break one promise each."""

    def __init__(self):
        self.steps = 0

    def on_step(self, state):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Forgets(Counting):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class NoJson(Counting):
    def state_dict(self):
        return {"steps": (self.steps,)}

    def load_state_dict(self, state):
        self.steps = state["steps"][0]


class LosesIt(Counting):
    def load_state_dict(self, state):
        self.steps = 0


class Jumps(Counting):
    """Change the weights by a count that it does not keep."""

    def on_step(self, state):
        super().on_step(state)
        with torch.no_grad():
            next(state.module.parameters()).add_(0.01 * self.steps)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_callback_that_counts_keeps_its_contract():
    check_callback(Counting)
    check_callback(Forgets)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoJson, "state_dict changes when it is written as JSON"),
        (LosesIt, r"load_state_dict gave .* back, not"),
    ],
)
def test_a_callback_that_breaks_a_promise_is_told_which(kind, message):
    with pytest.raises(AssertionError, match=message):
        check_callback(kind)


def test_a_callback_whose_resumed_run_differs_is_told_so():
    with pytest.raises(AssertionError, match=r"a resumed run ends with other weights: net\.0\.weight"):
        check_callback(Jumps, changes_training=True)


# -- contracts of strategies


class NoClipping(Single):
    def clip_grad_norm(self, max_norm, parameters=None):
        return super().clip_grad_norm(1e9, parameters)


class KeepsSwapped(Single):
    def swapped(self, tensors):
        return _swap_for_good(self, tensors)


class _swap_for_good:  # noqa: N801 - stands for a context manager made by a function
    def __init__(self, strategy, tensors):
        self.strategy, self.tensors = strategy, tensors

    def __enter__(self):
        for name, value in self.strategy.named_local():
            value.copy_(self.tensors[name])

    def __exit__(self, *error):
        pass


def no_clipping():
    return NoClipping("cpu")


def keeps_swapped():
    return KeepsSwapped("cpu")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (no_clipping, r"step 2: losses .*, and single has "),
        (keeps_swapped, r"after swapped\(\), these differ: enter"),
    ],
    ids=["without clipping", "without swapping back"],
)
def test_a_strategy_that_breaks_its_contract_is_told_where(factory, message):
    with pytest.raises(AssertionError, match=message):
        check_strategy(factory)


def test_data_that_is_refused_is_refused_in_a_tiny_run_too():
    with pytest.raises(DataError, match="train_dataloader is empty"):
        tiny_run(data=[])
