"""Train low-rank adapters beside frozen weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from camshaft import terminal
from camshaft.callback import Callback
from camshaft.checkpoint.reference import digest, leave_out, require_base
from camshaft.errors import RecipeError
from camshaft.layers import find_layers, find_parameters, listed
from camshaft.quiet import quiet_imports

if TYPE_CHECKING:
    from torch import nn

    from camshaft.module import Module
    from camshaft.state import Checkpoint, State

_ADAPTED = ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "Conv1D", "Linear4bit", "Linear8bitLt")


class LoRA(Callback):
    """Freeze the module and train a low-rank product beside each target: W x + alpha / rank * B A x.

    ``targets`` names linear, embedding or convolutional layers by class, name, end of a name or pattern
    (``[query, value]``). ``train`` names what else trains, such as a new head. Adapters are float32 whatever
    the weights are, and begin at zero. Checkpoints hold what trains, buffers, and a reference to the frozen
    weights with their digest, against which a resumed run is checked.

    ``camshaft export`` adds the adapters in, and writes the weights under the names of the module without
    them; from Python ``camshaft.adapters.merged_weights(module)`` does.

    Needs ``peft``. Source: Hu et al. (2021), LoRA. With ``callbacks.quantize`` before it this is QLoRA,
    Dettmers et al. (2023).
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        rank: int = 8,
        alpha: float = 16,
        dropout: float = 0.0,
        train: str | Sequence[str] = (),
        adapter: str = "default",
    ) -> None:
        if rank < 1 or not 0 <= dropout < 1:
            raise RecipeError(
                f"LoRA has rank {rank} and dropout {dropout}.", fix="Use a rank of 1 or more and a dropout below 1."
            )
        self.targets = listed(targets)
        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.train = listed(train)
        self.adapter = adapter
        self._digest = ""
        self._base = ""
        self._frozen: set[str] = set()

    def on_module(self, module: Module) -> None:
        """Put the adapters in, in place, and freeze the rest.

        Raises:
            RecipeError: peft is not installed, or a target is not there; what exists is listed.
        """
        who = f"callbacks.{self.name or 'lora'}"
        peft = _import_peft(who)
        found = find_layers(module, self.targets, who=f"{who}.targets")
        chosen = [name for name, layer in found.items() if type(layer).__name__ in _ADAPTED]
        if not chosen:
            below = sorted({n for n, layer in module.named_modules() if n and type(layer).__name__ in _ADAPTED})
            first = next(iter(found))
            raise RecipeError(
                f"{who}.targets names {first}, a {type(found[first]).__name__}, which takes no adapter.",
                why="Nothing would be trained.",
                fix=f"Name linear, embedding or convolutional layers, such as {', '.join(below[:6])}.",
            )
        extra = set(find_parameters(module, self.train, who=f"{who}.train")) if self.train else set()
        base = {name: p.detach() for name, p in module.named_parameters() if name not in extra}
        self._digest, self._base = digest(base), _origin(module)
        config = peft.LoraConfig(
            r=self.rank, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules=chosen, bias="none",
            # GPT-2's layers keep their weights the other way round.
            fan_in_fan_out=all(type(found[name]).__name__ == "Conv1D" for name in chosen),
        )  # fmt: skip
        peft.inject_adapter_in_model(config, module, adapter_name=self.adapter)
        for name, parameter in module.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.to(torch.float32)
            elif name in extra:
                parameter.requires_grad_(True)
        self._frozen = {name for name, p in module.named_parameters() if not p.requires_grad}

    def on_fit_start(self, state: State) -> None:
        """Say how much trains."""
        if state.stage == "fit" and state.strategy.is_main:
            sizes = [(_count(p), p.requires_grad) for p in state.module.parameters()]
            trained, total = sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)
            terminal.say(f"lora: {trained:,} of {total:,} parameters train, at rank {self.rank}")

    def on_checkpoint(self, state: State, checkpoint: Checkpoint) -> None:
        """Leave out what is frozen."""
        trained = {name for name, p in state.module.named_parameters() if p.requires_grad}
        leave_out(checkpoint, self._frozen - trained, owner=self.name, base=self._base, digest=self._digest)

    def on_restore(self, state: State, checkpoint: Checkpoint) -> None:
        """Check that the frozen weights are those that the adapters were trained beside."""
        del state
        require_base(checkpoint, owner=self.name, digest=self._digest)


def _count(parameter: Any) -> int:
    """Return how many values a parameter has, were it neither partitioned nor quantised."""
    state = getattr(parameter, "quant_state", None)
    whole = getattr(parameter, "ds_numel", None)
    return int(state.shape.numel() if state is not None else whole if whole is not None else parameter.numel())


def _import_peft(who: str) -> Any:
    try:
        with quiet_imports():
            import peft
    except ImportError as error:
        raise RecipeError(
            f"{who} needs peft, which cannot be imported: {error}.", fix="Run pip install 'camshaft[lora]'."
        ) from error
    return peft


def _origin(module: nn.Module) -> str:
    """Say in words where the weights come from: the pretrained models inside, else the module's class."""
    named = [str(getattr(layer, "name_or_path", "") or "") for layer in module.modules()]
    return next((name for name in named if name), type(module).__qualname__)
