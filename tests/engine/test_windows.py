"""The gradient of a window is that of the mean loss over all its samples, however they are cut."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from camshaft import Module
from camshaft.callback import Callback
from camshaft.testing import Recorder, TinyData, TinyIterable, TinyModule, tiny_run
from camshaft.testing.tiny import FEATURES, tiny_set


class Keep(Callback):
    """Keep the gradients and the counters of every step."""

    def __init__(self):
        self.gradients, self.progress, self.shapes = [], None, []

    def on_fit_start(self, state):
        self.progress = state.progress

    def on_step_start(self, state, window):
        self.shapes.append(len(window))

    def on_gradients(self, state):
        self.gradients.append(torch.cat([p.grad.flatten() for p in state.module.parameters()]))


def train(module=None, data=None, **settings):
    keep = Keep()
    if module is None:
        torch.manual_seed(0)
        module = TinyModule()
    result = tiny_run(module, data, callbacks={"keep": keep}, **settings)
    return keep, result


def close(left, right):
    """Say whether the distance of two lists of gradients is that of rounding."""
    return all(float((a - b).norm() / b.norm()) < 1e-6 for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("size", "accumulate"), [(4, 2), (2, 4), (1, 8)])
def test_micro_batches_equal_one_big_batch_and_the_short_last_window_too(size, accumulate, shuffle):
    # 22 samples in windows of 8: the last has 6, and with micro-batches of 4 one of 4 and one of 2.
    whole, _ = train(data=TinyData(22, batch_size=8, shuffle=shuffle), max_epochs=2)
    parts, _ = train(data=TinyData(22, batch_size=size, shuffle=shuffle), max_epochs=2, accumulate=accumulate)
    assert len(whole.gradients) == 6
    assert close(parts.gradients, whole.gradients)
    assert (parts.progress.step, parts.progress.samples) == (6, 44)


def test_batch_size_is_samples_a_step_whatever_the_accumulation():
    whole, _ = train(data=TinyData(22, batch_size=3), batch_size=8, max_epochs=2)
    parts, _ = train(data=TinyData(22, batch_size=3), batch_size=8, max_epochs=2, accumulate=4)
    assert parts.shapes == [4, 4, 3] * 2
    assert close(parts.gradients, whole.gradients)


def test_the_last_window_of_a_stream_weighs_like_a_full_one():
    keep, _ = train(data=TinyIterable((4, 4, 4, 2, 5)), accumulate=3)
    assert keep.shapes == [3, 2]
    torch.manual_seed(0)
    module, (inputs, targets) = TinyModule(), tiny_set(19).tensors
    optimizer = module.configure_optimizers()
    for window, found in zip((slice(0, 12), slice(12, 19)), keep.gradients, strict=True):
        optimizer.zero_grad()
        mse_loss(module(inputs[window]), targets[window]).backward()
        expected = torch.cat([p.grad.flatten() for p in module.parameters()])
        assert float((found - expected).norm() / expected.norm()) < 1e-6
        optimizer.step()


def test_the_knob_for_accumulation_sizes_the_next_window():
    class Grow(Callback):
        def on_step(self, state):
            state.accumulate = state.progress.step + 1

    keep = Keep()
    tiny_run(data=TinyData(40), callbacks={"grow": Grow(), "keep": keep})
    assert keep.shapes == [1, 2, 3, 4]


# -- losses with weights of their own


class Tokens(Module):
    """A loss over a different number of tokens a batch: sum and count, the mean, or the mean with its weight before."""

    def __init__(self, *, pairs):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(FEATURES, 1)
        self.pairs = pairs

    def training_step(self, batch):
        inputs, targets, mask = batch
        errors = ((self.layer(inputs) - targets) ** 2).squeeze(1) * mask
        return (errors.sum(), mask.sum()) if self.pairs else errors.sum() / mask.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Weighed(Tokens):
    def batch_weight(self, batch):
        return batch[2].sum()


def token_data(batch_size, samples=22):
    inputs, targets = tiny_set(samples).tensors
    mask = (torch.arange(samples) % 5 != 0).float() * (torch.arange(samples) > 9)
    mask[::2] = 1
    return DataLoader(list(zip(inputs, targets, mask, strict=True)), batch_size=batch_size), int(mask.sum())


@pytest.fixture(scope="module")
def whole_tokens():
    """Return the gradients of windows in one piece, and the mean loss of the epoch over its tokens."""
    keep, result = train(Tokens(pairs=False), token_data(8)[0])
    return keep.gradients, result


@pytest.mark.parametrize("kind", [Tokens, Weighed], ids=["weight known after forward", "batch_weight"])
def test_pairs_of_sum_and_weight_give_the_mean_over_all_tokens_of_a_window(kind, whole_tokens):
    loader, tokens = token_data(2)
    keep, result = train(kind(pairs=True), loader, accumulate=4)
    assert close(keep.gradients, whole_tokens[0])
    assert keep.progress.tokens == (tokens if kind is Weighed else 0)
    assert result.metrics["train/loss"] == pytest.approx(result_by_tokens(), rel=1e-6)


def test_batch_weight_weighs_a_mean_by_its_own_tokens(whole_tokens):
    keep, result = train(Weighed(pairs=False), token_data(2)[0], accumulate=4)
    assert close(keep.gradients, whole_tokens[0])
    assert result.metrics["train/loss"] == pytest.approx(result_by_tokens(), rel=1e-6)


def result_by_tokens():
    """Train by hand, window by window, and return the mean loss over the epoch's tokens."""
    module, total, count = Tokens(pairs=True), 0.0, 0.0
    optimizer = module.configure_optimizers()
    for batch in token_data(8)[0]:
        optimizer.zero_grad()
        loss, weight = module.training_step(batch)
        (loss / weight).backward()
        optimizer.step()
        total, count = total + loss.item(), count + weight.item()
    return total / count


def test_a_mean_without_weights_counts_samples():
    keep, _ = train(Tokens(pairs=False), token_data(2)[0], accumulate=4)
    whole, _ = train(Tokens(pairs=False), token_data(8)[0])
    assert not close(keep.gradients, whole.gradients), "tokens are spread unevenly here, so this must differ"


def test_a_dict_gives_its_loss():
    class Dict(TinyModule):
        def training_step(self, batch):
            return {"loss": super().training_step(batch, 0), "more": 1}

    torch.manual_seed(0)
    as_dict, _ = train(Dict())
    plain, _ = train()
    assert all(torch.equal(a, b) for a, b in zip(as_dict.gradients, plain.gradients, strict=True))


# -- steps without a loss


def test_none_skips_the_update_and_all_that_counts_updates():
    rates = []

    def configure(module):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates.append(step) or 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Watch(Keep):
        def on_step_start(self, state, window):
            self.before = [p.clone() for p in state.module.parameters()]

        def on_epoch_end(self, state):
            assert all(torch.equal(a, b) for a, b in zip(self.before, state.module.parameters(), strict=True))

    torch.manual_seed(0)
    watch, recorder = Watch(), Recorder(only=["on_step", "on_gradients"])
    module = TinyModule(none_on={2, 5}, configure=configure)
    tiny_run(module, callbacks={"watch": watch, "record": recorder})
    progress = watch.progress
    assert (progress.step, progress.skipped_steps, progress.micro_step) == (4, 2, 6)
    assert (progress.samples, rates) == (16, [0, 1, 2, 3, 4])
    assert recorder.names.count("on_step") == 4


def test_none_for_a_part_of_a_window_counts_as_no_loss_for_its_samples():
    def build():
        torch.manual_seed(0)
        return TinyModule(none_on={1})

    data = TinyData(8, shuffle=False)
    both, _ = train(build(), data, accumulate=2)
    first, _ = train(build(), data, limit_train_batches=1)
    assert (both.progress.step, both.progress.skipped_steps) == (1, 0)
    assert close([2 * g for g in both.gradients], first.gradients)


def test_an_epoch_of_nothing_but_none_still_ends():
    keep, result = train(TinyModule(none_on=range(6)), validate=None)
    assert (result.status, keep.progress.epoch, keep.progress.step, keep.progress.skipped_steps) == (
        "finished",
        1,
        0,
        6,
    )


def test_a_callback_that_skips_keeps_the_weights_and_the_optimizer_as_they_were():
    class Skip(Callback):
        def on_gradients(self, state):
            if state.progress.step + state.progress.skipped_steps in (1, 4):
                state.control.skip_step("as asked")

    def configure(module):
        return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)

    torch.manual_seed(0)
    skipped = tiny_run(TinyModule(configure=configure), TinyData(24, shuffle=False), callbacks={"skip": Skip()})
    inputs, targets = (t.split(4) for t in tiny_set(24).tensors)
    torch.manual_seed(0)
    module = TinyModule(configure=configure)
    optimizer = configure(module)
    for index in (0, 2, 3, 5):
        optimizer.zero_grad()
        mse_loss(module(inputs[index]), targets[index]).backward()
        optimizer.step()
    assert skipped.step == 4
    for own, expected in zip(skipped.module.parameters(), module.parameters(), strict=True):
        assert torch.equal(own, expected)
