"""Check adapters beside frozen, and quantised, weights, and the 8-bit optimizer."""

import sys

import pytest
import torch
from parts import Stack, different, distance, fit, pairs, stack, weights

from camshaft.adapters import merged_weights
from camshaft.callbacks.clip import ClipGradients
from camshaft.callbacks.ema import EMA
from camshaft.callbacks.freeze import Freeze
from camshaft.callbacks.lora import LoRA
from camshaft.callbacks.precision import Precision
from camshaft.callbacks.quantize import Quantize
from camshaft.checkpoint.reader import Reader
from camshaft.errors import CheckpointError, ModuleError, RecipeError, StrategyError
from camshaft.strategies.fsdp import FSDP
from camshaft.testing import StopAt, run_processes

pytest.importorskip("peft")


def lora(**options):
    return {"lora": LoRA(["up", "down"], rank=4, train=["head"], **options)}


def qlora(to="nf4", **options):
    pytest.importorskip("bitsandbytes")
    return {"quantize": Quantize("blocks", to=to), **lora(**options)}


MAKERS = {"lora": lora, "qlora": qlora}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_checkpoint_holds_what_trains_and_a_reference_to_the_rest(kind, tmp_path):
    run = fit(callbacks=MAKERS[kind](), runs_dir=tmp_path, checkpoint={"every": 8})
    trained = {name for name, p in run.module.named_parameters() if p.requires_grad}
    [saved] = (run.run_dir / "checkpoints").glob("step_*")
    with Reader(saved) as reader:
        assert {name.removeprefix("model/") for name in reader.names("model")} == trained
        reference = reader.data("left_out")["lora"]
    assert reference["base"].endswith("Stack")
    assert len(reference["digest"]) == 64
    assert set(reference["names"]) == {n for n, p in run.module.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("kind", MAKERS)
def test_averages_clipping_accumulation_and_a_resume_are_exact_with_adapters(kind, tmp_path):
    def make():
        return {**MAKERS[kind](dropout=0.1), "clip_gradients": ClipGradients(0.5), "ema": EMA(0.9)}

    whole = fit(callbacks=make(), accumulate=2)
    settings = {"accumulate": 2, "runs_dir": tmp_path, "checkpoint": {"every": None}}
    first = fit(callbacks={**make(), "stop": StopAt(4)}, **settings)
    resumed = fit(callbacks=make(), **settings, resume=str(first.run_dir))
    assert not different(weights(resumed), weights(whole))
    assert whole.step == resumed.step == 8


@pytest.mark.parametrize("kind", MAKERS)
def test_another_base_than_the_checkpoint_refers_to_is_refused(kind, tmp_path):
    settings = {"runs_dir": tmp_path, "checkpoint": {"every": None}}
    first = fit(callbacks={**MAKERS[kind](), "stop": StopAt(4)}, **settings)
    with pytest.raises(CheckpointError, match=r"froze the weights of .*Stack.*, and those of this run are others"):
        fit(stack(seed=1), MAKERS[kind](), **settings, resume=str(first.run_dir))


def test_only_the_adapters_and_what_is_named_train():
    before = stack().state_dict()
    run = fit(callbacks=lora())
    after = {n.replace(".base_layer", ""): v for n, v in weights(run).items() if ".lora_" not in n}
    assert sorted(different(after, before)) == ["head.bias", "head.weight"]
    with torch.no_grad():
        delta = merged_weights(run.module)["blocks.0.up.weight"] - before["blocks.0.up.weight"]
    assert torch.linalg.matrix_rank(delta, rtol=1e-4) == 4


def test_merged_weights_are_a_plain_module_that_computes_the_same():
    run = fit(callbacks=lora())
    plain = stack(seed=1)
    plain.load_state_dict(merged_weights(run.module))
    inputs = pairs(16).tensors[0]
    assert torch.allclose(plain(inputs), run.module.eval()(inputs), atol=1e-5)
    with pytest.raises(ModuleError, match="no adapters"):
        merged_weights(plain)


@pytest.mark.parametrize("to", ["nf4", "fp4", "int8"])
def test_quantised_weights_merge_into_a_plain_module_that_computes_the_same(to):
    run = fit(callbacks=qlora(to))
    assert {p.dtype for n, p in run.module.named_parameters() if "base_layer.weight" in n} <= {torch.uint8, torch.int8}
    plain = stack(seed=1)
    plain.load_state_dict(merged_weights(run.module))
    inputs = pairs(16).tensors[0]
    # int8 rounds the inputs too.
    assert torch.allclose(plain(inputs), run.module.eval()(inputs), atol=5e-2 if to == "int8" else 1e-4)


@pytest.mark.parametrize("to", ["nf4", "int8"])
def test_biases_of_quantised_layers_stay_as_they_are(to):
    pytest.importorskip("bitsandbytes")
    run = fit(callbacks={"precision": Precision("bf16"), "q": Quantize("blocks", to=to, compute="bf16"), **lora()})
    expected = {n: b for n, b in stack().state_dict().items() if "blocks" in n and n.endswith("bias")}
    merged = merged_weights(run.module)
    assert not different({n: merged[n] for n in expected}, expected)


def test_adapters_stay_in_float32_beside_weights_in_bfloat16():
    run = fit(callbacks={"precision": Precision("bf16-true"), **lora()})
    kinds = {n: p.dtype for n, p in run.module.named_parameters()}
    assert {d for n, d in kinds.items() if ".lora_" in n} == {torch.float32}
    assert {d for n, d in kinds.items() if ".lora_" not in n} == {torch.bfloat16}


def test_a_layer_below_the_adapters_may_unfreeze_later_and_is_then_saved(tmp_path):
    def make():
        return {**lora(), "freeze": Freeze("inner", unfreeze={3: "inner"})}

    settings = {"runs_dir": tmp_path, "checkpoint": {"every": None}}
    whole = fit(callbacks=make())
    first = fit(callbacks={**make(), "stop": StopAt(4)}, **settings)
    resumed = fit(callbacks=make(), **settings, resume=str(first.run_dir))
    assert "inner.weight" in different(weights(resumed), {**weights(resumed), "inner.weight": stack().inner.weight})
    assert not different(weights(resumed), weights(whole))


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (lambda: {"lora": LoRA(["query"])}, r"targets names 'query'(?s:.)*blocks.\*.up"),
        (lambda: {"lora": LoRA(["LayerNorm"])}, r"takes no adapter(?s:.)*Name linear"),
        (lambda: {"lora": LoRA(["up"], train=["haed"])}, r"train names 'haed'(?s:.)*Did you mean 'head'"),
        (lambda: {"quantize": Quantize("norm")}, "no linear layer to quantise"),
        (lambda: {"lora": LoRA(["up"]), "quantize": Quantize()}, "Write quantize before lora"),
    ],
)
def test_what_cannot_be_adapted_is_refused_at_build_with_what_can(callbacks, message):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(RecipeError, match=message):
        fit(callbacks=callbacks())


@pytest.mark.parametrize(("library", "callback"), [("peft", LoRA(["up"])), ("bitsandbytes", Quantize())])
def test_a_library_that_is_not_installed_is_named(library, callback, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RecipeError, match=rf"needs {library}, which cannot be imported(?s:.)*pip install 'camshaft\["):
        callback.on_module(stack())


def test_quantised_weights_are_not_sharded():
    with pytest.raises(StrategyError, match="shards parameters"):
        Quantize().on_launch(FSDP())


# -- 8-bit optimizer -------------------------------------------------------------------------------


class Wide(Stack):
    """A stack with a matrix that is large enough for 8 bits."""

    def __init__(self):
        super().__init__(depth=1)
        self.inner = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Linear(256, 32))

    def configure_optimizers(self):
        from camshaft.eightbit import AdamW8bit

        return AdamW8bit(self.parameters(), lr=self.lr)


def wide():
    torch.manual_seed(0)
    return Wide()


def test_the_state_of_adamw_fits_in_8_bits_and_resumes_exactly(tmp_path):
    pytest.importorskip("bitsandbytes")
    found = {}

    class Look(StopAt):
        def on_step(self, state):
            super().on_step(state)
            weight = state.module.inner[1].weight
            found["dtypes"] = {key: v.dtype for key, v in state.optimizers[0].state[weight].items() if key != "step"}

    def make():
        return {"clip_gradients": ClipGradients(0.5), "ema": EMA(0.9)}

    whole = fit(wide(), {**make(), "look": Look(9)}, accumulate=2)
    assert found["dtypes"]["state1"] is found["dtypes"]["state2"] is torch.uint8
    settings = {"accumulate": 2, "runs_dir": tmp_path, "checkpoint": {"every": None}}
    first = fit(wide(), {**make(), "stop": StopAt(4)}, **settings)
    resumed = fit(wide(), make(), **settings, resume=str(first.run_dir))
    assert not different(weights(resumed), weights(whole))


# -- several processes -----------------------------------------------------------------------------


def calm():
    """Return a stack that SGD trains: Adam would blow up the rounding of gradients that begin at zero."""
    return stack(optimizer="sgd", lr=0.05)


def in_processes():
    from several import Whole, strategy

    results = {}
    for name in ("ddp", "fsdp"):
        whole = Whole()
        fit(calm(), {**lora(), "whole": whole}, strategy=strategy(name), accumulate=2)
        results[name] = whole.weights
    whole = Whole()
    fit(calm(), {**qlora(), "whole": whole}, strategy=strategy("ddp"), accumulate=2)
    results["qlora"] = whole.weights
    return results


@pytest.mark.distributed
def test_adapters_under_ddp_and_fsdp_equal_one_process():
    pytest.importorskip("bitsandbytes")
    expected = weights(fit(calm(), lora(), accumulate=2))
    quantised = {n: p.detach() for n, p in fit(calm(), qlora(), accumulate=2).module.named_parameters()}
    for results in run_processes(2, in_processes, timeout_s=240):
        assert distance(results["ddp"], expected) < 1e-5
        assert distance(results["fsdp"], expected) < 1e-5
        trained = [name for name in quantised if quantised[name].is_floating_point()]
        assert distance({n: results["qlora"][n] for n in trained}, {n: quantised[n] for n in trained}) < 1e-5
