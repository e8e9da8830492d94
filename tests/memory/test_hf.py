"""Check that models of Transformers train through HFModule, with every token weighing the same."""

import pytest
import torch
from parts import different, distance, weights
from torch.utils.data import DataLoader

from camshaft import DataModule
from camshaft.callbacks.clip import ClipGradients
from camshaft.callbacks.ema import EMA
from camshaft.callbacks.gradient_checkpointing import GradientCheckpointing
from camshaft.callbacks.lora import LoRA
from camshaft.callbacks.micro_batch import MicroBatch
from camshaft.callbacks.precision import Precision
from camshaft.errors import ModuleError
from camshaft.hf import HFModule
from camshaft.testing import StopAt, run_processes, tiny_run

pytest.importorskip("transformers")

LLAMA = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 40,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
BERT = {
    "model_type": "bert", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_labels": 3,
}  # fmt: skip


class Texts(DataModule):
    """Batches of tokens that count up from a random one, padded to different lengths."""

    def __init__(self, count=8, size=4, samples_have_labels=False):
        generator = torch.Generator().manual_seed(0)
        self.batches = []
        for _ in range(count):
            ids = (torch.randint(39, (size, 1), generator=generator) + torch.arange(12)) % 39 + 1
            lengths = torch.randint(2, 13, (size, 1), generator=generator)
            mask = (torch.arange(12) < lengths).long()
            labels = ids[:, 0] % 3 if samples_have_labels else ids.masked_fill(mask == 0, -100)
            self.batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})

    def train_dataloader(self):
        return self.batches

    def val_dataloader(self):
        return DataLoader(self.batches[:2], batch_size=None)


def module(config=None, **options):
    torch.manual_seed(0)
    made = HFModule(config or LLAMA, **options)
    made.configure_optimizers = lambda: torch.optim.SGD(made.parameters(), lr=0.5)
    return made


def train(made, callbacks=None, data=None, **settings):
    settings = {"max_steps": 4, "validate": None, "log_every": 1} | settings
    return tiny_run(made, data or Texts(), callbacks=callbacks or {}, **settings)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_causal_model_built_from_its_configuration_trains(config):
    made = module(config)
    made.configure_optimizers = lambda: torch.optim.AdamW(made.parameters(), lr=1e-2)
    run = train(made, max_steps=16, max_epochs=2, validate="1 epoch", callbacks={"p": Precision("bf16")})
    assert run.metrics["val/loss"] < 3.2  # log 40 is 3.69


def test_every_token_weighs_the_same_however_a_window_is_cut():
    """The gradient of four windows of micro-batches is that of their joined batches, token for token."""
    texts = Texts()
    joined = Texts()
    pairs = zip(texts.batches[::2], texts.batches[1::2], strict=True)
    joined.batches = [{key: torch.cat([a[key], b[key]]) for key in a} for a, b in pairs]
    accumulated = train(module(), data=texts, accumulate=2)
    whole = train(module(), data=joined)
    cut = train(module(), {"micro_batch": MicroBatch(3)}, data=joined)
    assert distance(weights(accumulated), weights(whole)) < 1e-5
    assert distance(weights(cut), weights(whole)) < 1e-5
    reference, batch = module(), joined.batches[0]
    reference.model(**batch).loss.backward()
    expected = {n: p.detach() - 0.5 * p.grad for n, p in reference.named_parameters()}
    first = train(module(), data=joined, max_steps=1)
    assert distance({n: p.detach() for n, p in first.module.named_parameters()}, expected) < 1e-5


def test_a_batch_without_a_label_that_counts_changes_nothing():
    texts = Texts(count=1)
    texts.batches[0]["labels"] = torch.full_like(texts.batches[0]["labels"], -100)
    assert not different(weights(train(module(), data=texts, max_steps=1)), module().state_dict())


@pytest.mark.parametrize(
    ("auto", "config", "samples"),
    [
        ("AutoModelForSequenceClassification", BERT, True),
        ("AutoModelForMaskedLM", BERT, False),
        ("AutoModelForTokenClassification", BERT | {"num_labels": 40}, False),
    ],
)
def test_other_heads_fit_in(auto, config, samples):
    run = train(module(config, auto=auto), data=Texts(samples_have_labels=samples), validate="4 steps")
    assert 0 < run.metrics["val/loss"] < 5


def test_gradient_checkpointing_of_the_model_changes_no_bit(tmp_path):
    def make():
        return {"g": GradientCheckpointing(), "clip": ClipGradients(0.5), "ema": EMA(0.9)}

    whole = train(module(), make(), accumulate=2)
    assert whole.module.model.is_activation_checkpointing
    assert not different(weights(whole), weights(train(module(), {"clip": ClipGradients(0.5)}, accumulate=2)))
    settings = {"accumulate": 2, "runs_dir": tmp_path, "checkpoint": {"every": None}}
    first = train(module(), {**make(), "stop": StopAt(2)}, **settings)
    resumed = train(module(), make(), **settings, resume=str(first.run_dir))
    assert not different(weights(resumed), weights(whole))


def test_adapters_and_gradient_checkpointing_go_together():
    run = train(module(), {"lora": LoRA(["q_proj", "v_proj"]), "g": GradientCheckpointing()})
    assert not different(weights(run), weights(train(module(), {"lora": LoRA(["q_proj", "v_proj"])})))
    run = train(module(GPT2), {"lora": LoRA("c_attn")})
    assert run.step == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"model_type": "lama"}}, "cannot build AutoModelForCausalLM from config"),
        ({"config": LLAMA, "auto": "AutoModelForPoetry"}, "transformers has no AutoModelForPoetry"),
        ({"pretrained": "/nowhere"}, "from pretrained='/nowhere'"),
    ],
)
def test_what_transformers_cannot_build_is_refused(arguments, message):
    with pytest.raises(ModuleError, match=message):
        HFModule(**arguments)


def test_a_batch_without_labels_is_refused():
    texts = Texts(count=1)
    del texts.batches[0]["labels"]
    with pytest.raises(ModuleError, match="no labels"):
        train(module(), data=texts)


def in_processes():
    from several import strategy

    return [weights(train(module(), strategy=strategy("ddp"), accumulate=2, max_steps=2))]


@pytest.mark.distributed
def test_every_token_weighs_the_same_over_two_ranks():
    expected = weights(train(module(), accumulate=4, max_steps=2))
    for [found] in run_processes(2, in_processes, timeout_s=240):
        assert distance(found, expected) < 1e-5


@pytest.mark.parametrize(
    "more",
    [{"trust_remote_code": True}, {"auto_map": {"AutoModel": "a/b--model.Evil"}}, {"attn_implementation": "a/kernel"}],
    ids=lambda more: next(iter(more)),
)
def test_python_of_a_models_author_is_refused(more):
    for source in (None, "somebody/model"):
        with pytest.raises(ModuleError, match=f"config.{next(iter(more))} is "):
            HFModule({**LLAMA, **more}, pretrained=source)


def test_a_folder_with_python_of_its_own_runs_none_of_it(tmp_path):
    """Transformers would ask at a terminal, and run it on a yes."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}'
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w').close()\n")
    with pytest.raises(ModuleError):
        HFModule(pretrained=str(tmp_path))
    assert not (tmp_path / "pwned").exists()
