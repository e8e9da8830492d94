"""Check that a window which runs out of memory is run again in smaller micro-batches, with the same result."""

import os
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from parts import Stack, different, distance, fit, weights
from torch import nn
from torchmetrics import MeanMetric

from camshaft.callbacks.clip import ClipGradients
from camshaft.callbacks.ema import EMA
from camshaft.callbacks.micro_batch import MicroBatch
from camshaft.callbacks.precision import Precision
from camshaft.cutting import cut_batch, is_out_of_memory
from camshaft.errors import CallbackError, DataError, RecipeError, StrategyError
from camshaft.strategies.ddp import DDP
from camshaft.strategies.deepspeed import DeepSpeed
from camshaft.strategies.fsdp import FSDP
from camshaft.testing import ManualTiny, StopAt, run_processes, tiny_run


class Hungry(Stack):
    """A stack that runs out of memory above ``most`` samples, in forward or in backward, on ranks of its choice."""

    def __init__(self, most: int = 2, where: str = "backward", rank: str | None = None, dropout: float = 0.1) -> None:
        super().__init__(depth=2, dropout=dropout)
        self.inner = nn.Sequential(self.inner, nn.LayerNorm(32))
        self.most, self.where, self.rank = most, where, rank
        self.register_buffer("forwards", torch.zeros(()))
        self.seen_loss = MeanMetric()

    def training_step(self, batch, batch_idx):
        self.forwards += 1
        loss = super().training_step(batch, batch_idx)
        self.log("noise", torch.rand(()))
        self.seen_loss.update(loss.detach())
        if len(batch[0]) > self.most and self.rank in (None, os.environ.get("RANK")):
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            loss.register_hook(self.fail)
        return loss

    @staticmethod
    def fail(gradient):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")


def hungry(**options):
    torch.manual_seed(0)
    return Hungry(**options)


def outcome(run):
    module = run.module
    return weights(run), run.metrics, float(module.forwards), float(module.seen_loss.compute()), run.step


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_running_out_of_memory_leads_to_what_small_micro_batches_lead_to(where, precision):
    found = MicroBatch()
    # One record of all steps, so that what an attempt logged in vain would show.
    given = {"precision": Precision(precision), "m": found, "clip": ClipGradients(0.5)}
    cut = outcome(fit(hungry(where=where), given, log_every=8))
    small = {"precision": Precision(precision), "m": MicroBatch(2), "clip": ClipGradients(0.5)}
    expected = outcome(fit(hungry(where=where), small, log_every=8))
    assert found.size == 2
    assert not different(cut[0], expected[0])
    assert cut[1:] == expected[1:]


def test_the_result_is_that_of_whole_micro_batches():
    cut = fit(hungry(dropout=0.0), {"micro_batch": MicroBatch()})
    whole = fit(hungry(most=8, dropout=0.0))
    names = [name for name in weights(whole) if name != "forwards"]
    left, right = weights(cut), weights(whole)
    assert distance({n: left[n] for n in names}, {n: right[n] for n in names}) < 1e-5
    # And exactly that of a loader that cuts alike.
    accumulated = weights(fit(hungry(most=8), accumulate=4))
    assert not different(weights(fit(hungry(), {"micro_batch": MicroBatch()})), accumulated)


def test_tokens_weigh_alike_however_a_window_is_cut():
    class Weighted(Hungry):
        def batch_weight(self, batch):
            return float((batch[0][:, 0] > 0).sum())

        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            mask = (batch[0][:, :1] > 0).float()
            return (mask * (self(batch[0]) - batch[1]).square()).sum() / mask.sum().clamp_min(1)

    def trained(most, **callbacks):
        torch.manual_seed(0)
        return weights(fit(Weighted(most=most, where="forward", dropout=0.0), callbacks))

    left, right = trained(3, m=MicroBatch()), trained(8)
    assert (
        distance({n: v for n, v in left.items() if n != "forwards"}, {n: right[n] for n in left if n != "forwards"})
        < 1e-5
    )


def test_the_size_is_remembered_by_a_resumed_run(tmp_path):
    def make():
        return {"micro_batch": MicroBatch(), "ema": EMA(0.9)}

    whole = fit(hungry(), make(), accumulate=2)
    settings = {"accumulate": 2, "runs_dir": tmp_path, "checkpoint": {"every": None}}
    first = fit(hungry(), {**make(), "stop": StopAt(4)}, **settings)
    again = make()
    module = hungry()
    resumed = fit(module, again, **settings, resume=str(first.run_dir))
    assert again["micro_batch"].size == 2
    assert {size for size, _ in module.seen} == {2}
    assert not different(weights(resumed), weights(whole))


def test_below_the_minimum_the_error_ends_the_run_and_says_what_else_saves_memory():
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        fit(hungry(most=0), {"micro_batch": MicroBatch()})
    assert "micro-batches of 1. Use activation_checkpointing" in caught.value.__notes__[0]
    with pytest.raises(RecipeError):
        MicroBatch(2, minimum=4)


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    class Wrong(Stack):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        fit(Wrong(), {"micro_batch": MicroBatch()})
    assert is_out_of_memory(MemoryError())


@pytest.mark.parametrize("strategy", [FSDP, lambda: DeepSpeed(2), lambda: DDP(static_graph=True)])
def test_strategies_whose_micro_batches_take_all_ranks_are_refused(strategy):
    callback = MicroBatch()
    callback.name = "micro_batch"
    with pytest.raises(StrategyError, match="micro_batch cannot run under"):
        callback.on_launch(strategy())


def test_modules_that_optimize_by_hand_and_a_second_maker_of_steps_are_refused():
    with pytest.raises(RecipeError, match="optimizes by hand"):
        tiny_run(ManualTiny(), callbacks={"micro_batch": MicroBatch()})
    with pytest.raises(CallbackError, match="both make the updates"):
        fit(callbacks={"one": MicroBatch(), "two": MicroBatch()})


@dataclass
class Record:
    x: torch.Tensor
    scale: float


class Point(NamedTuple):
    x: list
    y: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "second"),
    [
        (
            (torch.arange(5), torch.arange(10).view(5, 2)),
            lambda b: (b[0].tolist(), b[1].tolist()) == ([3, 4], [[6, 7], [8, 9]]),
        ),
        (
            {"text": list("abcde"), "ids": torch.arange(5), "scale": 2.0},
            lambda b: (b["text"], b["scale"]) == (["d", "e"], 2.0),
        ),
        (
            OrderedDict(a=torch.arange(5), b=torch.arange(3)),
            lambda b: (b["a"].tolist(), b["b"].tolist()) == ([3, 4], [0, 1, 2]),
        ),
        (Record(torch.arange(5), 0.5), lambda b: (b.x.tolist(), b.scale) == ([3, 4], 0.5)),
        (Point([torch.arange(5)], torch.arange(5)), lambda b: (b.x[0].tolist(), b.y.tolist()) == ([3, 4], [3, 4])),
        (torch.arange(5).numpy(), lambda b: b.tolist() == [3, 4]),
    ],
)
def test_batches_of_any_shape_are_cut_by_their_samples(batch, second):
    parts = cut_batch(batch, [3, 2])
    assert len(parts) == 2
    assert second(parts[1])


def test_a_batch_that_nothing_can_cut_is_refused():
    with pytest.raises(DataError, match="cannot be cut"):
        cut_batch(object(), [1, 1])


LIMITED = """
import resource, sys
import torch
from torch import nn
sys.path.insert(0, {here!r})
from parts import Stack, fit
from camshaft.callbacks.micro_batch import MicroBatch

class Large(Stack):
    def training_step(self, batch, batch_idx):
        x = batch[0].repeat(1, 32).unsqueeze(1).expand(-1, 4096, -1).contiguous()  # 8 MiB a sample
        return super().training_step(batch, batch_idx) + (self.inner.weight.sum() * x).square().mean() * 1e-3

torch.manual_seed(0)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
limit = used + {room} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
found = MicroBatch()
run = fit(Large(), {{"micro_batch": found}}, max_steps=3)
print("size", found.size, "steps", run.step)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space as Linux does")
def test_a_limit_of_the_allocator_is_met_by_smaller_micro_batches():
    code = LIMITED.format(here=str(Path(__file__).parent), room=220)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert int(words[words.index("size") + 1]) in (1, 2, 4), done.stdout
    assert "steps 3" in done.stdout


# -- several processes -----------------------------------------------------------------------------


def one_of_two(where: str):
    """Run out of memory on rank 1 alone; run with small micro-batches from the start; and let it get too little."""
    from several import strategy

    found = MicroBatch()
    cut = outcome(fit(hungry(rank="1", where=where), {"m": found}, strategy=strategy("ddp"), batch_size=16))
    small = outcome(fit(hungry(rank="1", where=where), {"m": MicroBatch(2)}, strategy=strategy("ddp"), batch_size=16))
    plain = weights(fit(hungry(most=8, dropout=0.0), strategy=strategy("ddp"), batch_size=16))
    again = weights(fit(hungry(rank="1", dropout=0.0), {"m": MicroBatch()}, strategy=strategy("ddp"), batch_size=16))
    try:
        fit(hungry(most=0, rank="1", where=where), {"m": MicroBatch()}, strategy=strategy("ddp"), batch_size=16)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    return found.size, cut, small, plain, again, refused


def in_forward_and_backward():
    return [one_of_two(where) for where in ("forward", "backward")]


@pytest.mark.distributed
def test_one_of_two_ranks_runs_out_of_memory_and_both_go_on_as_with_small_micro_batches():
    main, other = run_processes(2, in_forward_and_backward, timeout_s=240)
    for size, cut, small, plain, again, _ in (*main, *other):
        assert size == 2
        assert not different(cut[0], small[0])
        assert cut[1:] == small[1:]
        trained = [name for name in plain if name != "forwards"]
        assert distance({n: again[n] for n in trained}, {n: plain[n] for n in trained}) < 1e-5
    for left, right in zip(main, other, strict=True):
        assert not different(left[1][0], right[1][0])
        assert "rank 1 has no memory even for micro-batches of 1" in left[-1]
        assert "memory" in right[-1]
