"""A run equals a loop written by hand, bit for bit."""

import pytest
import torch
from torch.nn.functional import mse_loss

from camshaft.callbacks.clip import ClipGradients
from camshaft.callbacks.ema import EMA
from camshaft.loggers.base import Logger
from camshaft.testing import TinyData, TinyModule, tiny_run
from camshaft.testing.tiny import tiny_set

STEPS, MICRO, ACCUMULATE, CLIP, DECAY = 50, 4, 2, 0.5, 0.9


def configure(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def build():
    torch.manual_seed(3)
    return TinyModule(dropout=0.2, configure=configure)


def by_hand(precision):
    """Train as a person would write it; return weights, averages, rates, skipped steps and losses."""
    module = build()
    made = configure(module)
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", init_scale=65536.0, growth_interval=2000)
    average = [p.detach().clone() for p in module.parameters()]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    batches = list(zip(*(t.split(MICRO) for t in tiny_set(24).tensors), strict=True))
    rates, losses, skipped, updates, micro = [], [], 0, 0, 0
    torch.manual_seed(0)
    while updates < STEPS:
        optimizer.zero_grad()
        for _ in range(ACCUMULATE):
            inputs, targets = batches[micro % len(batches)]
            micro += 1
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = mse_loss(module(inputs), targets)
            scaler.scale(loss / ACCUMULATE).backward()
            losses.append(loss.item())
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
            continue
        updates += 1
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
        decay = min(DECAY, (1 + updates) / (10 + updates))
        with torch.no_grad():
            for own, weight in zip(average, module.parameters(), strict=True):
                own.lerp_(weight, 1 - decay)
    return module, average, rates, skipped, losses


class Rates(EMA):
    """Average, and note the rate that each update used and every loss."""

    def __init__(self):
        super().__init__(DECAY, evaluate=True)
        self.rates, self.losses, self.progress = [], [], None

    def on_gradients(self, state):
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])

    def on_backward(self, state, loss):
        self.losses.append(loss.item())

    def on_fit_end(self, state):
        self.progress = state.progress


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_fifty_steps_equal_a_hand_written_loop(precision):
    module, average, rates, skipped, losses = by_hand(precision)
    ema = Rates()
    result = tiny_run(
        build(), TinyData(shuffle=False, batch_size=MICRO), callbacks={"clip": ClipGradients(CLIP), "ema": ema},
        accumulate=ACCUMULATE, max_steps=STEPS, precision=precision, validate="7 steps",
        checkpoint={"every": "9 steps"},
    )  # fmt: skip
    for (name, own), expected in zip(result.module.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(own, expected), name
    for (name, own), expected in zip(ema.averages.items(), average, strict=True):
        assert torch.equal(own, expected), name
    assert (ema.rates, ema.losses) == (rates, losses)
    assert (ema.progress.step, ema.progress.skipped_steps) == (STEPS, skipped)
    assert ema.progress.micro_step == ACCUMULATE * (STEPS + skipped)
    assert ema.progress.samples == STEPS * MICRO * ACCUMULATE
    assert (skipped > 0) is (precision == "fp16"), "a test of overflow needs one"


def test_a_record_holds_the_mean_loss_since_the_record_before():
    losses, records = by_hand("fp32")[4], []

    class Keep(Logger):
        def log_metrics(self, record):
            records.append((record.step, record.values["train/loss"]))

    tiny_run(
        build(), TinyData(shuffle=False, batch_size=MICRO), callbacks={"clip": ClipGradients(CLIP)},
        loggers={"keep": Keep()}, accumulate=ACCUMULATE, max_steps=STEPS, log_every=2, validate=None,
    )  # fmt: skip
    ends = sorted({step for step in range(1, STEPS + 1) if step % 2 == 0 or step % 3 == 0})
    assert [step for step, _ in records] == ends
    for start, (step, value) in zip([0, *ends], records, strict=False):
        window = losses[start * ACCUMULATE : step * ACCUMULATE]
        assert value == pytest.approx(sum(window) / len(window), rel=1e-12)
