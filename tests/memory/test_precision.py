"""Check what forward passes compute in, what is stored, when it switches, and what is refused."""

import json

import pytest
import torch
from parts import Pairs, Stack, different, distance, fit, pairs, stack, weights
from torch.nn.functional import mse_loss

from camshaft.callbacks.clip import ClipGradients
from camshaft.callbacks.ema import EMA
from camshaft.callbacks.precision import Precision
from camshaft.errors import RecipeError, StrategyError
from camshaft.strategies.deepspeed import DeepSpeed
from camshaft.strategies.fsdp import FSDP
from camshaft.strategies.single import Single
from camshaft.testing import StopAt, check_callback, run_processes

EMULATED = {"fp8": {"emulate": True}}


@pytest.fixture
def needs_torchao():
    pytest.importorskip("torchao")


def by_hand(precision_at, module: Stack) -> dict[str, torch.Tensor]:
    """Train an epoch as a person would who switches autocast between updates, with torch's own scaler for fp16."""
    optimizer = module.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu")
    updates = 0
    for inputs, targets in zip(*(t.split(8) for t in pairs(64).tensors), strict=True):
        precision = precision_at(updates)
        optimizer.zero_grad()
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = mse_loss(module(inputs).float(), targets)
        if precision != "fp16":
            loss.backward()
            optimizer.step()
            updates += 1
            continue
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        updates += scaler.get_scale() >= before
    return module.state_dict()


@pytest.mark.parametrize("second", ["fp32", "fp16"])
def test_a_switch_while_training_equals_a_hand_written_one_bit_for_bit(second):
    run = fit(callbacks={"precision": Precision({0: "bf16", 5: second})}, max_steps=None, max_epochs=1)
    assert not different(weights(run), by_hand(lambda done: "bf16" if done < 5 else second, stack()))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({0: "bf16", "last 25%": "fp32"}, {0: "bf16", 6: "fp32"}),
        ({0: "bf16", "last 10 percent": "fp32"}, {0: "bf16", 7: "fp32"}),
        ({0: "bf16", "last 3 steps": "fp32"}, {0: "bf16", 5: "fp32"}),
        ({0: "bf16", "50%": "fp16", "90%": "fp32"}, {0: "bf16", 4: "fp16", 7: "fp32"}),
        ({"0": "bf16", "6": "fp32"}, {0: "bf16", 6: "fp32"}),
    ],
)
def test_a_schedule_may_count_in_shares_and_from_the_end(written, expected):
    precision = Precision(written)
    run = fit(callbacks={"precision": precision}, max_steps=None, max_epochs=1)
    assert precision.starts == expected
    assert not different(weights(run), by_hand(precision.at, stack()))


def test_a_schedule_relative_to_an_unknown_end_is_refused():
    class Endless(Pairs):
        def train_dataloader(self):
            return iter([tuple(t[:8] for t in pairs(64).tensors)] * 4)

    with pytest.raises(RecipeError, match="length of the run is not known"):
        fit(
            callbacks={"precision": Precision({0: "bf16", "last 10%": "fp32"})},
            data=Endless(),
            max_steps=None,
            max_epochs=1,
        )


@pytest.mark.parametrize(
    "wrong", ["bf17", {5: "bf16"}, {0: "bf16", "soon": "fp32"}, {0: "bf16", "120%": "fp32"}, {"fp8": {"a": 1}}]
)
def test_what_is_no_precision_is_refused(wrong):
    with pytest.raises(RecipeError):
        Precision(wrong)


def test_the_table_of_dtypes_is_printed_and_true(capsys, monkeypatch):
    said = []
    monkeypatch.setattr("camshaft.terminal.say", said.append)
    run = fit(callbacks={"precision": Precision({0: "bf16", 4: "fp32"}, keep_fp32=["head"])})
    dtypes = [dtype for _, dtype in run.module.seen]
    assert dtypes == [torch.float32] * 8  # the head is kept, so outputs are float32
    kept = "reduce float32, optimizer float32; kept in float32: head (1 layers)"
    assert [line for line in said if line.startswith("precision")] == [
        f"precision bf16 from step 1: parameters float32, compute bfloat16, {kept}",
        f"precision fp32 from step 5: parameters float32, compute float32, {kept}",
    ]


def test_a_module_that_casts_on_its_own_is_found_out():
    class Stubborn(Stack):
        def forward(self, inputs):
            with torch.autocast("cpu", enabled=False):
                return super().forward(inputs)

    torch.manual_seed(0)
    with pytest.raises(StrategyError, match="compute of the first step are float32"):
        fit(Stubborn(), {"precision": Precision("bf16")})


def test_bf16_true_stores_everything_in_bfloat16_but_what_is_kept():
    module = stack()
    found = {}

    class Look(StopAt):
        def on_step(self, state):
            super().on_step(state)
            moments = [v for s in state.optimizers[0].state.values() for k, v in s.items() if k == "exp_avg"]
            found["optimizer"] = {m.dtype for m in moments}
            found["gradients"] = {p.grad.dtype for n, p in state.module.named_parameters() if "norm" not in n}

    run = fit(module, {"precision": Precision("bf16-true", keep_fp32=["LayerNorm"]), "look": Look(8)})
    kinds = {name: p.dtype for name, p in run.module.named_parameters()}
    assert {d for n, d in kinds.items() if "norm" in n} == {torch.float32}
    assert {d for n, d in kinds.items() if "norm" not in n} == {torch.bfloat16}
    assert found == {"optimizer": {torch.bfloat16, torch.float32}, "gradients": {torch.bfloat16}}
    assert module.seen[0][1] is torch.bfloat16


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-true"])
def test_outputs_are_not_upcast(precision):
    module = stack()
    fit(module, {"precision": Precision(precision)}, max_steps=1)
    assert module.seen[0][1] is (torch.float32 if precision == "fp32" else torch.bfloat16)


def test_a_layer_that_is_kept_computes_in_float32():
    module = stack()
    seen = {}
    for name in ("blocks.0.norm", "blocks.0.up", "head"):
        module.get_submodule(name).register_forward_hook(lambda m, i, o, name=name: seen.update({name: o.dtype}))
    fit(module, {"precision": Precision("bf16", keep_fp32=["norm", "blocks.*.up"])}, max_steps=1)
    assert seen == {"blocks.0.norm": torch.float32, "blocks.0.up": torch.float32, "head": torch.bfloat16}


def test_a_kept_layer_that_is_not_there_is_refused_with_what_is():
    with pytest.raises(RecipeError, match=r"keep_fp32 names 'nrom'.*(?s:.)*LayerNorm.*blocks\.\*\.norm"):
        fit(callbacks={"precision": Precision("bf16", keep_fp32=["nrom"])})


def test_fp8_on_a_cpu_is_refused_unless_it_is_emulated():
    with pytest.raises(StrategyError, match=r"device is a CPU(?s:.)*emulate: true"):
        fit(callbacks={"precision": Precision("fp8")})


def test_emulated_fp8_rounds_and_still_learns(needs_torchao):
    run, reference = fit(callbacks={"precision": Precision(EMULATED)}, max_steps=32, max_epochs=None), fit(max_steps=32)
    names = dict(reference.module.named_parameters()).keys()
    assert dict(run.module.named_parameters()).keys() == names
    assert different(weights(run), weights(reference))
    assert run.metrics["train/loss"] < 2 * reference.metrics["train/loss"] + 0.1


def test_fp8_may_end_in_another_precision(needs_torchao):
    # The last steps are those of bf16 from the same weights: what float8 left is all that differs.
    first = fit(callbacks={"precision": Precision(EMULATED), "stop": StopAt(4)})
    switched = fit(callbacks={"precision": Precision({0: EMULATED, 4: "bf16"})})
    module = stack()
    module.load_state_dict(first.module.state_dict())
    assert different(weights(switched), weights(fit(callbacks={"precision": Precision(EMULATED)})))
    assert distance(weights(switched), weights(first)) > 0


def test_fp8_without_a_layer_to_convert_is_refused(needs_torchao):
    with pytest.raises(RecipeError, match="finds no linear layer"):
        fit(callbacks={"precision": Precision(EMULATED, keep_fp32=["blocks", "inner"])})


@pytest.mark.parametrize(
    ("strategy", "setting"),
    [
        (lambda: DeepSpeed(2, config={"bf16": {"enabled": True}}), "bf16.enabled in the DeepSpeed config"),
        (lambda: FSDP(mixed_precision={"param": "bf16"}), "mixed_precision"),
    ],
)
def test_a_schedule_is_refused_where_the_strategy_fixes_the_dtype(strategy, setting):
    with pytest.raises(StrategyError, match=f"schedule cannot run under .* with {setting}"):
        Precision({0: "bf16", 9: "bf16"}).on_launch(strategy())
    with pytest.raises(StrategyError, match=f"precision fp16 cannot run under .* with {setting}"):
        Precision("fp16").on_launch(strategy())
    with pytest.raises(StrategyError, match="keep_fp32 has no effect"):
        Precision("bf16", keep_fp32=["norm"]).on_launch(strategy())
    Precision("bf16").on_launch(strategy())


def test_bf16_true_is_refused_where_the_strategy_keeps_float32_weights_of_its_own():
    with pytest.raises(StrategyError, match="bf16-true cannot run under deepspeed"):
        Precision("bf16-true").on_launch(DeepSpeed(2))
    with pytest.raises(StrategyError, match="keep_fp32 cannot stand beside bf16-true under fsdp"):
        Precision("bf16-true", keep_fp32=["norm"]).on_launch(FSDP())
    with pytest.raises(RecipeError, match="stores the weights"):
        Precision({0: "bf16-true", 5: "fp32"})


@pytest.mark.parametrize("written", [{0: "bf16", 4: "fp32"}, {0: "fp16", 6: "bf16"}, "bf16-true"])
def test_a_resumed_run_is_exact_on_both_sides_of_a_switch(written):
    check_callback(lambda: Precision(written), changes_training=True)


@pytest.mark.parametrize("written", [{0: "bf16", 5: "fp32"}, {0: EMULATED, 6: "bf16"}], ids=["bf16", "fp8"])
def test_averages_and_clipping_stay_exact_across_a_switch(written, tmp_path):
    if written[0] == EMULATED:
        pytest.importorskip("torchao")

    def parts(**extra):
        return {
            "precision": Precision(written),
            "clip": ClipGradients(0.5),
            "ema": (e := EMA(0.9)),
            **extra,
        }, e

    callbacks, average = parts()
    whole = fit(callbacks=callbacks, accumulate=2, max_steps=8)
    settings = {"accumulate": 2, "runs_dir": tmp_path, "checkpoint": {"every": None}}
    callbacks, _ = parts(stop=StopAt(4))
    first = fit(callbacks=callbacks, **settings)
    callbacks, again = parts()
    resumed = fit(callbacks=callbacks, **settings, resume=str(first.run_dir))
    assert not different(weights(resumed), weights(whole))
    assert not different(again.averages, average.averages)


def test_a_schedule_in_a_recipe_reaches_the_callback():
    from camshaft.recipe.check import expand

    assert expand("precision", {0: "bf16", 900: "fp32"}) == {"precision": {0: "bf16", 900: "fp32"}}
    assert expand("precision", EMULATED) == {"precision": EMULATED}
    kept = {"precision": "bf16", "keep_fp32": ["norm"]}
    assert expand("precision", kept) == kept
    assert json.loads(json.dumps(kept)) == kept


def test_tf32_gives_torch_its_own_products_back():
    before = torch.get_float32_matmul_precision()
    fit(callbacks={"precision": Precision("tf32")}, max_steps=1)
    assert torch.get_float32_matmul_precision() == before
    Precision("tf32").on_launch(Single("cpu"))


# -- several processes -----------------------------------------------------------------------------


def partitioned():
    from several import switch

    return switch("ddp"), switch("deepspeed")


@pytest.mark.distributed
def test_a_switch_under_zero_is_that_of_ddp():
    pytest.importorskip("deepspeed")
    for replicas, partitions in run_processes(2, partitioned, timeout_s=280):
        assert distance(partitions, replicas) <= 1e-5


def several() -> dict[str, object]:
    """Switch under DDP and FSDP, each beside a loop written by hand; then overflow on one rank."""
    from several import by_hand_ddp, by_hand_fsdp, overflow_on_one_rank, switch

    return {
        "ddp": (switch("ddp"), by_hand_ddp()),
        "fsdp": (switch("fsdp"), by_hand_fsdp()),
        "overflow": overflow_on_one_rank(),
    }


@pytest.mark.distributed
def test_a_switch_under_ddp_and_fsdp_equals_a_hand_written_one_and_ranks_agree_on_a_skipped_step():
    first, second = run_processes(2, several, timeout_s=240)
    for rank in (first, second):
        for name in ("ddp", "fsdp"):
            ours, theirs = rank[name]
            assert not different(ours, theirs), name
    assert first["overflow"] == second["overflow"]
    assert first["overflow"] == {"skipped": 1, "step": 7, "scheduled": 7, "scale": 32768.0}
