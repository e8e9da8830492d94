"""Checkpoints are written when due, ranked by their own weights' metric, and deleted as the recipe says."""

import pytest

from camshaft.callback import Callback
from camshaft.callbacks.checkpoint import Checkpoint
from camshaft.errors import MetricError, RecipeError
from camshaft.testing import TinyModule, tiny_run


class Scores(TinyModule):
    """Log the scores that were given, one a validation after the trial."""

    def __init__(self, scores):
        super().__init__()
        self.scores, self.turn = list(scores), -2

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.turn += 1
        self.log("val/score", float(self.scores[self.turn]))


class Look(Callback):
    """Keep the checkpoint callback, and what was durable when it was announced."""

    def __init__(self):
        self.checkpoint, self.saved = None, []

    def on_fit_start(self, state):
        self.checkpoint = state.callbacks["checkpoint"]

    def on_checkpoint_saved(self, state, path):
        self.saved.append((state.saved.step, (path / "manifest.json").exists()))


def fit(tmp_path, scores=(1, 2, 3), **options):
    """Train an epoch of six steps for every score; return the directory's checkpoints by step, and the callback."""
    look = Look()
    result = tiny_run(
        Scores(scores), callbacks={"look": look}, max_epochs=len(scores), runs_dir=tmp_path, checkpoint=options
    )
    steps = sorted(int(path.name[5:13]) for path in (result.run_dir / "checkpoints").glob("step_*"))
    return steps, look.checkpoint, result


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"every": "1 epoch", "keep_last": 1}, [18]),
        ({"every": "1 epoch", "keep_last": 2}, [12, 18]),
        ({"every": "4 steps", "keep_last": 9}, [4, 8, 12, 16, 18]),
        ({"every": "4 steps", "keep_last": 1, "keep_every": 8}, [8, 16, 18]),
        ({"every": None}, [18]),
        ({"every": {"at": [3, 5]}, "keep_last": 9, "at_end": False}, [3, 5]),
    ],
    ids=str,
)
def test_what_is_due_is_written_and_what_nothing_keeps_is_deleted(tmp_path, options, kept):
    assert fit(tmp_path, **options)[0] == kept


@pytest.mark.parametrize(
    ("mode", "best", "kept"),
    [("max", (5.0, 12), [12, 24]), ("min", (1.0, 6), [6, 24])],
)
def test_the_best_is_kept_by_the_metric_of_its_own_weights(tmp_path, mode, best, kept):
    steps, callback, result = fit(
        tmp_path, scores=(1, 5, 3, 2), monitor="val/score", mode=mode, keep_last=1, every="1 epoch"
    )
    assert steps == kept
    assert callback.best[:2] == best
    assert result.best == callback.best


def test_a_checkpoint_between_validations_has_no_rank(tmp_path):
    _, callback, _ = fit(tmp_path, monitor="val/score", mode="min", every="4 steps", keep_last=9, keep_best=9)
    # Only every twelfth step is both saved and validated, and the last one.
    assert [step for _, step, _ in callback.ranked] == [12, 18]


def test_several_best_are_kept_in_order(tmp_path):
    steps, callback, _ = fit(
        tmp_path, scores=(4, 1, 3, 2, 5), monitor="val/score", mode="max", keep_best=2, keep_last=1, every="1 epoch"
    )
    assert [value for value, *_ in callback.ranked] == [5.0, 4.0]
    assert steps == [6, 30]


@pytest.mark.parametrize("background", [False, True])
def test_it_is_durable_when_it_is_announced(tmp_path, background):
    look = Look()
    options = {"every": "3 steps", "background": background, "keep_last": 9}
    tiny_run(callbacks={"look": look}, max_steps=12, runs_dir=tmp_path, checkpoint=options)
    assert look.saved == [(step, True) for step in (3, 6, 9, 12)]


def test_a_name_that_nothing_logs_is_told(tmp_path):
    with pytest.raises(MetricError, match="Did you mean 'val/score'"):
        fit(tmp_path, monitor="val/scores")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"mode": "best"}, "Checkpoint.mode is 'best'."),
        ({"keep_last": 0}, "Checkpoint.keep_last is 0."),
        ({"keep_best": 0}, "Checkpoint.keep_best is 0."),
        ({"keep_every": -1}, "Checkpoint.keep_every is -1."),
        ({"every": "often"}, "'often' is not an interval."),
    ],
)
def test_options_that_make_no_sense_are_refused(options, line):
    with pytest.raises(RecipeError) as error:
        Checkpoint(**options)
    assert str(error.value).splitlines()[0] == line


def test_a_schedule_that_never_fires_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="No checkpoint would ever be written"):
        fit(tmp_path, every="500 steps", at_end=False)
