"""Every bundled callback keeps the contract: plain state that comes back, exact resume, untouched weights."""

import pytest

from camshaft.callbacks.checkpoint import Checkpoint
from camshaft.callbacks.clip import ClipGradients
from camshaft.callbacks.ema import EMA
from camshaft.callbacks.finite import FiniteLoss
from camshaft.callbacks.lr import LRMonitor
from camshaft.callbacks.precision import Precision
from camshaft.callbacks.progress import ProgressBar
from camshaft.callbacks.seed import Seed
from camshaft.callbacks.stopping import EarlyStopping
from camshaft.callbacks.summary import ModelSummary
from camshaft.callbacks.throughput import Throughput
from camshaft.testing import check_callback

WATCHING = {
    "ema": lambda: EMA(0.9),
    "finite": FiniteLoss,
    "finite, skipping": lambda: FiniteLoss("skip"),
    "lr": lambda: LRMonitor(momentum=True, weight_decay=True),
    "progress": ProgressBar,
    "stopping": lambda: EarlyStopping("val/loss", patience=100),
    "summary": lambda: ModelSummary(depth=2),
    "throughput": Throughput,
}
CHANGING = {
    "clip": lambda: ClipGradients(0.1),
    "clip values": lambda: ClipGradients(max_value=0.01),
    "bf16": lambda: Precision("bf16"),
    "seed": lambda: Seed(7),
}


@pytest.mark.parametrize("name", WATCHING)
def test_a_callback_that_watches_leaves_training_alone(name):
    check_callback(WATCHING[name])


@pytest.mark.parametrize("name", CHANGING)
def test_a_callback_that_changes_training_does_so_alike_in_a_resumed_run(name):
    check_callback(CHANGING[name], changes_training=True)


def test_a_checkpoint_callback_gives_its_ranking_back():
    kept, again = Checkpoint(monitor="val/loss"), Checkpoint(monitor="val/loss")
    kept.ranked = [(0.5, 10, "step_00000010-epoch")]
    again.load_state_dict(kept.state_dict())
    assert again.best == (0.5, 10, "step_00000010-epoch")
