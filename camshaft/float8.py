"""Let linear layers multiply in float8: by torchao, or by Transformer Engine where it is installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from camshaft.errors import RecipeError, StrategyError
from camshaft.layers import find_layers, replace_layer, wrap_forward
from camshaft.quiet import quiet_imports

Library = Literal["auto", "torchao", "transformer_engine"]
_MULTIPLE = 16


def require_float8(device: torch.device, *, emulate: bool, library: Library = "auto") -> str:
    """Return the library that will multiply in float8 on a device.

    Raises:
        StrategyError: the device has no float8 products, or the library is not installed.
    """
    if emulate and library == "transformer_engine":
        raise StrategyError(
            "fp8 has emulate: true and library: transformer_engine, which cannot emulate.",
            fix="Leave library out: torchao emulates float8 on any device.",
        )
    if not emulate:
        _require_hardware(device)
    wanted = ["transformer_engine", "torchao"] if library == "auto" and not emulate else ["torchao"]
    wanted = wanted if library == "auto" else [library]
    for name in wanted:
        if importlib.util.find_spec(name) is not None:
            return name
    raise StrategyError(
        f"fp8 needs {wanted[-1]}, which is not installed.",
        fix="Run pip install 'camshaft[fp8]'." if wanted[-1] == "torchao" else "Install transformer_engine[pytorch].",
    )


def use_float8(module: nn.Module, library: str, *, emulate: bool, keep: Sequence[str] = ()) -> list[nn.Module]:
    """Let the linear layers of a module multiply in float8, in place; return those layers.

    Weights keep their dtype, names and optimizer: inputs, weights and gradients are scaled and cast for each
    product (e4m3, gradients e5m2). Layers in or below ``keep``, and those whose sizes are no multiples of
    16, which the hardware needs, stay as they are. Source: Micikevicius et al. (2022), FP8 formats.

    Raises:
        RecipeError: no layer is left to convert.
    """
    kept = set(find_layers(module, keep, who="precision.keep_fp32")) if keep else set()
    linear = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear}
    chosen = {
        name
        for name, layer in linear.items()
        if layer.in_features % _MULTIPLE == 0
        and layer.out_features % _MULTIPLE == 0
        and not any(name == k or name.startswith(f"{k}.") for k in kept)
    }
    if not chosen:
        raise RecipeError(
            f"fp8 finds no linear layer in {type(module).__name__} whose sizes are multiples of {_MULTIPLE}.",
            why="Nothing would be computed in float8.",
            fix=f"Its {len(linear)} linear layers are "
            + ", ".join(f"{n} ({layer.in_features} to {layer.out_features})" for n, layer in list(linear.items())[:8])
            + ". Change their sizes, or use precision: bf16.",
        )
    if library == "transformer_engine":
        return _use_transformer_engine(module, chosen)
    return _use_torchao(module, chosen, emulate=emulate)


def switch_float8(layers: Iterable[Any], *, on: bool) -> None:
    """Let converted layers multiply in float8, or as plain linear layers do, from the next forward on."""
    for layer in layers:
        if isinstance(layer.__dict__.get("forward"), _InFloat8):
            layer.forward.on = on
        elif on:
            layer.__dict__.pop("forward", None)
        else:
            layer.forward = functools.partial(_plain_linear, layer)


def _require_hardware(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        return
    found = "is a CPU" if device.type == "cpu" else f"is {device.type}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found = f"is a {torch.cuda.get_device_name(device)} of compute capability {major}.{minor}"
    raise StrategyError(
        f"precision is fp8, and the device {found}.",
        why="Float8 products need an NVIDIA GPU of compute capability 8.9 or more (Ada, Hopper and later).",
        fix="Use precision: bf16, or {fp8: {emulate: true}} to round as float8 does without being any faster.",
    )


def _use_torchao(module: nn.Module, chosen: set[str], *, emulate: bool) -> list[nn.Module]:
    with quiet_imports():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    convert_to_float8_training(
        module, module_filter_fn=lambda _layer, name: name in chosen, config=Float8LinearConfig(emulate=emulate)
    )
    return [module.get_submodule(name) for name in sorted(chosen)]


def _use_transformer_engine(module: nn.Module, chosen: set[str]) -> list[nn.Module]:
    import transformer_engine.pytorch as te  # type: ignore[import-not-found,unused-ignore]

    made = []
    for name in sorted(chosen):
        old: Any = module.get_submodule(name)
        new = te.Linear(old.in_features, old.out_features, bias=old.bias is not None, params_dtype=old.weight.dtype)
        with torch.no_grad():
            new.weight.copy_(old.weight)
            if old.bias is not None:
                new.bias.copy_(old.bias)
        replace_layer(module, name, new)
        wrap_forward(new, functools.partial(_InFloat8, te))
        made.append(new)
    return made


class _InFloat8:
    """Run the forward of a Transformer Engine layer in float8 while ``on``."""

    def __init__(self, te: Any, forward: Callable[..., Any]) -> None:
        self.te = te
        self.forward = forward
        self.on = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.te.fp8_autocast(enabled=self.on):
            return self.forward(*args, **kwargs)


def _plain_linear(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(inputs, layer.weight, layer.bias)
