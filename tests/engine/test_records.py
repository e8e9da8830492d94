"""What is logged reaches loggers as records with one step axis, on the main process, and callbacks read the same."""

import pytest
import torch

from camshaft import Logger, StateError
from camshaft.callback import Callback
from camshaft.loggers.tensorboard import TensorBoard
from camshaft.testing import TinyData, TinyModule, tiny_run


class Keep(Logger):
    def __init__(self):
        self.records, self.calls = [], []

    def open(self, run):
        self.calls.append(("open", run.name, dict(run.hparams), run.resumed_step))

    def log_metrics(self, record):
        self.records.append(record)

    def log_text(self, name, text, step):
        self.calls.append(("text", name, text, step))

    def log_image(self, name, image, step):
        self.calls.append(("image", name, tuple(image.shape), step))

    def log_hparams(self, hparams, metrics):
        self.calls.append(("hparams", dict(hparams), sorted(metrics)))

    def close(self, status):
        self.calls.append(("close", status))


class Talks(TinyModule):
    """Log on steps, on epochs, on both, as text and as images."""

    def __init__(self, rate=0.1):
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("own/index", float(batch_idx))
        self.log("own/epoch", float(batch_idx), on_step=False, on_epoch=True)
        self.log("own/both", float(batch_idx), on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if batch_idx == 0:
            self.log_text("sample", "abc")
            self.log_image("picture", torch.zeros(3, 2, 2))


def records(**settings):
    keep = Keep()
    torch.manual_seed(0)
    result = tiny_run(Talks(0.5), TinyData(12, test=True), loggers={"keep": keep}, **settings)
    return keep, result


def test_records_come_in_the_order_of_the_boundary_on_one_step_axis():
    keep, _ = records(max_epochs=2, log_every=2)
    assert [(r.kind, r.step) for r in keep.records] == [
        ("step", 2), ("validation", 3), ("epoch", 3), ("step", 3),
        ("step", 4), ("validation", 6), ("epoch", 6), ("step", 6), ("test", 6),
    ]  # fmt: skip
    assert [r.samples for r in keep.records] == [8, 12, 12, 12, 16, 24, 24, 24, 24]
    assert [r.epoch for r in keep.records] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    seconds = [r.seconds for r in keep.records]
    assert seconds == sorted(seconds)


def test_values_are_means_since_the_last_record_and_over_the_epoch():
    keep, _ = records(max_epochs=1, log_every=2)
    steps = [r.values for r in keep.records if r.kind == "step"]
    assert [(v["own/index"], v["own/both_step"]) for v in steps] == [(0.5, 0.5), (2.0, 2.0)]
    (epoch,) = [r.values for r in keep.records if r.kind == "epoch"]
    assert epoch == {"own/epoch": 1.0, "own/both_epoch": 1.0}
    assert all("train/loss" in values for values in steps)


def test_a_logger_hears_of_the_whole_run():
    keep, result = records(max_epochs=1)
    assert keep.calls == [
        ("open", "talks", {"rate": 0.5}, 0), ("text", "sample", "abc", 3), ("image", "picture", (3, 2, 2), 3),
        ("hparams", {"rate": 0.5}, sorted(result.metrics)), ("close", "finished"),
    ]  # fmt: skip


def test_tensorboard_gets_hyperparameters_with_the_final_metrics(tmp_path):
    result = tiny_run(Talks(0.5), TinyData(12), loggers={"tensorboard": TensorBoard()}, runs_dir=tmp_path)
    (file,) = result.run_dir.glob("events.*")
    written = file.read_bytes()
    assert b"_hparams_/session_start_info" in written
    assert b"val/loss" in written


def test_callbacks_read_the_newest_value_of_a_name():
    read = []

    class Read(Callback):
        def on_epoch_end(self, state):
            read.append((state.value("val/loss"), state.value("own/epoch")))
            with pytest.raises(StateError, match="nothing has logged 'val/los'"):
                state.value("val/los")

    _, result = records(max_epochs=1, callbacks={"read": Read()})
    assert read == [(result.metrics["val/loss"], 1.0)]


@pytest.mark.parametrize("method", ["open", "log_metrics", "log_text", "log_hparams", "close"])
def test_a_dead_logger_is_dropped_with_a_warning_and_the_run_goes_on(method):
    def fail(self, *args):
        raise OSError("no route to host")

    dead, keep = type("Dead", (Logger,), {method: fail})(), Keep()
    torch.manual_seed(0)
    message = "^logger 'dead' failed and is off from here on: OSError: no route to host$"
    with pytest.warns(UserWarning, match=message) as warned:
        result = tiny_run(Talks(), TinyData(12), loggers={"dead": dead, "keep": keep})
    assert (result.status, len(warned), keep.calls[-1]) == ("finished", 1, ("close", "finished"))


def test_a_logger_may_end_the_run_when_asked():
    class Dead(Logger):
        on_error = "raise"

        def log_metrics(self, record):
            raise OSError("no route to host")

    with pytest.raises(OSError, match="no route to host"):
        tiny_run(Talks(), TinyData(12), loggers={"dead": Dead()})
