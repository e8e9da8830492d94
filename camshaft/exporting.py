"""Put the weights of a checkpoint together in one file, or rebuild its module with them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn

from camshaft.checkpoint import Reader, formats
from camshaft.checkpoint.reference import left_out
from camshaft.errors import CheckpointError, ModuleError

if TYPE_CHECKING:
    from camshaft.assembly import Parts
    from camshaft.module import Module

_CHUNK = 1 << 22


def sources(reader: Reader, *, ema: bool) -> dict[str, str]:
    """Map every weight's name to the entry that holds it: the average where ``ema`` wants it and there is one.

    Raises:
        CheckpointError: there are no averages, or the checkpoint leaves weights to the module it was made of.
    """
    found = {name.removeprefix("model/"): name for name in reader.names("model")}
    if ema:
        averages = {name.removeprefix("ema/"): name for name in reader.names("ema")}
        if not averages:
            raise CheckpointError(
                f"{reader.path} holds no averages.",
                why="The run had no callbacks.ema.",
                fix="Leave --ema out to export the weights themselves.",
            )
        found |= averages
    return found


def write_safetensors(reader: Reader, path: Path, *, ema: bool = False, dtype: torch.dtype | None = None) -> int:
    """Write all weights into one file, which appears whole; return how many there are.

    One tensor is in memory at a time, however many files and ranks it is spread over. ``dtype`` converts
    floating-point weights only.

    Raises:
        CheckpointError: the checkpoint refers to weights that it does not hold, or to averages it has not.
    """
    if left_out(reader):
        raise CheckpointError(
            f"{reader.path} holds adapters only; the frozen weights below them are left to the module.",
            fix="Export it with the recipe of its run beside it, which adds the adapters in.",
        )
    names = sources(reader, ema=ema)
    table = [(name, _target(reader.spec(key).dtype, dtype), reader.spec(key).shape) for name, key in names.items()]
    pairs = ((reader.tensor(names[name]), kind) for name, kind, _ in table)
    _write(path, formats.header(table, {"format": "pt"}), pairs)
    return len(table)


def write_tensors(tensors: dict[str, Tensor], path: Path, *, dtype: torch.dtype | None = None) -> int:
    """Write tensors that are in memory into one file, which appears whole; return how many there are."""
    table = [(name, _target(t.dtype, dtype), tuple(t.shape)) for name, t in tensors.items()]
    _write(path, formats.header(table, {"format": "pt"}), ((tensors[name], kind) for name, kind, _ in table))
    return len(table)


def rebuild(parts: Parts, reader: Reader, *, ema: bool = False, dtype: torch.dtype | None = None) -> Module:
    """Build the recipe's module, as its callbacks change it, with the checkpoint's weights, in eval mode."""
    from camshaft.checkpoint.capture import load_weights
    from camshaft.hooks import Hooks
    from camshaft.metrics import Metrics
    from camshaft.state import Limits, State

    hooks = Hooks(parts.callbacks)
    parts.strategy.launch()
    hooks.on_launch(parts.strategy)
    module = parts.build_module()
    hooks.on_module(module)
    parts.strategy.prepare(module, [])
    load_weights(State(module, parts.strategy, metrics=Metrics(), limits=Limits(max_steps=1)), reader)
    if ema:
        own = dict(module.named_parameters())
        with torch.no_grad():
            for name, key in sources(reader, ema=True).items():
                if key.startswith("ema/"):
                    own[name].copy_(reader.tensor(key))
    return module.eval() if dtype is None else module.eval().to(dtype)


def example_of(parts: Parts, module: Module) -> tuple[Tensor, ...]:
    """Return the inputs of one batch of the recipe's data, as the module's forward takes them.

    Raises:
        ModuleError: the module has no forward, or no loader gives a batch.
    """
    if type(module).forward is nn.Module.forward:
        raise ModuleError(
            f"{type(module).__name__} has no forward.",
            why="There would be nothing to export: steps need labels and a run.",
            fix="Write def forward(self, inputs), and call it from the steps.",
        )
    data: Any = parts.build_data() or module
    if hasattr(data, "setup"):
        data.setup("predict")
    for name in ("predict_dataloader", "val_dataloader", "test_dataloader", "train_dataloader"):
        loader = getattr(data, name, lambda: None)()
        batches: Iterable[Any] = loader[0] if isinstance(loader, list) else loader or ()
        for batch in batches:
            first = batch[0] if isinstance(batch, (tuple, list)) else batch
            if isinstance(first, Tensor):
                return (first,)
    raise ModuleError(
        "the data gives no batch that begins with a tensor.",
        why="Tracing a module needs an example of its input.",
        fix="Export the weights with --format safetensors, or give the data a loader of (inputs, ...).",
    )


def _target(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def _write(path: Path, header: bytes, pairs: Iterator[tuple[Tensor, torch.dtype]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(header)
            for tensor, dtype in pairs:
                _write_tensor(file, tensor, dtype)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_tensor(file: BinaryIO, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype is dtype:
        file.write(formats.as_bytes(tensor))
        return
    flat = tensor.detach().contiguous().reshape(-1)
    parts = (flat[start : start + _CHUNK] for start in range(0, flat.numel(), _CHUNK))
    file.writelines(formats.as_bytes(part.to(dtype)) for part in parts)
