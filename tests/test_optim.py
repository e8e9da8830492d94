"""Every shape of configure_optimizers is read, and whatever would be ignored is refused."""

import copy

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from camshaft.errors import ModuleError
from camshaft.optim import Constant, Cosine, InverseSqrt, Linear, Plan, read_optimizers


def sgd(rate=1.0):
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def step_lr(optimizer):
    return lr_scheduler.StepLR(optimizer, 1)


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer)


def shapes():
    a, b = sgd(), sgd()
    s, t = step_lr(a), step_lr(b)
    return {
        "none": (None, [], []),
        "one": (a, [a], []),
        "list": ([a, b], [a, b], []),
        "tuple": ((a, b), [a, b], []),
        "a list of one": ([a], [a], []),
        "pair of lists": (([a], [s]), [a], [s]),
        "list of lists": ([[a, b], [s, t]], [a, b], [s, t]),
        "pair with dicts": (([a, b], [{"scheduler": s, "interval": "step"}, t]), [a, b], [s, t]),
        "pair without schedulers": (([a], []), [a], []),
        "dict": ({"optimizer": a}, [a], []),
        "dict with scheduler": ({"optimizer": a, "lr_scheduler": s}, [a], [s]),
        "dict with dict": ({"optimizer": a, "lr_scheduler": {"scheduler": s}}, [a], [s]),
        "dict with None": ({"optimizer": a, "lr_scheduler": None}, [a], []),
        "two dicts": (({"optimizer": a, "lr_scheduler": s}, {"optimizer": b}), [a, b], [s]),
        "list of dicts": ([{"optimizer": a}, {"optimizer": b, "lr_scheduler": {"scheduler": t}}], [a, b], [t]),
    }


@pytest.mark.parametrize("shape", list(shapes()))
def test_every_shape_is_read(shape):
    returned, optimizers, schedulers = shapes()[shape]
    found, plans = read_optimizers(returned)
    assert [id(o) for o in found] == [id(o) for o in optimizers]
    assert [id(p.scheduler) for p in plans] == [id(s) for s in schedulers]


def wrong_shapes():
    a, b = sgd(), sgd()
    return {
        "nothing": [], "text": "adam", "two letters": "ab", "a scheduler": step_lr(a), "a class": SGD,
        "names": (["adam"], [step_lr(a)]), "no optimizer": ([], [step_lr(a)]), "mixed": [a, {"optimizer": b}],
        "opt and scheduler": (a, step_lr(a)), "dict without optimizer": {"lr_scheduler": step_lr(a)},
        "unknown key": {"optimizer": a, "scheduler": step_lr(a)}, "frequency": {"optimizer": a, "frequency": 2},
        "unknown scheduler key": {"optimizer": a, "lr_scheduler": {"scheduler": step_lr(a), "intervall": "step"}},
        "no scheduler": {"optimizer": a, "lr_scheduler": {"interval": "step"}},
        "optimizer as scheduler": ([a], [b]),
        "interval": {"optimizer": a, "lr_scheduler": {"scheduler": step_lr(a), "interval": "batch"}},
        "frequency 0": {"optimizer": a, "lr_scheduler": {"scheduler": step_lr(a), "frequency": 0}},
        "frequency 1.5": {"optimizer": a, "lr_scheduler": {"scheduler": step_lr(a), "frequency": 1.5}},
        "another's scheduler": ([a], [step_lr(b)]), "a group": a.param_groups,
    }  # fmt: skip


@pytest.mark.parametrize("shape", list(wrong_shapes()))
def test_every_other_shape_is_refused(shape):
    with pytest.raises(ModuleError):
        read_optimizers(wrong_shapes()[shape])


def test_an_entry_is_read_whole():
    optimizer = sgd()
    entry = {"scheduler": step_lr(optimizer), "interval": "step", "frequency": 3, "name": "rate", "strict": False}
    _, [plan] = read_optimizers({"optimizer": optimizer, "lr_scheduler": entry})
    assert (plan.interval, plan.frequency, plan.name, plan.strict) == ("step", 3, "rate", False)


def test_a_plateau_finds_its_metric_beside_the_optimizer():
    optimizer = sgd()
    _, [plan] = read_optimizers({"optimizer": optimizer, "lr_scheduler": plateau(optimizer), "monitor": "val/loss"})
    plan.resolve(None)
    assert (plan.is_plateau, plan.monitor) == (True, "val/loss")


def test_a_plateau_without_a_metric_is_refused():
    optimizer = sgd()
    _, [plan] = read_optimizers(([optimizer], [plateau(optimizer)]))
    with pytest.raises(ModuleError, match="no metric to monitor"):
        plan.resolve(None)


def test_a_plateau_refuses_a_frequency_that_would_be_ignored():
    with pytest.raises(ModuleError, match="frequency"):
        Plan(plateau(sgd()), monitor="val/loss", frequency=2).resolve(None)


def test_another_scheduler_never_gets_the_value_of_a_metric():
    optimizer = sgd()
    _, [plan] = read_optimizers({"optimizer": optimizer, "lr_scheduler": step_lr(optimizer), "monitor": "val/loss"})
    plan.resolve(None)
    assert (plan.is_plateau, plan.monitor) == (False, None)


def test_an_own_scheduler_may_say_that_it_is_a_plateau():
    class Own:
        def step(self, value):
            pass

    _, [plan] = read_optimizers(([sgd()], [{"scheduler": Own(), "reduce_on_plateau": True, "monitor": "m"}]))
    plan.resolve(None)
    assert (plan.is_plateau, plan.monitor) == (True, "m")


def test_a_scheduler_of_as_many_steps_as_the_run_steps_with_them():
    plan = Plan(lr_scheduler.OneCycleLR(sgd(), 1.0, total_steps=20))
    other = copy.copy(plan)
    plan.resolve(20)
    other.resolve(21)
    assert (plan.interval, other.interval) == ("step", "epoch")


def test_frequency_counts_over_the_run():
    optimizer = sgd()
    plan = Plan(lr_scheduler.StepLR(optimizer, 1, gamma=0.5), interval="step", frequency=3)
    optimizer.step()
    for count in range(1, 8):
        plan.advance(count)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_plan_describes_itself():
    plan = Plan(Cosine(sgd(), total_steps=10, warmup_steps=2))
    plan.resolve(10)
    assert plan.describe(10) == "Cosine of 1, starting at 0.5, stepped every step, 10 in all; the run plans 10 steps"


def rates(kind, **options):
    optimizer = sgd()
    scheduler, found = kind(optimizer, total_steps=10, **options), []
    for _ in range(11):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("kind", [Cosine, Linear, Constant, InverseSqrt])
def test_the_rate_rises_to_its_value_and_never_above(kind):
    found = rates(kind, warmup_steps=4)
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert max(found) == 1.0


def test_shapes_after_the_warm_up_are_their_formulas():
    assert rates(Linear)[5] == pytest.approx(0.5)
    assert rates(Cosine)[5] == pytest.approx(0.5)
    assert rates(Linear, min_ratio=0.2)[10] == pytest.approx(0.2)
    assert rates(Cosine)[10] == pytest.approx(0.0)
    assert rates(Constant)[10] == 1.0
    assert rates(InverseSqrt, warmup_steps=4)[9] == pytest.approx((4 / 9) ** 0.5)


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ModuleError, match="warmup_steps is 10"):
        Cosine(sgd(), total_steps=10, warmup_steps=10)
