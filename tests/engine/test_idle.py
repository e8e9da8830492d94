"""Between log steps nothing waits for the device and nothing is sent to another rank: counted, not timed."""

from contextlib import ExitStack

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.functional import mse_loss
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric

from camshaft import Module
from camshaft.callback import Callback
from camshaft.callbacks.clip import ClipGradients
from camshaft.callbacks.ema import EMA
from camshaft.callbacks.finite import FiniteLoss
from camshaft.callbacks.lr import LRMonitor
from camshaft.callbacks.throughput import Throughput
from camshaft.metrics import Metrics
from camshaft.testing import TinyData, TinyModule, run_processes, tiny_run
from camshaft.testing.tiny import FEATURES

LOG_EVERY, STEPS = 10, 40


class _Operators(TorchDispatchMode):
    """Note operators that wait: those that give the host a number, or a shape that depends on values."""

    WAITING = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::is_nonzero")

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in self.WAITING or (name == "aten::_to_copy" and (kwargs or {}).get("device") is not None):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """Note methods that wait on an accelerator, and that read the memory of the CPU without an operator."""

    WAITING = ("tolist", "numpy", "cpu", "__array__", "synchronize")

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.WAITING:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Reads(ExitStack):
    """Count whatever would wait for the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __enter__(self):
        self.enter_context(_Operators(self.found))
        self.enter_context(_Methods(self.found))
        return self


class Watch(Callback):
    """Count what happens in each step, from its start to the start of the next: its boundary belongs to it."""

    def __init__(self, calls=None):
        self.mode = Reads()
        self.calls = [] if calls is None else calls
        self.marks = {}

    def on_fit_start(self, state):
        # As on an accelerator, where a logged scalar is not read where it is logged.
        state.metrics.reads_at_once = False

    def on_step_start(self, state, window):
        if state.progress.step == 0:
            self.mode.__enter__()
        self.marks[state.progress.step] = (len(self.mode.found), len(self.calls))

    def on_fit_end(self, state):
        self.mode.close()
        self.marks[state.progress.step] = (len(self.mode.found), len(self.calls))

    def by_step(self):
        """Return (reads, collectives) of each step, the first numbered 1."""
        return {
            step: tuple(b - a for a, b in zip(self.marks[step - 1], self.marks[step], strict=True))
            for step in sorted(self.marks)[1:]
        }


class Logs(TinyModule):
    def __init__(self):
        super().__init__()
        # Its other ways to treat a NaN look for one at every update.
        self.mean = MeanMetric(nan_strategy="disable")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/own", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"train/size": len(batch[0]), "train/mean": batch[1].mean()})
        self.mean.update(loss.detach())
        self.log("train/object", self.mean, on_step=False)
        return loss


def listeners():
    """Return bundled callbacks that listen to steps and promise not to wait; on the CPU ``finite`` looks at once."""
    callbacks = {
        "finite": FiniteLoss("ignore"), "clip": ClipGradients(1.0), "ema": EMA(0.9), "lr": LRMonitor(),
        "throughput": Throughput(),
    }  # fmt: skip
    assert not any(callback.needs_host_sync for callback in callbacks.values())
    return callbacks


def configure(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(watch, **callbacks):
    torch.manual_seed(0)
    module = Logs()
    module.configure = configure
    callbacks = {"watch": watch, **listeners(), **callbacks}
    data = TinyData(4 * 2 * STEPS)
    tiny_run(module, data, callbacks=callbacks, accumulate=2, max_steps=STEPS, log_every=LOG_EVERY, validate=None)


def test_no_step_between_log_steps_reads_the_device():
    train(watch := Watch())
    reads = {step: count for step, (count, _) in watch.by_step().items()}
    # AdamW keeps its step counter on the host and reads it: those are not waits.
    usual = reads[1]
    assert usual == optimizer_reads()
    assert {step for step, count in reads.items() if count != usual} <= {10, 20, 30, 40}
    assert reads[10] > usual, "the flush reads: a count that never rises counts nothing"


def optimizer_reads():
    """Return how often one update of this optimizer reads a number by itself."""
    module = Logs()
    optimizer = configure(module)["optimizer"]
    mse_loss(module(torch.ones(2, FEATURES)), torch.ones(2, 1)).backward()
    optimizer.step()
    with Reads() as mode:
        optimizer.step()
    return len(mode.found)


def test_a_watch_that_skips_steps_reads_the_device_once_a_step_and_says_so():
    finite = FiniteLoss("skip")
    assert finite.needs_host_sync
    train(watch := Watch(), finite=finite)
    reads = {step: count for step, (count, _) in watch.by_step().items()}
    assert reads[5] == optimizer_reads() + 1


def test_logging_a_device_scalar_is_a_copy_and_nothing_else():
    metrics, value = Metrics(reads_at_once=False), torch.ones(())
    with Reads() as mode:
        for _ in range(1000):
            metrics.log("a", value)
    assert mode.found == []
    with Reads() as mode:
        assert metrics.step.flush(lambda own: [own]) == {"a": 1.0}
    assert len(mode.found) == 1, "one transfer a flush"


class Plain(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def training_step(self, batch):
        return mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _count_collectives():
    """Train under DDP on this rank, and count the collectives that Python starts, and those DDP's backward needs."""
    calls = []

    def counted(name):
        original = getattr(torch.distributed, name)

        def call(*args, **kwargs):
            calls.append((name, bool(kwargs.get("async_op"))))
            return original(*args, **kwargs)

        return call

    for name in (
        "all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier", "gather",
        "gather_object", "reduce", "scatter", "all_gather_into_tensor", "reduce_scatter_tensor", "monitored_barrier",
    ):  # fmt: skip
        setattr(torch.distributed, name, counted(name))
    watch = Watch(calls)
    callbacks = {"watch": watch, **listeners()}
    tiny_run(
        Plain(), TinyData(4 * 2 * STEPS), strategy="ddp", callbacks=callbacks, accumulate=1, max_steps=STEPS,
        log_every=LOG_EVERY, validate=None,
    )  # fmt: skip
    spans = {step: calls[watch.marks[step - 1][1] : watch.marks[step][1]] for step in sorted(watch.marks)[1:]}
    return {step: found for step, found in spans.items() if found}


@pytest.mark.distributed
def test_no_step_between_log_steps_runs_a_collective_but_the_agreement():
    for spans in run_processes(2, _count_collectives, timeout_s=90):
        blocking = {step for step, found in spans.items() if any(not is_async for _, is_async in found)}
        assert blocking <= {10, 20, 30, 40}, spans
        assert blocking, "the flush gathers: a count that is always empty counts nothing"
        agreements = {step for step, found in spans.items() if step not in blocking}
        assert agreements <= {8, 16, 24, 32}, "requests travel every 8 steps, without blocking"
        assert agreements
