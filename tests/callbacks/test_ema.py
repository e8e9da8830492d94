"""Averages follow the formula, stand in for validation exactly, and are saved beside the weights."""

import pytest
import torch
from safetensors.torch import load_file

from camshaft.callback import Callback
from camshaft.callbacks.ema import EMA
from camshaft.errors import CheckpointError, RecipeError
from camshaft.testing import StopAt, TinyData, TinyModule, tiny_run


class Follow(Callback):
    """Average by hand, in the order of the formula; look at the weights during validation."""

    def __init__(self, decay, *, warmup=True):
        self.decay, self.warmup, self.average, self.count, self.seen = decay, warmup, None, 0, []

    def on_fit_start(self, state):
        self.average = {n: p.detach().clone() for n, p in state.module.named_parameters()}

    def on_step(self, state):
        self.count += 1
        decay = min(self.decay, (1 + self.count) / (10 + self.count)) if self.warmup else self.decay
        for name, parameter in state.module.named_parameters():
            self.average[name].lerp_(parameter.detach(), 1 - decay)

    def on_validation_batch(self, state, output):
        self.seen.append({n: p.detach().clone() for n, p in state.module.named_parameters()})


@pytest.mark.parametrize("warmup", [True, False])
def test_averages_follow_the_formula(warmup):
    ema, follow = EMA(0.9, warmup=warmup), Follow(0.9, warmup=warmup)
    tiny_run(callbacks={"ema": ema, "follow": follow}, max_epochs=2)
    assert ema.averages.keys() == follow.average.keys()
    assert all(torch.equal(ema.averages[name], value) for name, value in follow.average.items())


def test_validation_sees_the_averages_and_training_goes_on_with_the_weights():
    follow = Follow(0.9)
    result = tiny_run(callbacks={"ema": EMA(0.9), "follow": follow}, max_epochs=1)
    assert all(torch.equal(follow.seen[-1][name], value) for name, value in follow.average.items())
    plain = tiny_run(max_epochs=1)
    for name, value in plain.module.state_dict().items():
        assert torch.equal(result.module.state_dict()[name], value)


def test_without_evaluate_validation_sees_the_weights():
    follow = Follow(0.9)
    result = tiny_run(callbacks={"ema": EMA(0.9, evaluate=False), "follow": follow}, max_epochs=1)
    assert all(torch.equal(follow.seen[-1][name], v) for name, v in result.module.state_dict().items())


def test_weights_come_back_when_validation_fails():
    class Fails(TinyModule):
        calls = 0

        def validation_step(self, batch, batch_idx):
            self.calls += 1
            if self.calls > 2:  # those are the trial before training
                raise RuntimeError("as told")

    torch.manual_seed(0)
    module = Fails()
    with pytest.raises(RuntimeError, match="as told"):
        tiny_run(module, callbacks={"ema": EMA(0.5)}, max_epochs=1)
    torch.manual_seed(0)
    plain = tiny_run(TinyModule(), max_epochs=1, validate=None)
    assert all(torch.equal(module.state_dict()[n], v) for n, v in plain.module.state_dict().items())


def test_frozen_parameters_and_buffers_have_no_average():
    module = TinyModule()
    module.net[0].weight.requires_grad_(False)
    ema = EMA()
    tiny_run(module, callbacks={"ema": ema}, max_steps=1)
    assert "net.0.weight" not in ema.averages
    assert "net.0.bias" in ema.averages


def test_a_checkpoint_holds_both(tmp_path):
    ema = EMA(0.9)
    result = tiny_run(callbacks={"ema": ema}, max_steps=4, checkpoint={"every": None}, runs_dir=tmp_path)
    (path,) = (result.run_dir / "checkpoints").glob("step_*")
    raw, average = load_file(path / "model.safetensors"), load_file(path / "ema.safetensors")
    assert {n.removeprefix("model/") for n in raw} >= {n.removeprefix("ema/") for n in average}
    for name, value in ema.averages.items():
        assert torch.equal({n.removeprefix("ema/"): t for n, t in average.items()}[name], value)


def test_a_checkpoint_without_averages_is_refused_by_name(tmp_path):
    first = tiny_run(
        data=TinyData(), callbacks={"stop": StopAt(2)}, checkpoint={"every": None}, runs_dir=tmp_path, max_steps=4
    )
    with pytest.raises(CheckpointError, match=r"has no average of 'net\.0\.weight' for callback 'ema'"):
        tiny_run(
            callbacks={"ema": EMA()}, checkpoint={"every": None}, runs_dir=tmp_path, max_steps=4,
            resume=str(first.run_dir), allow_changes=["callbacks"],
        )  # fmt: skip


@pytest.mark.parametrize("decay", [1.0, -0.1, 2.0])
def test_a_decay_that_never_moves_is_refused(decay):
    with pytest.raises(RecipeError, match=f"EMA.decay is {decay}"):
        EMA(decay)
