"""Manual optimization has the counters, clipping, precision and accumulation of automatic optimization."""

import pytest
import torch
from torch.nn.functional import mse_loss

from camshaft.callback import Callback
from camshaft.callbacks.clip import ClipGradients
from camshaft.callbacks.ema import EMA
from camshaft.errors import ModuleError
from camshaft.testing import ManualTiny, Recorder, TinyData, TinyModule, tiny_run
from camshaft.testing.tiny import tiny_set


def build(kind=ManualTiny, **options):
    torch.manual_seed(1)
    return kind(**options)


def batches(samples=24, size=4):
    return list(zip(*(t.split(size) for t in tiny_set(samples).tensors), strict=True))


class Count(Callback):
    def __init__(self):
        self.progress, self.norms = None, []

    def on_fit_start(self, state):
        self.progress = state.progress


@pytest.mark.parametrize("clip", [None, 0.3])
def test_two_optimizers_equal_a_hand_written_loop(clip):
    module = build()
    optimizers = module.configure_optimizers()
    for batch in batches():
        for index, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            module.losses(batch, index).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
            optimizer.step()
    callbacks = {"clip": ClipGradients(clip)} if clip is not None else {}
    result = tiny_run(build(), TinyData(shuffle=False), callbacks=callbacks)
    for own, expected in zip(result.module.parameters(), module.parameters(), strict=True):
        assert torch.equal(own, expected)


def test_a_window_counts_once_however_many_optimizers_step():
    count, recorder = Count(), Recorder()
    result = tiny_run(build(), callbacks={"count": count, "record": recorder}, max_steps=5)
    progress = count.progress
    assert (result.step, progress.step, progress.micro_step, progress.samples) == (5, 5, 5, 20)
    step = ["on_step_start", "on_batch", *["on_backward", "on_gradients"] * 2, "on_step"]
    start = recorder.names.index("on_step_start")
    assert recorder.names[start : start + 5 * len(step)] == step * 5


class Apart(ManualTiny):
    """Each layer learns the targets by itself: with accumulation the first moves while the window still runs."""

    def losses(self, batch, index):
        return mse_loss((self.first, self.second)[index](batch[0]), batch[1])


@pytest.mark.parametrize("clip", [None, 0.3])
def test_accumulation_sums_a_window_for_each_optimizer(clip):
    callbacks = {"clip": ClipGradients(clip)} if clip is not None else {}
    count = Count()
    parts = tiny_run(build(Apart), TinyData(shuffle=False), accumulate=3, callbacks=callbacks | {"count": count})
    whole = tiny_run(build(Apart), TinyData(shuffle=False, batch_size=12), callbacks=callbacks)
    assert (parts.step, count.progress.step, count.progress.micro_step) == (2, 2, 6)
    for own, expected in zip(parts.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.allclose(own, expected, rtol=1e-6, atol=1e-7)


class OneByHand(TinyModule):
    """The tiny regression with its step written out."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_optimizer_by_hand_equals_automatic_optimization(precision):
    def train(kind):
        count, ema = Count(), EMA(0.9)
        callbacks = {"clip": ClipGradients(0.3), "ema": ema, "count": count}
        data = TinyData(24, shuffle=False)
        result = tiny_run(build(kind), data, callbacks=callbacks, accumulate=2, max_steps=20, precision=precision)
        progress = count.progress
        counters = (progress.step, progress.micro_step, progress.samples, progress.skipped_steps, progress.epoch)
        return [*result.module.parameters(), *ema.averages.values()], counters

    (own, own_counters), (expected, counters) = train(OneByHand), train(TinyModule)
    assert own_counters == counters
    assert (counters[3] > 0) is (precision == "fp16")
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


def test_a_step_that_no_optimizer_made_is_skipped():
    class Sometimes(ManualTiny):
        def training_step(self, batch, batch_idx):
            if batch_idx % 2 == 0:
                super().training_step(batch)

    count, recorder = Count(), Recorder(only=["on_step"])
    tiny_run(build(Sometimes), callbacks={"count": count, "record": recorder})
    assert (count.progress.step, count.progress.skipped_steps, len(recorder.events)) == (3, 3, 3)


def test_schedulers_are_the_modules_own_to_step():
    class Scheduled(ManualTiny):
        def training_step(self, batch):
            super().training_step(batch)
            for scheduler in self.lr_schedulers():
                scheduler.step()
            self.rates = [o.param_groups[0]["lr"] for o in self.optimizers()]

        def configure_optimizers(self):
            optimizers = super().configure_optimizers()
            return optimizers, [
                torch.optim.lr_scheduler.ExponentialLR(o, g) for o, g in zip(optimizers, (0.5, 0.1), strict=True)
            ]

    result = tiny_run(build(Scheduled, lr=0.1), TinyData(8), max_epochs=2)
    assert result.module.rates == pytest.approx([0.1 * 0.5**4, 0.1 * 0.1**4])


def test_a_toggled_optimizer_leaves_the_others_parameters_without_gradients():
    class Toggled(ManualTiny):
        def training_step(self, batch):
            first, second = self.optimizers()
            first.zero_grad()
            second.zero_grad()
            with second.toggled():
                assert not self.first.weight.requires_grad
                self.manual_backward((self.second(batch[0]) + self.first(batch[0])).square().mean())
            assert self.first.weight.requires_grad
            assert self.first.weight.grad is None
            second.step()

    assert tiny_run(build(Toggled), max_steps=2).step == 2


def test_optimizers_are_not_handed_out_under_automatic_optimization():
    class Wrong(TinyModule):
        def training_step(self, batch):
            self.optimizers()

    with pytest.raises(ModuleError) as caught:
        tiny_run(Wrong())
    assert str(caught.value) == (
        "Wrong has automatic_optimization = True.\n"
        "  The engine steps its optimizers itself; a second step would train it twice. "
        "Set automatic_optimization = False in the class, or return the loss and leave the rest."
    )
