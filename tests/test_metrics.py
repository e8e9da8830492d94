"""What is logged becomes the number that it should, on any device, in bounded memory, over any ranks."""

import math
import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from torchmetrics import Accuracy, MeanMetric, MetricCollection
from torchmetrics.classification import BinaryF1Score, BinaryPrecision, BinaryRecall

from camshaft.errors import MetricError
from camshaft.metrics import Metrics, missing_metric


def alone(value):
    return [value]


@pytest.fixture(params=[True, False], ids=["read at once", "as on an accelerator"])
def metrics(request):
    return Metrics(reads_at_once=request.param)


def evaluating(metrics):
    metrics.training = False
    return metrics


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.float32(2), np.float64(2), np.int64(2), np.array(2.0), np.array([2.0]), torch.tensor(2.0), Fraction(2),
     Decimal(2), torch.tensor([[2.0]]), torch.tensor(2), torch.tensor(2.0, dtype=torch.bfloat16),
     torch.tensor(2.0, dtype=torch.float16), torch.nn.Parameter(torch.tensor(2.0))],
    ids=lambda v: f"{type(v).__name__} {getattr(v, 'dtype', '')}",
)  # fmt: skip
def test_every_kind_of_number_is_logged(metrics, value):
    metrics.log("a", value)
    assert metrics.step.flush(alone) == {"a": 2.0}


@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(True)])
def test_a_truth_value_counts_as_one(metrics, value):
    metrics.log("a", value)
    metrics.log("a", 0.0)
    assert metrics.step.flush(alone) == {"a": 0.5}


@pytest.mark.parametrize(
    "value", [torch.ones(2), torch.empty(0), np.ones(2), "2.0", None, {"a": 1}, [1.0], 1j, object()], ids=str
)
def test_what_is_no_number_is_refused_by_name(metrics, value):
    with pytest.raises(MetricError, match="'loss' was logged as"):
        metrics.log("loss", value)


@pytest.mark.parametrize("name", ["", 3])
def test_what_is_no_name_is_refused(metrics, name):
    with pytest.raises(MetricError):
        metrics.log(name, 1.0)


@pytest.mark.parametrize(("reduce", "expected"), [("mean", 2.0), ("sum", 6.0), ("min", 1.0), ("max", 3.0)])
@pytest.mark.parametrize("kind", [float, torch.tensor, np.float32], ids=["float", "tensor", "numpy"])
def test_values_are_reduced_as_asked(metrics, reduce, expected, kind):
    for value in (2.0, 1.0, 3.0):
        metrics.log("a", kind(value), reduce=reduce)
    assert metrics.step.flush(alone) == {"a": expected}


@pytest.mark.parametrize("reduce", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["float", "tensor"])
def test_a_nan_shows_wherever_it_comes(metrics, reduce, place, kind):
    values = [1.0, 2.0, 3.0]
    values[place] = math.nan
    for value in values:
        metrics.log("a", kind(value), reduce=reduce)
    assert math.isnan(metrics.step.flush(alone)["a"])


def test_an_unknown_reduction_is_refused(metrics):
    with pytest.raises(MetricError, match="'median'"):
        metrics.log("a", 1.0, reduce="median")


def test_one_name_has_one_reduction(metrics):
    metrics.log("a", 1.0, reduce="max")
    with pytest.raises(MetricError, match="was with 'max'"):
        metrics.log("a", 1.0, reduce="min")


def test_means_are_weighted_by_samples(metrics):
    for value, weight in ((1.0, 3), (5.0, 1)):
        metrics.weight = weight
        metrics.log("a", torch.tensor(value))
    assert metrics.step.flush(alone) == {"a": 2.0}


@pytest.mark.parametrize("kind", [float, torch.tensor, np.float32], ids=["float", "tensor", "numpy"])
def test_a_batch_size_stands_for_the_weight(metrics, kind):
    metrics.weight = 100
    metrics.log("a", kind(1.0), batch_size=3)
    metrics.log("a", kind(5.0), batch_size=torch.tensor(1))
    assert metrics.step.flush(alone) == {"a": 2.0}


def test_a_value_that_changes_after_it_was_logged_is_kept_as_it_was(metrics):
    value = torch.tensor(3.0)
    metrics.log("a", value)
    value /= 3
    assert metrics.step.flush(alone) == {"a": 3.0}


def test_a_logged_loss_keeps_no_graph(metrics):
    loss = torch.ones((), requires_grad=True) * 2
    metrics.log("a", loss)
    assert all(not value.requires_grad for value in metrics.step.series["a"].pending)


def test_memory_is_bounded_and_the_sum_exact():
    metrics = Metrics(reads_at_once=False)
    for index in range(10_000):
        metrics.log("a", torch.tensor(float(index)), reduce="mean")
        assert len(metrics.step.series["a"].pending) < 256
    assert metrics.step.flush(alone) == {"a": 4999.5}


def test_deferred_and_immediate_values_give_the_same_numbers():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(1000, generator=generator)
    results = []
    for reads_at_once in (True, False):
        metrics = Metrics(reads_at_once=reads_at_once)
        for index, value in enumerate(values):
            metrics.weight = index % 7 + 1
            for reduce in ("mean", "sum", "min", "max"):
                metrics.log(reduce, value, reduce=reduce)
        results.append(metrics.step.flush(alone))
    assert results[0] == pytest.approx(results[1], rel=1e-12)


def test_host_numbers_and_tensors_of_several_dtypes_share_a_name(metrics):
    for value in (1.0, torch.tensor(2.0), torch.tensor(3), torch.tensor(4.0, dtype=torch.bfloat16), 5):
        for reduce in ("mean", "max", "min"):
            metrics.log(reduce, value, reduce=reduce)
    assert metrics.step.flush(alone) == {"mean": 3.0, "max": 5.0, "min": 1.0}


def test_training_values_are_step_values_by_default_and_fork_with_both(metrics):
    metrics.log("a", 1.0)
    metrics.log("b", 2.0, on_step=False, on_epoch=True)
    metrics.log("c", 3.0, on_step=True, on_epoch=True)
    assert metrics.step.flush(alone) == {"a": 1.0, "c_step": 3.0}
    metrics.log("c", 5.0, on_step=True, on_epoch=True)
    assert metrics.step.flush(alone) == {"c_step": 5.0}
    assert metrics.epoch.flush(alone) == {"b": 2.0, "c_epoch": 4.0}


def test_a_name_can_be_logged_in_training_and_in_evaluation(metrics):
    metrics.log("a", 1.0, on_step=True, on_epoch=True)
    evaluating(metrics).log("a", 7.0, on_step=True, on_epoch=True)
    assert metrics.evaluation.flush(alone) == {"a": 7.0}
    assert metrics.step.flush(alone) == {"a_step": 1.0}


def test_several_loaders_have_names_of_their_own_whatever_was_logged_before(metrics):
    evaluating(metrics).log("a", 1.0)
    for number in range(2):
        metrics.suffix = f"/dataloader_idx_{number}"
        metrics.log("a", 2.0 + number)
    metrics.suffix = ""
    metrics.log("a", 3.0)
    assert metrics.evaluation.flush(alone) == {"a": 2.0, "a/dataloader_idx_0": 2.0, "a/dataloader_idx_1": 3.0}


def test_what_was_flushed_is_gone_and_untouched_names_are_left_out(metrics):
    metrics.log("a", 1.0)
    metrics.step.flush(alone)
    metrics.log("b", 1.0)
    assert metrics.step.flush(alone) == {"b": 1.0}


def test_a_muted_batch_leaves_no_number(metrics):
    metrics.muted = True
    metrics.log("a", 1.0)
    assert metrics.step.flush(alone) == {}


def test_progress_names_cover_both_forks(metrics):
    metrics.log("a", 1.0, prog_bar=True)
    assert {"a", "a_step", "a_epoch"} <= metrics.prog_bar


# -- the loss


def test_the_loss_is_logged_unless_the_module_logs_that_name(metrics):
    metrics.log_loss(torch.tensor(2.0), 1)
    assert metrics.step.flush(alone) == {"train/loss": 2.0}
    own = Metrics(reads_at_once=metrics.reads_at_once)
    own.log("train/loss", 5.0, on_step=True, on_epoch=True)
    own.log_loss(torch.tensor(2.0), 1)
    assert own.step.flush(alone) == {"train/loss_step": 5.0}


def test_a_module_that_logs_the_loss_later_is_not_counted_twice(metrics):
    metrics.log_loss(torch.tensor(2.0), 1)
    metrics.step.flush(alone)
    metrics.log("train/loss", 6.0, reduce="max")
    metrics.log_loss(torch.tensor(2.0), 1)
    assert metrics.step.flush(alone) == {"train/loss": 6.0}


def test_logging_the_loss_for_evaluation_leaves_the_training_loss_alone(metrics):
    evaluating(metrics).log("train/loss", 9.0)
    metrics.training = True
    metrics.log_loss(torch.tensor(2.0), 1)
    assert metrics.step.flush(alone) == {"train/loss": 2.0}


# -- ranks


def flush_together(*ranks, table="step"):
    """Flush several ranks' metrics with a gather that sees all of them."""
    sent = []
    for metrics in ranks:
        getattr(metrics, table).flush(lambda value: sent.append(value) or [value])
    return sent


def joined(sent):
    return Metrics().step.flush(lambda _: sent)


def test_ranks_may_log_different_names_and_counts():
    first, second = Metrics(), Metrics(reads_at_once=False)
    first.log("a", 1.0)
    first.log("only", 4.0)
    for value in (3.0, 5.0):
        second.log("a", torch.tensor(value))
    for metrics, value in ((first, 1.0), (second, math.nan)):
        metrics.log("low", value, reduce="min")
        metrics.log("all", 2.0, reduce="sum")
    values = joined(flush_together(first, second))
    assert math.isnan(values.pop("low"))
    assert values == {"a": 3.0, "only": 4.0, "all": 4.0}


def test_a_metric_object_that_a_rank_lacks_is_an_error_and_no_hang():
    metric = MeanMetric()
    metric.update(1.0)
    sent = [({}, ["a"]), ({}, [])]
    with pytest.raises(MetricError, match="rank 0 logged"):
        Metrics().step.flush(lambda _: sent)


def test_a_rank_of_padding_alone_still_takes_part_in_metric_objects():
    metrics = evaluating(Metrics())
    metrics.muted = True
    metrics.log("a", MeanMetric())
    assert list(metrics.evaluation.objects) == ["a"]


# -- torchmetrics


def test_a_metric_object_computes_over_its_epoch_and_starts_again(metrics):
    accuracy = Accuracy(task="binary")
    evaluating(metrics)
    for predicted in ([1, 1, 1, 1], [0, 1]):
        accuracy.update(torch.tensor(predicted), torch.ones(len(predicted), dtype=torch.int))
        metrics.log("acc", accuracy)
    assert metrics.evaluation.flush(alone) == {"acc": pytest.approx(5 / 6)}
    assert not accuracy.update_called


def test_a_metric_object_in_training_forks_like_a_number(metrics):
    mean = MeanMetric()
    for value in (1.0, 3.0):
        mean(value)
        metrics.log("m", mean, on_step=True, on_epoch=True)
    assert metrics.step.flush(alone) == {"m_step": 2.0}
    assert metrics.epoch.flush(alone) == {"m_epoch": 2.0}


def test_a_metric_object_logged_on_steps_alone_is_reset_at_the_epochs_end(metrics):
    mean = MeanMetric()
    mean(4.0)
    metrics.log("m", mean, on_step=True, on_epoch=False)
    assert metrics.step.flush(alone) == {"m": 4.0}
    assert metrics.epoch.flush(alone) == {}
    assert not mean.update_called


def collection():
    return MetricCollection({"p": BinaryPrecision(), "r": BinaryRecall(), "f": BinaryF1Score()}, prefix="bin_")


BATCHES = [(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 1, 0])), (torch.tensor([1, 1]), torch.tensor([1, 1]))]
EXPECTED = {"bin_p": 3 / 4, "bin_r": 3 / 4, "bin_f": 3 / 4}


def test_a_collection_is_logged_under_one_name(metrics):
    evaluating(metrics)
    for _ in range(2):
        both = collection()
        for batch in BATCHES:
            both.update(*batch)
            metrics.log("val", both)
        assert metrics.evaluation.flush(alone) == {f"val/{k}": pytest.approx(v) for k, v in EXPECTED.items()}


def test_a_collection_is_logged_as_a_dict_over_several_epochs(metrics):
    evaluating(metrics)
    both = collection()
    for _ in range(3):
        for batch in BATCHES:
            both(*batch)
            for name, metric in both.items():
                metrics.log(name, metric)
        assert metrics.evaluation.flush(alone) == {k: pytest.approx(v) for k, v in EXPECTED.items()}


def test_a_collection_in_training_logs_the_values_of_its_batches(metrics):
    both = collection()
    both(*BATCHES[1])
    metrics.log("t", both, on_step=True, on_epoch=False)
    assert metrics.step.flush(alone) == {f"t/{key}": 1.0 for key in EXPECTED}


def test_the_batch_values_a_metric_returned_are_plain_values(metrics):
    for name, value in collection()(*BATCHES[1]).items():
        metrics.log(name, value)
    assert metrics.step.flush(alone) == dict.fromkeys(EXPECTED, 1.0)


def test_a_metric_of_many_numbers_is_refused_by_name(metrics):
    accuracy = Accuracy(task="multiclass", num_classes=3, average=None)
    accuracy.update(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
    evaluating(metrics).log("acc", accuracy)
    with warnings.catch_warnings(), pytest.raises(MetricError, match="'acc' computed a tensor"):
        metrics.evaluation.flush(alone)


# -- saving


def test_sums_that_are_not_flushed_survive_a_save(metrics):
    restored = Metrics()
    for value in (1.0, 3.0):
        metrics.log("a", torch.tensor(value), prog_bar=True)
        metrics.log("low", value, on_epoch=True, reduce="min")
    restored.load_state_dict(metrics.state_dict())
    for source in (metrics, restored):
        source.log("a", 8.0)
        source.log("low", 2.0, on_epoch=True, reduce="min")
    assert restored.step.flush(alone) == metrics.step.flush(alone) == {"a": 4.0, "low_step": 1.0}
    assert restored.epoch.flush(alone) == metrics.epoch.flush(alone) == {"low_epoch": 1.0}
    assert "a" in restored.prog_bar


def test_one_rank_may_take_back_the_sums_of_several():
    first, second, restored = Metrics(), Metrics(), Metrics()
    for metrics, value in ((first, 1.0), (second, 5.0)):
        for reduce in ("mean", "sum", "min", "max"):
            metrics.log(reduce, value, reduce=reduce)
        restored.load_state_dict(metrics.state_dict())
    assert restored.step.flush(alone) == {"mean": 3.0, "sum": 6.0, "min": 1.0, "max": 5.0}


def test_a_monitored_name_that_nothing_logs_names_the_nearest():
    assert "Did you mean 'val/loss'?" in str(missing_metric("val_loss", ["val/loss", "acc"], "callbacks.checkpoint"))
    assert "Log it with self.log" in str(missing_metric("val_loss", [], "callbacks.checkpoint"))
