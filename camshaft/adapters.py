"""Fold adapters back into the weights they stand beside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from camshaft.errors import ModuleError


@torch.no_grad()
def merged_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict that the module had without adapters and quantisation, with the adapters added in.

    Names are those of the module as it was built; quantised weights come back in float32. Parameters must be
    whole: under a strategy that shards them, call this inside ``strategy.full_parameters()``.

    Raises:
        ModuleError: the module has no adapters.
    """
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    if not layers:
        raise ModuleError(
            f"{type(module).__name__} has no adapters to merge.",
            fix="Train it with callbacks.lora, or load its weights as they are.",
        )
    merged = {}
    kept = set(module.state_dict(keep_vars=True))
    tensors: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in tensors.items():
        owner, _, rest = name.partition(".base_layer.")
        inside = next((key for key in layers if name.startswith(f"{key}.")), None)
        if name not in kept or (inside is not None and not rest):
            continue
        value = _whole(tensor, module.get_submodule(name.rpartition(".")[0]))
        if rest == "weight":
            layer = layers[owner]
            for adapter in layer.active_adapters:
                value = value + layer.get_delta_weight(adapter).to(value)
        merged[f"{owner}.{rest}" if rest else name] = value.detach().clone()
    return merged


def _whole(tensor: Any, layer: Any) -> Tensor:
    """Return a parameter of a layer as it would be without quantisation, in float32, or as it is."""
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        from bitsandbytes.functional import dequantize_4bit

        restored: Tensor = dequantize_4bit(tensor.data, state).float()
        return restored
    if tensor.dtype is torch.int8:
        # A first forward moves the scales from the weight to the layer.
        scales = layer.state.SCB if tensor.SCB is None else tensor.SCB
        return tensor.data.float() * (scales.float() / 127).unsqueeze(1)  # type: ignore[no-any-return]
    return tensor  # type: ignore[no-any-return]
