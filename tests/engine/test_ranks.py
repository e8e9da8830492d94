"""Several ranks act as one: they do what one of them asks, and train what one process trains on the joined batch."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from camshaft import Module
from camshaft.callback import Callback, main_process_only
from camshaft.callbacks.ema import EMA
from camshaft.testing import Recorder, TinyData, TinyModule, run_processes, tiny_run
from camshaft.testing.tiny import FEATURES, tiny_set

pytestmark = pytest.mark.distributed
WORLD = 2


class AskAlone(Callback):
    """Ask for one thing, once, on the last rank alone."""

    def __init__(self, request, step):
        self.request, self.step = request, step

    def on_step(self, state):
        if state.progress.step == self.step and state.strategy.rank == state.strategy.world_size - 1:
            getattr(state.control, self.request)(*(["as asked"] if self.request != "validate" else []))


class AskTogether(Callback):
    """Ask to stop on every rank, for a reason that all know."""

    def on_step(self, state):
        if state.progress.step == 3:
            state.control.stop("as asked", everywhere=True)


class Notes(Callback):
    """Count what the main process alone hears, and keep the metrics of validations."""

    def __init__(self):
        self.main, self.metrics, self.progress = 0, [], None

    def on_fit_start(self, state):
        self.progress = state.progress

    @main_process_only
    def on_step(self, state):
        self.main += 1

    def on_validation_end(self, state, metrics):
        self.metrics.append(metrics)


class Tokens(Module):
    """A loss over a different number of tokens a batch and rank."""

    def __init__(self, pairs):
        super().__init__()
        self.layer, self.pairs = nn.Linear(FEATURES, 1), pairs

    def training_step(self, batch):
        inputs, targets, mask = batch
        total = (((self.layer(inputs) - targets) ** 2).squeeze(1) * mask).sum()
        return (total, mask.sum()) if self.pairs else total / mask.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Weighed(Tokens):
    def batch_weight(self, batch):
        return batch[2].sum()


def token_loader(batch_size):
    inputs, targets = tiny_set(23).tensors
    mask = (torch.arange(23) % 3 != 1).float()
    return DataLoader(list(zip(inputs, targets, mask, strict=True)), batch_size=batch_size)


def outcome(module=None, data=None, size=4, **settings):
    """Train on this rank and return what matters; ``size`` is the batch of a rank."""
    notes, recorder, ema = Notes(), Recorder(), EMA(0.9)
    callbacks = {"notes": notes, "record": recorder, "ema": ema, **settings.pop("callbacks", {})}
    torch.manual_seed(0)
    module = TinyModule() if module is None else module()
    data = TinyData(23, batch_size=size) if data is None else data(size)
    result = tiny_run(module, data, callbacks=callbacks, **settings)
    weights = {name: value.detach().clone() for name, value in result.module.state_dict().items()}
    progress = notes.progress
    counters = (progress.step, progress.samples, progress.tokens, progress.skipped_steps, progress.epoch)
    averages = {name: value.clone() for name, value in ema.averages.items()}
    loss = result.metrics["train/loss"]
    return weights, averages, counters, recorder.events, notes.metrics, (notes.main, result.status), loss


SCENARIOS = {
    "plain": {"max_epochs": 2, "accumulate": 2},
    "pairs": {"module": lambda: Tokens(pairs=True), "data": token_loader, "accumulate": 2, "max_epochs": 2},
    "weighed": {"module": lambda: Weighed(pairs=False), "data": token_loader, "accumulate": 2, "max_epochs": 2},
}


def scenarios(**settings):
    return {name: outcome(**{**scenario, **settings}) for name, scenario in SCENARIOS.items()}


def on_a_rank():
    """Run every scenario on this rank, one after the other, and return what each left."""
    found = scenarios(strategy="ddp", size=4)
    for request in ("stop", "save", "validate"):
        callbacks = {"ask": AskAlone(request, 3)}
        settings = {"validate": "100 steps"} if request == "validate" else {"validate": None}
        if request == "save":
            settings["checkpoint"] = {"every": None, "at_end": False}
        found[request] = outcome(callbacks=callbacks, strategy="ddp", max_steps=100, **settings)
    found["together"] = outcome(callbacks={"ask": AskTogether()}, strategy="ddp", max_steps=100, validate=None)
    none_on = {1} if os.environ["RANK"] == "1" else ()
    found["none"] = outcome(lambda: TinyModule(none_on=none_on), strategy="ddp", validate=None)
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_processes(WORLD, on_a_rank, timeout_s=120)


@pytest.fixture(scope="module")
def alone():
    return scenarios(size=4 * WORLD)


def far(left, right):
    return max(float((left[name] - right[name]).norm() / right[name].norm()) for name in right)


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_train_what_one_process_trains_on_the_joined_batch(ranks, alone, name):
    # 23 samples: the last round is short, and spread over the ranks as evenly as it goes.
    for rank in ranks:
        weights, averages, counters, *_, loss = rank[name]
        assert far(weights, alone[name][0]) < 1e-6
        assert far(averages, alone[name][1]) < 1e-6
        assert counters == alone[name][2]
        assert loss == pytest.approx(alone[name][6], rel=1e-6)


def test_metrics_are_the_same_on_every_rank_and_those_of_one_process(ranks, alone):
    first, second = (rank["plain"][4] for rank in ranks)
    assert first == second
    assert [m["val/loss"] for m in first] == pytest.approx([m["val/loss"] for m in alone["plain"][4]], rel=1e-6)


def test_every_rank_fires_the_same_events_and_the_main_process_hears_its_own(ranks):
    first, second = (rank["plain"] for rank in ranks)
    assert first[3] == second[3]
    assert (first[5][0], second[5][0]) == (first[2][0], 0)


@pytest.mark.parametrize(
    ("request_of_one", "event"),
    [("stop", "on_fit_end"), ("save", "on_checkpoint_saved"), ("validate", "on_validation_end")],
)
def test_what_one_rank_asks_all_do_at_the_same_boundary_soon(ranks, request_of_one, event):
    first, second = (rank[request_of_one] for rank in ranks)
    assert first[3] == second[3]
    steps = [step for name, step in first[3] if name == event]
    assert steps[0] in range(8, 17)
    assert first[5][1] == ("stopped" if request_of_one == "stop" else "finished")


def test_what_all_ranks_ask_takes_effect_at_once(ranks):
    assert [rank["together"][2][0] for rank in ranks] == [3, 3]


def test_a_rank_without_a_loss_takes_part_in_the_step(ranks):
    first, second = (rank["none"] for rank in ranks)
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    assert first[2] == second[2] == (3, 23, 0, 0, 1)
