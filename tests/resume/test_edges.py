"""Where a stop, a limit or a failure comes at an awkward moment, the run still goes on exactly or says why not."""

import os
import signal

import pytest
import torch

from camshaft.callback import Callback
from camshaft.checkpoint import Store
from camshaft.testing import TinyData, TinyModule, tiny_run

STEPS = 12


def run(place, module=None, **settings):
    torch.manual_seed(0)
    settings = {"max_steps": STEPS, "validate": "3 steps", "checkpoint": {"every": None}, **settings}
    return tiny_run(module or TinyModule(dropout=0.2), TinyData(), runs_dir=place, **settings)


def equal(left, right):
    return all(torch.equal(v, right.module.state_dict()[n]) for n, v in left.module.state_dict().items())


def checkpoints(place):
    (folder,) = place.glob("*/*/checkpoints")
    with Store(folder, read_only=True) as store:
        return {found.manifest.step: found.manifest.exact for found in store.checkpoints()}


class SignalInWarmUp(TinyModule):
    """Send a signal in the few validation batches that are tried before the first step."""

    sent = False

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_in_the_warm_up_saves_too(tmp_path):
    torch.manual_seed(0)
    stopped = run(tmp_path / "parts", SignalInWarmUp(dropout=0.2))
    assert (stopped.exit_code, stopped.step) == (143, 1)
    assert checkpoints(tmp_path / "parts") == {1: True}
    again = run(tmp_path / "parts", resume=str(stopped.run_dir))
    assert equal(again, run(tmp_path / "whole"))


class Late(Callback):
    """Let the time limit pass while a validation runs."""

    def on_validation_batch(self, state, output):
        if state.progress.step == 6:
            state.limits.max_secs = 1e-6
            state.next_poll = 0.0


def test_a_time_limit_that_passes_in_a_validation_lets_it_end_and_stops_after_the_next_step(tmp_path):
    whole = run(tmp_path / "whole")
    stopped = run(tmp_path / "parts", callbacks={"late": Late()}, max_time="1 hour")
    assert (stopped.status, stopped.exit_code, stopped.step) == ("stopped", 0, 7)
    assert "val/loss" in stopped.metrics
    again = run(tmp_path / "parts", resume=str(stopped.run_dir))
    assert equal(again, whole)
    assert again.metrics["val/loss"] == whole.metrics["val/loss"]


class FailsInUpdate(torch.optim.SGD):
    """Fail once half of the weights are updated."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        if self.count == 6:
            parameters = self.param_groups[0]["params"]
            with torch.no_grad():
                parameters[0].add_(1.0)
            raise RuntimeError("half an update")
        return super().step(closure)


def test_an_exception_in_the_update_saves_nothing(tmp_path):
    module = TinyModule(configure=lambda module: FailsInUpdate(module.parameters(), lr=0.05))
    with pytest.raises(RuntimeError, match="half an update"):
        run(tmp_path, module, checkpoint={"every": "4 steps"})
    assert checkpoints(tmp_path) == {4: True}


class FailsAtSave(Callback):
    def on_step_start(self, state, window):
        if state.progress.step == 5:
            raise RuntimeError("as told")


def test_where_only_an_inexact_checkpoint_is_left_auto_begins_the_run_anew(tmp_path):
    with pytest.raises(RuntimeError, match="as told"):
        run(tmp_path, callbacks={"fails": FailsAtSave()})
    assert checkpoints(tmp_path) == {5: False}
    (path,) = tmp_path.glob("*/*/checkpoints/step_*")
    # The run has no exact one: it begins anew in the same directory.
    again = run(tmp_path, resume="auto")
    assert again.run_dir == path.parent.parent
    assert equal(again, run(tmp_path / "whole"))


def test_a_damaged_checkpoint_is_passed_over_and_the_end_is_the_same(tmp_path):
    class Killed(BaseException):
        pass

    class Dies(Callback):
        def on_step_start(self, state, window):
            if state.progress.step == 8:
                raise Killed

    settings = {"checkpoint": {"every": "3 steps", "keep_last": 2, "on_exception": False}}
    with pytest.raises(Killed):
        run(tmp_path / "parts", callbacks={"dies": Dies()}, **settings)
    assert checkpoints(tmp_path / "parts") == {3: True, 6: True}
    (newest,) = (tmp_path / "parts").glob("*/*/checkpoints/step_00000006*")
    file = newest / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    started = []

    class First(Callback):
        def on_fit_start(self, state):
            started.append(state.progress.step)

    again = run(tmp_path / "parts", callbacks={"first": First()}, resume="auto", **settings)
    assert started == [3]
    assert equal(again, run(tmp_path / "whole", **settings))
