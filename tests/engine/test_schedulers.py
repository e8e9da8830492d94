"""Schedulers step when they should: per update, per epoch, or when the metric they monitor is produced."""

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from camshaft import run
from camshaft.callback import Callback
from camshaft.errors import MetricError
from camshaft.testing import TinyData, TinyModule, tiny_run


class Rates(Callback):
    """Note the rates that each update used."""

    def __init__(self):
        self.used = []

    def on_gradients(self, state):
        self.used.append([group["lr"] for o in state.optimizers for group in o.param_groups])


def rates(configure, kind=TinyModule, data=None, **settings):
    torch.manual_seed(0)
    watch = Rates()
    tiny_run(kind(configure=configure), data or TinyData(12), callbacks={"rates": watch}, **settings)
    return [used[0] if len(used) == 1 else used for used in watch.used]


def halving(module, **entry):
    optimizer = SGD(module.parameters(), lr=1e-3)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), **entry}}


def powers(counts):
    return pytest.approx([1e-3 * 0.5**count for count in counts])


def test_a_scheduler_steps_at_each_epoch_unless_told_otherwise():
    assert rates(halving, max_epochs=3) == powers([0, 0, 0, 1, 1, 1, 2, 2, 2])


def test_a_scheduler_steps_with_each_update_when_told():
    assert rates(lambda m: halving(m, interval="step"), max_epochs=2) == powers(range(6))


def test_a_frequency_counts_over_the_whole_run():
    assert rates(lambda m: halving(m, interval="step", frequency=4), max_epochs=3) == powers([0] * 4 + [1] * 4 + [2])
    assert rates(lambda m: halving(m, frequency=2), max_epochs=4) == powers([0] * 6 + [1] * 6)


def test_a_scheduler_made_for_as_many_steps_as_the_run_plans_steps_with_them():
    def configure(module):
        optimizer = SGD(module.parameters(), lr=1.0)
        return [optimizer], [lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=module.planned_steps)]

    def reference():
        optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler, found = lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=6), []
        for step in range(6):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if step < 5:
                scheduler.step()
        return found

    assert rates(configure, max_epochs=2) == pytest.approx(reference())


def plateau(module, monitor="val/loss", **options):
    optimizer = SGD(module.parameters(), lr=1e-3)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, **options)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": monitor}}


class Worse(TinyModule):
    """Its validation metric is the same each time, and no improvement after the first."""

    def validation_step(self, batch):
        self.log("val/loss", 1.0)


def test_a_plateau_steps_when_its_metric_is_produced():
    # Validated after steps 2, 4, 6 and 8: the first sets the best value, each later one halves the rate.
    assert rates(plateau, Worse, validate="2 steps", max_epochs=3) == powers([0, 0, 0, 0, 1, 1, 2, 2, 3])


def test_a_plateau_waits_for_its_metric_where_validation_is_rare():
    assert rates(plateau, Worse, validate="2 epochs", max_epochs=5) == powers([0] * 12 + [1] * 3)


def test_a_plateau_may_monitor_the_mean_of_a_training_epoch():
    class Logs(TinyModule):
        def training_step(self, batch, batch_idx):
            self.log("train/own", 1.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    assert rates(lambda m: plateau(m, "train/own"), Logs, max_epochs=3) == powers([0] * 6 + [1] * 3)


def test_a_plateau_may_monitor_what_steps_log():
    # A record every 2 steps and at the end of each epoch of 3.
    class Logs(TinyModule):
        def training_step(self, batch, batch_idx):
            self.log("train/own", 1.0)
            return super().training_step(batch, batch_idx)

    used = rates(lambda m: plateau(m, "train/own"), Logs, max_epochs=2, log_every=2)
    assert used == powers([0, 0, 0, 1, 2, 2])


@pytest.mark.parametrize("validate", [None, "1 epoch"])
def test_a_monitored_name_is_missed_with_and_without_validation(validate):
    with pytest.raises(MetricError, match="monitors 'train/lost', which nothing logs"):
        rates(lambda m: plateau(m, "train/lost"), max_epochs=2, validate=validate)


def test_a_plateau_that_is_not_strict_waits_for_ever():
    def configure(module):
        made = plateau(module, "train/lost")
        made["lr_scheduler"]["strict"] = False
        return made

    assert rates(configure, max_epochs=2) == powers([0] * 6)


def test_a_monitored_name_that_nothing_logs_lists_those_that_exist_and_the_nearest():
    with pytest.raises(MetricError) as caught:
        rates(lambda m: plateau(m, "val/lose"), max_epochs=2)
    assert str(caught.value) == (
        "a learning-rate scheduler monitors 'val/lose', which nothing logs.\n"
        "  The names that exist are train/loss, val/loss. Did you mean 'val/loss'?"
    )


def test_several_optimizers_all_step_each_with_its_own_scheduler():
    def configure(module):
        first, second = SGD(module.net[0].parameters(), lr=1e-3), SGD(module.net[3].parameters(), lr=1e-3)
        return [first, second], [
            {"scheduler": lr_scheduler.ExponentialLR(first, 0.5), "interval": "step"},
            {"scheduler": lr_scheduler.ExponentialLR(second, 0.1), "interval": "epoch"},
        ]

    used = rates(configure, max_epochs=2)
    assert [rate for rate, _ in used] == powers(range(6))
    assert [rate for _, rate in used] == pytest.approx([1e-3] * 3 + [1e-4] * 3)


def test_several_optimizers_train_like_one_over_all_parameters():
    def train(configure):
        torch.manual_seed(0)
        return tiny_run(TinyModule(configure=configure), accumulate=2, max_epochs=2).module

    several = train(lambda m: [SGD(m.net[0].parameters(), lr=0.05), SGD(m.net[3].parameters(), lr=0.05)])
    one = train(lambda m: SGD(m.parameters(), lr=0.05))
    assert all(torch.equal(a, b) for a, b in zip(several.parameters(), one.parameters(), strict=True))


def test_the_plan_of_the_rate_is_printed_at_the_start(capsys):
    torch.manual_seed(0)
    module = TinyModule(configure=lambda m: halving(m, interval="step"))
    run(module, TinyData(12), device="cpu", fast_dev_run=2, callbacks={"progress": None})
    printed = capsys.readouterr().out
    assert "learning rate: ExponentialLR from 0.001, stepped every step; the run plans 2 steps\n" in printed
