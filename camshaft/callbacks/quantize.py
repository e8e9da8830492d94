"""Hold frozen linear layers in 4 or 8 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from camshaft.callback import Callback
from camshaft.checkpoint.reference import digest, leave_out, require_base
from camshaft.errors import RecipeError, StrategyError
from camshaft.layers import find_layers, replace_layer, wrap_forward
from camshaft.quiet import quiet_imports

if TYPE_CHECKING:
    from camshaft.module import Module
    from camshaft.state import Checkpoint, State
    from camshaft.strategies.base import Strategy

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Quantize(Callback):
    """Freeze linear layers and hold their weights in nf4, fp4 or int8; with ``callbacks.lora`` after it this is QLoRA.

    ``layers`` names linear layers, or layers that hold some; without it all linear layers are meant, but for
    those in ``keep``, often the head. ``double`` quantises the scales too. Products are computed in
    ``compute``, by default bf16 on a GPU and fp32 elsewhere. Checkpoints leave the weights out, with a
    reference and a digest of what they were before.

    Needs ``bitsandbytes``. Source: Dettmers et al. (2023), QLoRA; (2022), LLM.int8().
    """

    def __init__(
        self,
        layers: str | Sequence[str] | None = None,
        *,
        keep: str | Sequence[str] = (),
        to: Literal["nf4", "fp4", "int8"] = "nf4",
        double: bool = True,
        compute: Literal["fp32", "bf16", "fp16"] | None = None,
    ) -> None:
        if to not in ("nf4", "fp4", "int8") or compute not in (None, *_DTYPES):
            raise RecipeError(
                f"Quantize has to={to!r}, compute={compute!r}.", fix="Use nf4, fp4 or int8; fp32, bf16 or fp16."
            )
        self.layers = layers
        self.keep = keep
        self.to = to
        self.double = double
        self.compute = compute
        self.names: list[str] = []
        self._device = torch.device("cpu")
        self._digest = ""

    def on_launch(self, strategy: Strategy) -> None:
        """Refuse a strategy that would shard what only its quantised layer can read."""
        self._device = strategy.device
        if not strategy.replicates:
            raise StrategyError(
                f"callbacks.{self.name} cannot run under {strategy.name}, which shards parameters.",
                why="Quantised weights belong to scales that are no parameters.",
                fix="Use strategy: single or ddp; 4 bits make the copies small.",
            )

    def on_module(self, module: Module) -> None:
        """Replace the layers, in place.

        Raises:
            RecipeError: bitsandbytes is not installed, or there is no layer to quantise.
        """
        who = f"callbacks.{self.name or 'quantize'}"
        make = self._maker(_import_bitsandbytes(who))
        chosen = self._choose(module, who)
        self._digest = digest({f"{name}.weight": layer.weight for name, layer in chosen.items()})
        for name, layer in chosen.items():
            replace_layer(module, name, make(layer))
        self.names = [f"{name}.weight" for name in chosen]

    def on_checkpoint(self, state: State, checkpoint: Checkpoint) -> None:
        """Leave out the quantised weights, which nothing changes."""
        adapted = {name for name, _ in state.module.named_parameters()}
        names = [n if n in adapted else n.removesuffix("weight") + "base_layer.weight" for n in self.names]
        base = f"{type(state.module).__qualname__}, before they were held in {self.to}"
        leave_out(checkpoint, names, owner=self.name, base=base, digest=self._digest)

    def on_restore(self, state: State, checkpoint: Checkpoint) -> None:
        """Check that the weights are those that the rest was trained beside."""
        del state
        require_base(checkpoint, owner=self.name, digest=self._digest)

    def _choose(self, module: nn.Module, who: str) -> dict[str, nn.Linear]:
        if any(".lora_" in name for name, _ in module.named_parameters()):
            raise RecipeError(
                f"{who} comes after callbacks.lora.",
                why="It would quantise the adapters.",
                fix="Write quantize before lora in the recipe.",
            )
        linear = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear}
        wanted = find_layers(module, self.layers, who=f"{who}.layers") if self.layers is not None else None
        kept = find_layers(module, self.keep, who=f"{who}.keep") if self.keep else {}
        chosen = {
            name: layer
            for name, layer in linear.items()
            if (wanted is None or _is_within(name, wanted)) and not _is_within(name, kept)
        }
        if not chosen:
            raise RecipeError(
                f"{who} finds no linear layer to quantise in {type(module).__name__}.",
                why="No memory would be saved.",
                fix=f"Its linear layers are {', '.join(list(linear)[:12]) or 'none'}.",
            )
        return chosen

    def _maker(self, bnb: Any) -> Callable[[nn.Linear], nn.Module]:
        name = self.compute or ("bf16" if self._device.type == "cuda" else "fp32")

        def make(old: nn.Linear) -> nn.Module:
            shape = {"input_features": old.in_features, "output_features": old.out_features, "bias": False}
            if self.to == "int8":
                new: Any = bnb.nn.Linear8bitLt(**shape, has_fp16_weights=False, device="meta")
                new.weight = bnb.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
            else:
                options = {"quant_type": self.to, "compress_statistics": self.double}
                new = bnb.nn.Linear4bit(**shape, compute_dtype=_DTYPES[name], **options, device="meta")
                new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, **options)
                # On some CPUs it would pack its weights anew in eval mode, with bfloat16 scales, and fail for narrow
                # layers: a validation would change what is trained.
                new.support_avx512bf16_for_cpu = False
            if old.bias is not None:
                new.bias = old.bias.requires_grad_(False)
                wrap_forward(new, functools.partial(_beside_bias, new))
            # Quantises now, a layer at a time, so that the device never holds the whole weights.
            return new.to("cpu").train(old.training)  # type: ignore[no-any-return]

        return make


def _beside_bias(layer: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Add the bias outside: bitsandbytes would cast it, in place and for good, to the dtype of its first inputs."""

    def run(inputs: torch.Tensor) -> torch.Tensor:
        bias, layer.bias = layer.bias, None
        try:
            outputs: torch.Tensor = forward(inputs)
        finally:
            layer.bias = bias
        return outputs.add_(bias)

    return run


def _is_within(name: str, layers: dict[str, nn.Module]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in layers)


def _import_bitsandbytes(who: str) -> Any:
    try:
        with quiet_imports():
            import bitsandbytes
    except ImportError as error:
        raise RecipeError(
            f"{who} needs bitsandbytes, which cannot be imported: {error}.", fix="Run pip install 'camshaft[qlora]'."
        ) from error
    return bitsandbytes
