"""Early stopping counts validations, and says why it stopped."""

import math

import pytest

from camshaft.callbacks.stopping import EarlyStopping
from camshaft.errors import CallbackError, MetricError, RecipeError
from camshaft.testing import TinyModule, tiny_run


class Scores(TinyModule):
    """Log the scores that were given, one a validation."""

    def __init__(self, scores):
        super().__init__()
        # The trial before training takes the first turn.
        self.scores, self.turn = list(scores), -2

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.turn += 1
        self.log("val/score", float(self.scores[self.turn]))


def steps(scores, **options):
    """Return the steps that a run with six steps an epoch took."""
    stopping = EarlyStopping("val/score", **options)
    result = tiny_run(Scores(scores), callbacks={"stopping": stopping}, max_epochs=len(scores))
    return result.step // 6, result.status, stopping


@pytest.mark.parametrize(
    ("scores", "options", "epochs"),
    [
        ([3, 2, 2, 2, 1], {"patience": 2}, 4),
        ([3, 2, 1, 0], {"patience": 1}, 4),
        ([1, 2, 3, 3], {"patience": 1, "mode": "max"}, 4),
        ([1, 1.05, 1.2], {"patience": 1, "mode": "max", "min_delta": 0.1}, 2),
        ([1, 0.95, 0.8], {"patience": 1, "min_delta": 0.1}, 2),
        ([5, 4, 0.5, 3], {"threshold": 1.0}, 3),
        ([1, 2, 3, 4, 5], {"patience": 1, "min_steps": 20}, 4),
        ([math.nan, math.nan, 1.0], {"patience": 2}, 2),
    ],
)
def test_it_stops_when_it_should(scores, options, epochs):
    took, status, _ = steps(scores, **options)
    assert took == epochs
    assert status == ("stopped" if epochs < len(scores) else status)


def test_the_count_and_the_best_are_kept():
    _, _, stopping = steps([3, 1, 2], patience=5)
    assert stopping.state_dict() == {"best": 1.0, "best_step": 12, "waited": 1}


def test_a_name_that_nothing_logs_is_told_with_those_that_exist():
    with pytest.raises(MetricError) as error:
        tiny_run(callbacks={"stopping": EarlyStopping("val/los")}, max_epochs=2)
    assert "val/los" in str(error.value)
    assert "val/loss" in str(error.value)


def test_a_run_that_never_validates_is_refused():
    with pytest.raises(CallbackError, match="this run never validates"):
        tiny_run(callbacks={"stopping": EarlyStopping("val/loss")}, validate=None)


@pytest.mark.parametrize("options", [{"mode": "least"}, {"patience": 0}, {"min_delta": -1.0}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(RecipeError, match="EarlyStopping"):
        EarlyStopping("val/loss", **options)
