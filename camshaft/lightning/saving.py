"""Write checkpoints in Lightning's layout: tensors and plain data, with all that an exact resume needs."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from camshaft.checkpoint.capture import _plain_part
from camshaft.lightning.hparams import HyperparametersMixin, plain_hparams
from camshaft.lightning.loaders import _streams
from camshaft.lightning.plain import plain
from camshaft.loader import Position
from camshaft.state import Progress

if TYPE_CHECKING:
    from camshaft.lightning.trainer import Trainer

FORMAT = 1


def save(trainer: Trainer, path: Any, *, weights_only: bool = False) -> None:
    """Write a checkpoint that is there whole or not at all, and durable. Every rank calls this."""
    content = collect(trainer, weights_only=weights_only)
    error: Exception | None = None
    if trainer.is_global_zero:
        try:
            _write(content, Path(str(path)))
        except Exception as caught:  # noqa: BLE001 - raised below, on every rank
            error = caught
    if trainer.engine.any(error is not None):
        raise error or RuntimeError(f"the main process could not write {path}; its traceback is above.")


def collect(trainer: Trainer, *, weights_only: bool = False) -> dict[str, Any]:
    """Return what a checkpoint holds, after the hooks that add to it. Every rank calls this."""
    module, caller = trainer.lightning_module, trainer.caller
    content: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": "2.6.1",
        "state_dict": _state_dict(trainer),
        "loops": {},
    }
    if not weights_only:
        content["callbacks"] = {
            callback.state_key: state for callback in trainer.callbacks if (state := callback.state_dict())
        }
        content["optimizer_states"] = [_optimizer_state(trainer, optimizer) for optimizer in trainer.optimizers]
        content["lr_schedulers"] = [_plain_part(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs]
        content["camshaft"] = _position(trainer)
    _add_hparams(content, module, module.CHECKPOINT_HYPER_PARAMS_KEY)
    datamodule = trainer.datamodule
    if datamodule is not None:
        _add_hparams(content, datamodule, "datamodule_hyper_parameters")
        if not weights_only and (state := caller.call("state_dict", datamodule.state_dict)):
            content[type(datamodule).__qualname__] = state
    if not weights_only:
        caller.callbacks("on_save_checkpoint", content)
    caller.module("on_save_checkpoint", content)
    return {key: plain(value, f"checkpoint[{key!r}]") for key, value in content.items()}


def _state_dict(trainer: Trainer) -> dict[str, Any]:
    """Return whole weights under the names that the module gives them."""
    module = trainer.lightning_module
    if trainer.engine.replicates:
        return dict(module.state_dict())
    kept = module.state_dict().keys()
    with trainer.engine.full_parameters():
        tensors = dict(module.named_buffers(remove_duplicate=False))
        tensors |= dict(module.named_parameters(remove_duplicate=False))
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items() if name in kept}


def _optimizer_state(trainer: Trainer, optimizer: Any) -> dict[str, Any]:
    if trainer.engine.replicates:
        state: dict[str, Any] = optimizer.state_dict()
        return state
    return {}


def _add_hparams(content: dict[str, Any], owner: Any, key: str) -> None:
    if isinstance(owner, HyperparametersMixin) and (kept := plain_hparams(owner)):
        content[key] = kept
        if owner._hparams_name is not None:  # noqa: SLF001 - our own mixin
            content[f"{key}_name" if key != "hyper_parameters" else "hparams_name"] = owner._hparams_name  # noqa: SLF001


def _position(trainer: Trainer) -> dict[str, Any]:
    """Return counters, data position and random streams: where the run goes on, exactly."""
    state = trainer.loop_state
    progress = _progress(trainer)
    source = state.train_data
    position = Position(progress.epoch_samples, progress.epoch_batches * state.strategy.data_world_size)
    pending = state.validation_pending or trainer.validation_due
    streams = state.strategy.gather_objects(_streams())
    journal = trainer.journal.save() if progress.epoch_batches else []
    return {
        "format": FORMAT,
        "progress": dataclasses.asdict(progress),
        "world_size": state.strategy.data_world_size,
        "validation_pending": bool(pending),
        "stream": source.save(position) if source is not None else None,
        "streams": streams,
        "scaler": state.strategy.scaler.state_dict() if state.strategy.scaler is not None else None,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "journal": state.strategy.gather_data(journal),
        "precision": trainer.precision,
    }


def _progress(trainer: Trainer) -> Progress:
    """Return the counters as the loop will have them once it is done with what it does now."""
    state, window = trainer.loop_state, trainer.stepper.window
    progress = dataclasses.replace(state.progress)
    if window is not None and trainer.stepper.is_closing_window:
        progress.epoch_samples += window.total
        progress.epoch_batches += len(window.batches)
        if not trainer.stepper.took:
            progress.skipped_steps += 1
    if trainer.is_closing and state.at_epoch_end:
        progress.epoch += 1
        progress.epoch_samples = progress.epoch_batches = 0
    return progress


def _write(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(draft).chmod(0o666 & ~mask)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def show_results(stage: str, results: list[dict[str, float]]) -> None:
    """Print the metrics of an evaluation, one line each."""
    from camshaft.terminal import say

    for number, values in enumerate(results):
        title = stage if len(results) == 1 else f"{stage}, loader {number}"
        if values:
            say(f"{title}: " + ", ".join(f"{name} {value:.6g}" for name, value in sorted(values.items())))
