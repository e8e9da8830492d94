"""A data module is prepared once, set up for its stage, closed whatever happens, and its state goes along."""

import pytest
import torch

from camshaft import DataModule, run
from camshaft.callback import Callback
from camshaft.checkpoint import Reader
from camshaft.testing import StopAt, TinyData, TinyModule, tiny_run


class Logged(TinyData):
    """Note every call."""

    def __init__(self):
        super().__init__(8, test=True)
        self.calls, self.seen = [], 0

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self):
        self.calls.append("train_dataloader")
        return super().train_dataloader()

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.calls.append(f"load {state}")


def test_a_data_module_is_prepared_set_up_and_closed_in_order():
    data = Logged()
    tiny_run(data=data)
    assert data.calls == ["prepare_data", "setup fit", "setup test", "train_dataloader", "teardown fit"]


def test_it_is_closed_after_an_exception_too():
    class Fail(Callback):
        def on_step(self, state):
            raise ArithmeticError

    data = Logged()
    with pytest.raises(ArithmeticError):
        tiny_run(data=data, callbacks={"fail": Fail()})
    assert data.calls[-1] == "teardown fit"


def test_its_state_goes_into_checkpoints_and_comes_back(tmp_path):
    data = Logged()
    data.seen = 7
    settings = {"runs_dir": tmp_path, "checkpoint": {}, "max_epochs": 2}
    first = tiny_run(data=data, callbacks={"stop": StopAt(1)}, **settings)
    with Reader(next((first.run_dir / "checkpoints").glob("step_*"))) as reader:
        assert reader.data("data") == {"seen": 7}
    again = Logged()
    tiny_run(data=again, resume=str(first.run_dir), **settings)
    assert "load {'seen': 7}" in again.calls


def test_what_prepare_data_raises_is_raised():
    class Fails(DataModule):
        def prepare_data(self):
            raise OSError("no such host")

    with pytest.raises(OSError, match="no such host"):
        tiny_run(data=Fails())


def test_a_module_may_own_its_loaders():
    class Owns(TinyModule):
        def train_dataloader(self):
            return TinyData(8).train_dataloader()

        def val_dataloader(self):
            return TinyData(8).val_dataloader()

    result = tiny_run(Owns(), DataModule())
    assert (result.step, "val/loss" in result.metrics) == (2, True)


def test_plain_loaders_may_be_passed_as_they_are():
    data, seen = TinyData(12, test=True), []

    class Names(Callback):
        def on_validation_end(self, state, metrics):
            seen.append(state.stage)

    torch.manual_seed(0)
    result = run(
        TinyModule(), data.train_dataloader(), val_data=data.val_dataloader(), test_data=data.test_dataloader(),
        callbacks={"names": Names(), "progress": None, "summary": None}, max_epochs=1, checkpoint=False, device="cpu",
        loggers={"console": None, "jsonl": None, "tensorboard": None}, fast_dev_run=3,
    )  # fmt: skip
    assert (result.step, seen, "test/loss" in result.metrics) == (3, ["fit", "test"], True)
