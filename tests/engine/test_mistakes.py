"""Every mistake gets one clear error that says what, why and how to fix, before any step is taken."""

import os

import pytest
import torch
from torch.utils.data import DataLoader

from camshaft import Callback, Module, run
from camshaft.callbacks.ema import EMA
from camshaft.callbacks.finite import FiniteLoss
from camshaft.callbacks.stopping import EarlyStopping
from camshaft.errors import CamshaftError, LossError
from camshaft.recipe import load
from camshaft.schedule import Schedule
from camshaft.testing import Recorder, TinyData, TinyModule, tiny_run


class NoStep(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)


class NoOptimizer(TinyModule):
    def configure_optimizers(self):
        return None


class Frozen(TinyModule):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


def returns(value):
    """Return a module whose training step returns what ``value`` makes of it and the batch."""
    return type("Own", (TinyModule,), {"training_step": value})()


def elsewhere(module):
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def scheduled(callback, every):
    callback.schedule = Schedule.parse(every)
    return callback


MISTAKES = {
    "a module without a step": (
        {"module": NoStep()},
        "NoStep has no training_step.\n  There is nothing to train with. Write 'def training_step(self, batch)'.",
    ),
    "a module without an optimizer": (
        {"module": NoOptimizer()},
        ("NoOptimizer has no optimizer.\n"
        "  Nothing would be learned. Return one from configure_optimizers, or give the recipe "
        "'optimizer: {name: adamw, lr: 1.0e-3}'."),
    ),
    "an optimizer of something else": (
        {"module": TinyModule(configure=elsewhere)},
        ("SGD holds no parameter of TinyModule.\n"
        "  It would change something else, and the module would learn nothing. "
        "Make it in configure_optimizers from self.parameters()."),
    ),
    "an optimizer that needs a closure": (
        {"module": TinyModule(configure=lambda module: torch.optim.LBFGS(module.parameters(), lr=1))},
        ("LBFGS needs a closure that computes the loss again.\n"
        "  A step has one forward and backward for each of its micro-batches. "
        "Use an optimizer whose step takes no closure, such as AdamW."),
    ),
    "a module with nothing to train": (
        {"module": Frozen()},
        ("Frozen has no parameter that asks for a gradient.\n"
        "  There is nothing for an optimizer to change. Give it layers, or freeze less of it."),
    ),
    "a loss that is no scalar": (
        {"module": returns(lambda module, batch: module(batch[0]))},
        ("Own.training_step returned a loss of shape (4, 1).\n"
        "  Only a scalar has a gradient. Return its mean(), or (loss.sum(), weight)."),
    ),
    "a loss without a gradient": (
        {"module": returns(lambda module, batch: module(batch[0]).mean().detach())},
        ("Own.training_step returned a loss without a gradient.\n"
        "  It depends on no trainable parameter, or was detached, so nothing would learn. "
        "Compute it from the module's parameters, outside torch.no_grad()."),
    ),
    "a loss that is no tensor": (
        {"module": returns(lambda module, batch: 1.0)},
        ("Own.training_step returned a float.\n"
        "  Return the loss (a scalar tensor), a (sum, weight) pair, a dict with 'loss', or None to skip."),
    ),
    "a pair that is no pair": (
        {"module": returns(lambda module, batch: (1, 2, 3))},
        "Own.training_step returned a tuple of 3.\n  Return the loss, or (sum, weight).",
    ),
    "a pair whose sum has no gradient": (
        {"module": returns(lambda module, batch: (torch.ones(()), 3))},
        ("Own.training_step returned a loss without a gradient.\n"
        "  It depends on no trainable parameter, or was detached, so nothing would learn. "
        "Compute it from the module's parameters, outside torch.no_grad()."),
    ),
    "a loss that is not finite": (
        {"module": returns(lambda module, batch: module(batch[0]).mean() * float("nan"))},
        ("the loss is not finite at step 1.\n"
        "  Every later update would spread it through the weights. Lower the learning rate, clip gradients, or check "
        "the batch; callbacks.finite.policy=skip leaves such steps out, ignore goes on."),
    ),
    "no loader": (
        {"data": TinyData(), "limit_train_batches": 0},
        "limit_train_batches leaves no training batch.\n  Allow at least one.",
    ),
    "an empty loader": (
        {"data": DataLoader([], batch_size=2)},
        "train_dataloader is empty.\n  There is nothing to iterate. Check the dataset and its split.",
    ),
    "a loader that drops all it has": (
        {"data": TinyData(3, drop_last=True)},
        ("drop_last leaves nothing of 3 samples in batches of 4 over all ranks.\n"
        "  Make batch_size smaller, or set drop_last=False."),
    ),
    "data that is none": (
        {"data": 5},
        ("train_dataloader returned a int.\n"
        "  It cannot be iterated for batches. Return a torch DataLoader or an iterable of batches."),
    ),
    "an unknown argument": (
        {"max_step": 3},
        "camshaft.run has no argument 'max_step'.\n  It would be ignored. Did you mean 'max_steps'?",
    ),
    "a wrong type": (
        {"max_steps": "ten"},
        "camshaft.run: max_steps is 'ten', and must be a whole number or null.",
    ),
    "several mistakes": (
        {"accumulate": 0, "validate": "often"},
        ("camshaft.run has 2 mistakes.\n"
        "camshaft.run: accumulate is 0, and must be at least 1.\n  Nothing would ever be trained or shown.\n"
        "camshaft.run: validate: 'often' is not an interval.\n  Nothing would say when it is due. Write '500 steps', "
        "'2 epochs', '10 minutes', or a mapping such as {at: [100, 1000]}."),
    ),
    "an argument of a built-in callback": (
        {"checkpoint": {"evry": "1 epoch"}},
        ("camshaft.run: checkpoint.evry is not an argument of camshaft.callbacks.checkpoint.Checkpoint.\n"
        "  It would be ignored and every would stay '1 epoch'. Did you mean 'every'?"),
    ),
    "a batch that does not divide": (
        {"batch_size": 5, "accumulate": 2},
        ("camshaft.run: batch_size is 5, which accumulate (2) does not divide.\n"
        "  Micro-batches would differ in size. Use 4 or 6."),
    ),
    "a strategy that nobody knows": (
        {"strategy": "ddpp"},
        ("strategy 'ddpp' is unknown.\n  Did you mean 'ddp'? The strategies are single, ddp, fsdp, deepspeed, "
        "tensor_parallel, megatron, or an object of your own."),
    ),
    "a validation that never comes": (
        {"validate": "100 steps"},
        ("validate is 'every 100 steps', and the run plans 6 steps.\n"
        "  It would never validate. Validate more often, train longer, or set validate: null."),
    ),
    "a checkpoint that never comes": (
        {"checkpoint": {"every": "100 steps", "at_end": False}},
        ("Checkpoint.every is 'every 100 steps', and the run has 6 steps.\n"
        "  No checkpoint would ever be written. Save more often, or set at_end: true."),
    ),
    "a callback that is never due": (
        {"callbacks": {"often": scheduled(EMA(), "7 steps")}},
        ("callbacks.often is due every 7 steps, and the run plans 6 steps.\n"
        "  It would never hear of a step. Shorten the interval, or lengthen the run."),
    ),
    "a schedule that nothing follows": (
        {"callbacks": {"stop": scheduled(EarlyStopping("val/loss"), "2 steps")}},
        ("callbacks.stop carries the schedule 'every 2 steps', and EarlyStopping listens to no event of a step.\n"
        "  A schedule holds back the events of a step alone, so it would be ignored. "
        "Remove every, at and after from it."),
    ),
    "early stopping without validation": (
        {"callbacks": {"stop": EarlyStopping("val/loss")}, "validate": None},
        ("callbacks.stop monitors 'val/loss', and this run never validates.\n"
        "  It would never stop anything. Set validate: 1 epoch, and give the module a validation_step and the data a "
        "val_dataloader."),
    ),
    "the class of a callback": (
        {"callbacks": {"ema": EMA}},
        ("callbacks['ema'] is the class EMA, and no Callback.\n"
        "  Pass an object of a subclass of camshaft.Callback, or None to switch a default off."),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_whole_and_before_the_first_update(mistake):
    settings, message = MISTAKES[mistake]
    settings = dict(settings)
    recorder = Recorder(only=["on_step"])
    callbacks = {"record": recorder, **settings.pop("callbacks", {})}
    with pytest.raises(CamshaftError) as caught:
        tiny_run(settings.pop("module", None), settings.pop("data", None), callbacks=callbacks, **settings)
    assert str(caught.value) == message
    assert recorder.events == []


def test_callbacks_in_a_list_are_refused():
    with pytest.raises(CamshaftError) as caught:
        run(TinyModule(), TinyData(), callbacks=[EMA()], max_epochs=1)
    assert str(caught.value) == (
        "callbacks is a list.\n"
        "  Each has a name: the key of its state in checkpoints. Pass a dict of names and objects."
    )


def test_a_missing_recipe_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CamshaftError) as caught:
        load("none.yaml")
    assert str(caught.value) == "none.yaml does not exist.\n  Recipes there: none."


def test_a_run_directory_that_cannot_be_made_is_told_before_training(tmp_path):
    place = tmp_path / "file"
    place.write_text("in the way")
    recorder = Recorder()
    with pytest.raises(CamshaftError) as caught:
        tiny_run(runs_dir=place, callbacks={"record": recorder})
    what, rest = str(caught.value).split("\n")
    assert what.startswith(f"the run directory {place / 'tinymodule'}")
    assert what.endswith("cannot be made: Not a directory.")
    assert rest == (
        "  Metrics and checkpoints would have nowhere to go. Set runs_dir to a directory that you can write to."
    )
    assert recorder.events == []


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_run_directory_is_told_before_training(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CamshaftError, match="cannot be made: Permission denied"):
        tiny_run(runs_dir=tmp_path)


# -- a loss that is not finite


class Spoiled(TinyModule):
    """The loss of batch 2 is NaN."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 2 else 1.0)


class Counters(Callback):
    def on_fit_start(self, state):
        self.progress = state.progress


def spoiled(policy):
    torch.manual_seed(0)
    counters = Counters()
    result = tiny_run(Spoiled(), callbacks={"finite": FiniteLoss(policy), "counters": counters})
    return counters.progress, all(bool(p.isfinite().all()) for p in result.module.parameters())


def test_a_loss_that_is_not_finite_may_be_skipped_or_ignored():
    skipped, is_finite = spoiled("skip")
    assert (skipped.step, skipped.skipped_steps, is_finite) == (5, 1, True)
    ignored, is_finite = spoiled("ignore")
    assert (ignored.step, ignored.skipped_steps, is_finite) == (6, 0, False)


def test_a_loss_that_is_not_finite_ends_the_run_before_it_reaches_the_weights(tmp_path):
    module = Spoiled()
    with pytest.raises(LossError, match="not finite at step 3"):
        tiny_run(module, runs_dir=tmp_path, checkpoint={"every": "1 step"})
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    assert [path.name for path in tmp_path.rglob("step_*")] == ["step_00000002-step"]
