"""Train any model of Hugging Face Transformers: ``HFModule``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from camshaft.errors import ModuleError
from camshaft.module import Module
from camshaft.quiet import quiet_imports

_IGNORED = -100
_REMOTE = {"trust_remote_code", "auto_map", "code_revision", "custom_pipelines"}
_KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")


class HFModule(Module):
    """Hold a Transformers model and train it on batches of what its forward takes, ``labels`` among them.

    ``auto`` is the class of Transformers that builds it: ``AutoModelForCausalLM``,
    ``AutoModelForSequenceClassification``, ``AutoModelForMaskedLM`` and so on. ``pretrained`` is a folder or
    a name on the hub; without it ``config`` builds the model with random weights: ``{model_type: llama,
    hidden_size: 256, ...}``. With both, ``config`` changes the pretrained configuration.

    A batch is a mapping of tensors (batch, ...): ``input_ids``, ``attention_mask``, ``labels``. Labels of
    -100 do not count. Where labels are tokens, every token weighs the same, however they are spread over
    micro-batches and ranks. The weight of a causal model's batch leaves out the first token, which nothing
    predicts.

    Needs ``transformers``. Give the recipe an ``optimizer``, or derive and configure one.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        pretrained: str | Path | None = None,
        auto: str = "AutoModelForCausalLM",
    ) -> None:
        super().__init__()
        source = None if pretrained is None else str(pretrained)
        self.save_hyperparameters({"config": dict(config or {}), "pretrained": source, "auto": auto})
        self.model = build_model(config, pretrained=pretrained, auto=auto)
        self._is_causal = "CausalLM" in auto

    def forward(self, **batch: Any) -> Any:
        """Return the model's output, with its ``loss`` where there are ``labels``."""
        return self.model(**batch)

    def batch_weight(self, batch: Mapping[str, Tensor]) -> float:
        """Return how many labels count: predicted tokens, or samples."""
        labels = self._labels(batch)
        return float((labels != _IGNORED).sum()) if _are_tokens(labels) else float(labels.shape[0])

    def training_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss over the labels that count."""
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Mapping[str, Tensor]) -> None:
        """Log the mean loss over the labels that count."""
        self.log("val/loss", self.loss(batch), batch_size=self.batch_weight(batch), prog_bar=True)

    def test_step(self, batch: Mapping[str, Tensor]) -> None:
        """Log the mean loss over the labels that count."""
        self.log("test/loss", self.loss(batch), batch_size=self.batch_weight(batch))

    def predict_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits."""
        logits: Tensor = self(**{name: value for name, value in batch.items() if name != "labels"}).logits
        return logits

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss over the labels that count; zero where none does."""
        labels = self._labels(batch)
        if not _are_tokens(labels):
            loss: Tensor = self(**batch).loss
            return loss
        if self._is_causal:
            logits = self(**{name: value for name, value in batch.items() if name != "labels"}).logits[:, :-1]
        else:
            # An encoder-decoder makes its decoder's inputs of them.
            logits = self(**batch).logits
        total = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=_IGNORED, reduction="sum")
        return total / (labels != _IGNORED).sum().clamp_min(1)

    def _labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        if "labels" not in batch:
            raise ModuleError(
                f"the batch of HFModule has {', '.join(batch)}, and no labels.",
                fix="For a causal language model labels are input_ids, with -100 where padding is.",
            )
        labels = batch["labels"]
        return labels[:, 1:] if self._is_causal and _are_tokens(labels) else labels


def _are_tokens(labels: Tensor) -> bool:
    return labels.ndim > 1 and not labels.is_floating_point()


def _require_plain(config: Mapping[str, Any]) -> None:
    """Refuse what would make Transformers run Python of a model's author, which nobody allowed.

    Raises:
        ModuleError: the configuration names such code.
    """
    kernels = [name for name in _KERNELS if "/" in str(config.get(name, ""))]
    for name in [*(_REMOTE & set(config)), *kernels]:
        raise ModuleError(
            f"config.{name} is {config[name]!r}.",
            why="Transformers would run Python that comes with the model.",
            fix="Install that Python as a package, read it, and write a Module of your own with its class.",
        )


def build_model(config: Mapping[str, Any] | None, *, pretrained: str | Path | None, auto: str) -> Any:
    """Build a Transformers model from a configuration or from pretrained weights, as ``HFModule`` describes.

    Raises:
        ModuleError: transformers is not installed, or has no such class or configuration.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        with quiet_imports():
            import transformers
    except ImportError as error:
        raise ModuleError(
            f"HFModule needs transformers, which cannot be imported: {error}.", fix="Run pip install 'camshaft[lora]'."
        ) from error
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    cls = getattr(transformers, auto, None)
    if cls is None or not auto.startswith("Auto"):
        known = [name for name in dir(transformers) if name.startswith("AutoModelFor")]
        raise ModuleError(f"transformers has no {auto}.", fix=f"Use AutoModel, {', '.join(known[:8])} or another.")
    given = dict(config or {})
    _require_plain(given)
    try:
        # Each class is imported when it is first asked for, with what it may use.
        with quiet_imports():
            if pretrained is not None:
                made = transformers.AutoConfig.from_pretrained(pretrained, trust_remote_code=False, **given)
                return cls.from_pretrained(pretrained, config=made, dtype="float32", trust_remote_code=False)
            return cls.from_config(transformers.AutoConfig.for_model(**given), trust_remote_code=False)
    except (TypeError, ValueError, OSError, KeyError) as error:
        source = f"pretrained={str(pretrained)!r}" if pretrained is not None else f"config={given}"
        raise ModuleError(
            f"transformers cannot build {auto} from {source}: {error}",
            fix="Give config a model_type, such as llama, and that model's options; or a pretrained model's folder.",
        ) from error
