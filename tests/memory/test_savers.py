"""Check that what saves memory changes no result, and that each is what it says."""

import pytest
import torch
from parts import Pairs, Stack, different, distance, fit, stack, weights
from torch import nn
from torch._dynamo import register_backend
from torch.nn.functional import mse_loss

from camshaft import Callback
from camshaft.callbacks.activation_checkpointing import ActivationCheckpointing
from camshaft.callbacks.clip import ClipGradients
from camshaft.callbacks.compile import Compile
from camshaft.callbacks.ema import EMA
from camshaft.callbacks.freeze import Freeze
from camshaft.callbacks.gradient_checkpointing import GradientCheckpointing
from camshaft.callbacks.offload import Offload
from camshaft.callbacks.precision import Precision
from camshaft.checkpoint.reader import Reader
from camshaft.errors import RecipeError, StrategyError
from camshaft.strategies.deepspeed import DeepSpeed
from camshaft.testing import StopAt, run_processes


class Saved(Callback):
    """Count the bytes that forward keeps for backward in the first step."""

    def __init__(self):
        self.bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def on_batch(self, state, batch):
        if not state.progress.step:
            self._hooks.__enter__()

    def on_backward(self, state, loss):
        if not state.progress.step:
            self._hooks.__exit__()

    def _pack(self, tensor):
        if not isinstance(tensor, nn.Parameter):
            self.bytes += tensor.numel() * tensor.element_size()
        return tensor


def again(make, tmp_path, **module):
    """Train whole, and in two halves; return both results. ``make`` gives new callbacks."""
    whole = fit(stack(**module), make(), accumulate=2)
    settings = {"accumulate": 2, "runs_dir": tmp_path, "checkpoint": {"every": None}}
    first = fit(stack(**module), {**make(), "stop": StopAt(4)}, **settings)
    return whole, fit(stack(seed=1, **module), make(), **settings, resume=str(first.run_dir))


def companions():
    """What must stay exact beside every saver."""
    return {"clip_gradients": ClipGradients(0.5), "ema": EMA(0.9)}


# -- activation checkpointing ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        ({"stride": 2}, ["blocks.0", "blocks.2"]),
        ({"layers": "Block", "stride": 3}, ["blocks.0", "blocks.3"]),
        ({"layers": ["blocks.1", "up"]}, ["blocks.0.up", "blocks.1", "blocks.2.up", "blocks.3.up"]),
    ],
)
def test_recomputing_activations_changes_no_bit_and_keeps_less(arguments, names):
    plain, less, recompute = Saved(), Saved(), ActivationCheckpointing(**arguments)
    # Autocast and dropout have to be those of the first forward.
    reference = fit(stack(dropout=0.1), {"precision": Precision("bf16"), "saved": plain})
    run = fit(stack(dropout=0.1), {"precision": Precision("bf16"), "recompute": recompute, "saved": less})
    assert recompute.names == names
    assert not different(weights(run), weights(reference))
    assert less.bytes < plain.bytes


def test_recomputing_survives_accumulation_averages_clipping_and_a_resume(tmp_path):
    whole, resumed = again(lambda: {"recompute": ActivationCheckpointing(), **companions()}, tmp_path, dropout=0.1)
    assert not different(weights(resumed), weights(whole))


def test_a_layer_that_is_not_there_is_refused_with_what_is():
    with pytest.raises(RecipeError, match=r"names 'Blok', and Stack has no layer(?s:.)*Did you mean 'Block'"):
        fit(callbacks={"recompute": ActivationCheckpointing("Blok")})


# -- offload ---------------------------------------------------------------------------------------


def test_offloading_activations_and_optimizer_state_changes_no_bit(tmp_path):
    def make():
        return {"offload": Offload(activations=True, optimizer=True), **companions()}

    whole, resumed = again(make, tmp_path)
    assert not different(weights(whole), weights(fit(callbacks=companions(), accumulate=2)))
    assert not different(weights(resumed), weights(whole))


def test_offload_without_anything_to_move_is_refused():
    with pytest.raises(RecipeError, match="neither activations nor optimizer"):
        Offload()
    with pytest.raises(StrategyError, match="offload_optimizer: cpu"):
        Offload(optimizer=True).on_launch(DeepSpeed(2))


# -- compile ---------------------------------------------------------------------------------------


# torch hides this warning of its own, but only from being shown.
hidden = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Plain(Stack):
    """A stack whose step changes nothing of its own, which would be compiled anew each time."""

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.log("outputs", outputs.float().mean())
        return mse_loss(outputs.float(), batch[1])


def plain(seed=0):
    torch.manual_seed(seed)
    return Plain()


@hidden
@pytest.mark.parametrize(("layers", "most"), [(None, 3), (["Block"], 1)])
def test_compiling_keeps_names_and_what_is_logged(layers, most, tmp_path):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    register_backend(count, name=f"count_{most}")
    reference = fit(plain())
    callbacks = {"compile": Compile(layers, backend=f"count_{most}")}
    run = fit(plain(), callbacks, runs_dir=tmp_path, checkpoint={"every": 8})
    # A step that logs has a graph before and one after; blocks of one class share theirs.
    assert 1 <= len(graphs) <= most
    assert distance(weights(run), weights(reference)) < 1e-5
    assert run.metrics["outputs"] == pytest.approx(reference.metrics["outputs"], rel=1e-4)
    [saved] = (run.run_dir / "checkpoints").glob("step_*")
    with Reader(saved) as reader:
        assert set(reader.names("model")) == {f"model/{name}" for name in reference.module.state_dict()}
    again = fit(plain(1), runs_dir=tmp_path, checkpoint={"every": None}, resume=str(run.run_dir), max_steps=10)
    assert again.step == 10


@hidden
def test_compiled_blocks_survive_accumulation_averages_clipping_and_a_resume(tmp_path):
    whole, resumed = again(lambda: {"c": Compile("Block", backend="aot_eager"), **companions()}, tmp_path)
    assert not different(weights(resumed), weights(whole))


def test_a_whole_step_in_one_graph_is_refused():
    with pytest.raises(RecipeError, match="fullgraph: true for the whole step"):
        Compile(fullgraph=True)


# -- gradient checkpointing of Transformers --------------------------------------------------------


def test_gradient_checkpointing_without_a_transformers_model_is_refused():
    with pytest.raises(RecipeError, match=r"no Transformers model(?s:.)*activation_checkpointing"):
        fit(callbacks={"recompute": GradientCheckpointing()})


# -- freezing --------------------------------------------------------------------------------------


def test_what_is_frozen_keeps_its_weights_and_has_no_state():
    before = stack().state_dict()
    counted = {}

    class Count(StopAt):
        def on_step(self, state):
            super().on_step(state)
            counted["states"] = len(state.optimizers[0].state)

    run = fit(callbacks={"freeze": Freeze(["Block"]), "count": Count(8)})
    changed = different(weights(run), before)
    assert sorted(changed) == ["head.bias", "head.weight", "inner.bias", "inner.weight"]
    assert counted["states"] == 4


def with_optimizer(callbacks, **settings):
    """Train with an optimizer and a scheduler that the recipe gives."""
    from camshaft import session
    from camshaft.direct import direct_parts
    from camshaft.optim import Linear, Plan

    given = {"max_steps": 8, "batch_size": 8, "validate": None, "device": "cpu", "checkpoint": False} | settings
    quiet = {"summary": None, "progress": None}
    parts = direct_parts(
        stack(settings.get("seed", 0)), Pairs(), strategy=given.pop("strategy", "single"), name="t",
        callbacks=quiet | callbacks, loggers={"console": None, "jsonl": None, "tensorboard": None}, settings=given,
    )  # fmt: skip
    parts.build_optimizer = lambda params: torch.optim.AdamW(params, lr=1e-2)
    parts.build_scheduler = lambda optimizer, planned: Plan(Linear(optimizer, total_steps=planned), interval="step")
    return session.execute(parts)


class Watch(Callback):
    """Keep the weights after each step, the rates of the optimizer's groups, and which parameters have gradients."""

    def __init__(self):
        self.weights, self.rates, self.trained = [], [], []

    def on_step(self, state):
        self.weights.append({n: p.detach().clone() for n, p in state.module.named_parameters()})
        self.rates.append([group["lr"] for group in state.optimizers[0].param_groups])
        self.trained.append({n for n, p in state.module.named_parameters() if p.grad is not None})


def stages():
    return Freeze(
        ["blocks", "inner"], unfreeze={2: ["blocks.3"], 5: {"layers": ["blocks", "inner.weight"], "lr": 1e-3}}
    )


def test_parts_unfreeze_on_schedule_in_groups_with_rates_of_their_own(tmp_path):
    watch = Watch()
    with_optimizer({"freeze": stages(), "watch": watch}, runs_dir=tmp_path)
    moved = [
        {name for name, value in after.items() if not torch.equal(value, before[name])}
        for before, after in zip([dict(stack().named_parameters()), *watch.weights], watch.weights, strict=False)
    ]
    last = {n for n in watch.weights[0] if n.startswith("blocks.3.")}
    rest = {n for n in watch.weights[0] if n.startswith("blocks.")} | {"inner.weight"}
    head = {"head.weight", "head.bias"}
    assert moved[:2] == [head] * 2
    assert moved[2:5] == [head | last] * 3
    assert moved[5] == head | rest
    assert [rates[2] / rates[0] for rates in watch.rates[:7]] == pytest.approx([0.1] * 7)


def test_a_run_that_resumes_between_two_stages_is_exact(tmp_path):
    whole = with_optimizer({"freeze": stages()}, runs_dir=tmp_path / "whole", accumulate=2)
    settings = {"runs_dir": tmp_path, "checkpoint": {"every": None}, "accumulate": 2}
    first = with_optimizer({"freeze": stages(), "stop": StopAt(4)}, **settings)
    resumed = with_optimizer({"freeze": stages()}, **settings, resume=str(first.run_dir))
    assert not different(weights(resumed), weights(whole))


def test_averages_take_in_what_thaws_later_and_resume_exactly(tmp_path):
    averages, watch = EMA(0.5, warmup=False), Watch()
    whole = with_optimizer({"freeze": stages(), "ema": averages, "watch": watch}, runs_dir=tmp_path / "whole")
    expected = stack().blocks[0].up.weight.detach().clone()
    for after in watch.weights:
        expected = 0.5 * expected + 0.5 * after["blocks.0.up.weight"]
    assert torch.allclose(averages.averages["blocks.0.up.weight"], expected, atol=1e-6)
    settings = {"runs_dir": tmp_path, "checkpoint": {"every": None}}
    first = with_optimizer({"freeze": stages(), "ema": EMA(0.5, warmup=False), "stop": StopAt(4)}, **settings)
    again = EMA(0.5, warmup=False)
    resumed = with_optimizer({"freeze": stages(), "ema": again}, **settings, resume=str(first.run_dir))
    assert not different(weights(resumed), weights(whole))
    assert not different(again.averages, averages.averages)


def test_frozen_batch_norms_keep_their_statistics():
    class Normed(Stack):
        def __init__(self):
            super().__init__(depth=1)
            self.inner = nn.Sequential(self.inner, nn.BatchNorm1d(32), nn.Dropout(0.5))

    torch.manual_seed(0)
    module = Normed()
    before = {n: b.clone() for n, b in module.named_buffers()}
    fit(module, {"freeze": Freeze("inner", eval_mode=True)})
    assert not different(dict(module.named_buffers()), before)
    torch.manual_seed(0)
    fit(module := Normed(), {"freeze": Freeze("inner")})
    assert different(dict(module.named_buffers()), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": "blokcs"}, r"no parameter or layer of that name(?s:.)*Did you mean 'blocks'"),
        ({"layers": "blocks", "unfreeze": {5: "blocks.9"}}, r"unfreeze.5 names 'blocks.9'"),
        ({"layers": "blocks", "unfreeze": {5: "head"}}, "which is not frozen"),
        ({"layers": ["blocks", "inner", "head"]}, "freezes every parameter"),
        ({"layers": "blocks", "unfreeze": {5: {"layers": "blocks", "lr": 1e-3}}}, "needs the recipe's own optimizer"),
        ({"layers": "blocks", "unfreeze": {5: {"layer": "blocks"}}}, "unfreeze.5 has layer"),
        ({"layers": "blocks", "unfreeze": {"soon": "blocks"}}, "the key 'soon'"),
    ],
)
def test_a_freeze_that_cannot_be_meant_is_refused_at_build(arguments, message):
    with pytest.raises(RecipeError, match=message):
        fit(callbacks={"freeze": Freeze(**arguments)})


def test_unfreezing_is_refused_where_the_strategy_partitions_what_trains():
    with pytest.raises(StrategyError, match="unfreeze cannot run under deepspeed"):
        Freeze("blocks", unfreeze={2: "blocks"}).on_launch(DeepSpeed(2))


# -- several processes -----------------------------------------------------------------------------


def in_processes():
    """Train with savers under DDP and FSDP; return weights, and those of one process on the joined batch."""
    from several import Whole, strategy

    results = {}
    for name in ("ddp", "fsdp"):
        for key, make in {
            "freeze": lambda: Freeze(["blocks", "inner"], unfreeze={3: ["blocks"], 6: ["inner"]}),
            "recompute": lambda: ActivationCheckpointing("Block", stride=2),
        }.items():
            whole = Whole()
            fit(callbacks={"saver": make(), "whole": whole}, strategy=strategy(name), accumulate=2)
            results[name, key] = whole.weights
    return results


@pytest.mark.distributed
def test_savers_under_ddp_and_fsdp_equal_one_process():
    expected = {
        "freeze": weights(
            fit(callbacks={"s": Freeze(["blocks", "inner"], unfreeze={3: ["blocks"], 6: ["inner"]})}, accumulate=2)
        ),
        "recompute": weights(fit(accumulate=2)),
    }
    for results in run_processes(2, in_processes, timeout_s=240):
        for (name, key), found in results.items():
            assert distance(found, expected[key]) < 1e-5, (name, key)
