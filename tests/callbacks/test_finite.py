"""A loss that is not finite raises before it reaches a weight, skips the update, or is ignored."""

import math

import pytest
import torch

from camshaft.callbacks.finite import FiniteLoss
from camshaft.errors import LossError, RecipeError
from camshaft.testing import TinyModule, tiny_run


class Bad(TinyModule):
    """Give one loss that is NaN, at the micro-batch of that index in the epoch."""

    def __init__(self, at=2):
        super().__init__()
        self.at = at

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if batch_idx == self.at else loss


def fit(policy, **settings):
    torch.manual_seed(0)
    module = Bad()
    callback = FiniteLoss(policy)
    return module, callback, lambda: tiny_run(module, callbacks={"finite": callback}, **settings)


def finite(module):
    return all(bool(torch.isfinite(p).all()) for p in module.parameters())


def test_it_raises_with_the_step_and_the_weights_stay_finite():
    module, _, run = fit("raise")
    with pytest.raises(LossError) as error:
        run()
    assert str(error.value).splitlines()[0] == "the loss is not finite at step 3."
    assert finite(module)


def test_a_skipped_update_is_one_that_was_never_made():
    module, callback, run = fit("skip", max_epochs=2)
    result = run()
    assert (callback.skipped, result.step) == (2, 10)
    assert finite(module)


def test_one_bad_micro_batch_skips_the_whole_window():
    module, callback, run = fit("skip", accumulate=3)
    result = run()
    assert (callback.skipped, result.step) == (1, 1)
    assert finite(module)


class Broken(TinyModule):
    """Give no finite loss after some steps."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.calls = getattr(self, "calls", 0) + 1
        return loss * math.inf if self.calls > 10 else loss


def test_a_run_that_only_skips_is_ended():
    with pytest.raises(LossError, match="100 losses in a row were not finite, up to step 11"):
        tiny_run(Broken(), callbacks={"finite": FiniteLoss("skip")}, max_steps=1000)


def test_ignored_it_spreads():
    module, _, run = fit("ignore")
    run()
    assert not finite(module)


def test_another_policy_is_refused():
    with pytest.raises(RecipeError) as error:
        FiniteLoss("warn")
    assert str(error.value) == "FiniteLoss.policy is 'warn'.\n  Use raise, skip or ignore."
