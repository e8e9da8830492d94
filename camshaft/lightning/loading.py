"""Read checkpoints, our own and Lightning's, without unpickling anything but tensors and plain data."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from camshaft.errors import CheckpointError, DataError
from camshaft.lightning.errors import MisconfigurationException
from camshaft.lightning.loaders import _give_back
from camshaft.state import Progress

if TYPE_CHECKING:
    from camshaft.lightning.trainer import Trainer

_METHODS = {
    "fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader",
}  # fmt: skip
Made = TypeVar("Made")


def no_data(stage: str) -> DataError:
    """Say that nothing gives the data of a stage."""
    return DataError(
        f"there is no data to {stage}: neither the arguments, the data module nor the module has it.",
        fix=f"Pass loaders, or write {_METHODS[stage]}.",
    )


def read(path: Any, map_location: Any = "cpu") -> dict[str, Any]:
    """Return what a checkpoint file holds.

    Raises:
        CheckpointError: there is no such file, it is damaged, or it holds objects, which are named.
    """
    file = Path(str(path))
    if not file.exists():
        raise CheckpointError(f"there is no checkpoint {file}.", fix="Check the path; trainer.checkpoint_callback has it.")
    if file.is_dir():
        raise CheckpointError(
            f"{file} is a directory.",
            why="Lightning writes one where weights are sharded, and camshaft's own recipes write one always.",
            fix="For a run of camshaft: python -m camshaft.export; for Lightning's: "
            "python -m lightning.pytorch.utilities.consolidate_checkpoint.",
        )
    try:
        content = torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds more than tensors and plain data.",
            why=f"Loading it could run code. torch says: {_first_line(error)}",
            fix="Take the objects out where it was written: checkpoint['hyper_parameters'] and what on_save_checkpoint "
            "adds are the usual places.",
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {_first_line(error)}", fix="Use another checkpoint.") from error
    if not isinstance(content, dict) or "state_dict" not in content:
        raise CheckpointError(
            f"{file} is no checkpoint of a trainer.",
            why="It has no 'state_dict'.",
            fix="Load bare weights with module.load_state_dict(torch.load(path)).",
        )
    return content


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = next((line for line in lines if "GLOBAL" in line), None)
    return named or (lines[0] if lines else type(error).__name__)


def read_for_run(trainer: Trainer, ckpt_path: Any) -> dict[str, Any] | None:
    """Find and read what a run starts from: a path, "last" or "best"; None for nothing."""
    trainer.ckpt_path = None
    if ckpt_path is None:
        return None
    path = str(ckpt_path)
    if path in ("best", "last"):
        path = _find(trainer, path)
        if not path:
            return None
    trainer.ckpt_path = path
    return read(path)


def _find(trainer: Trainer, which: str) -> str:
    keeper = trainer.checkpoint_callback
    if keeper is None:
        raise MisconfigurationException(
            f"ckpt_path={which!r} needs a ModelCheckpoint in the trainer.", fix="Add one to callbacks, or pass a path."
        )
    if which == "best":
        if keeper.best_model_path:
            return str(keeper.best_model_path)
        raise MisconfigurationException(
            "ckpt_path='best' was asked for, and no checkpoint is the best yet.",
            fix="Train first, or pass the path of a checkpoint.",
        )
    found = keeper.find_last(trainer)
    if not found:
        from camshaft.lightning.utilities.rank_zero import rank_zero_warn

        rank_zero_warn("ckpt_path='last' found no checkpoint: the run starts from the beginning.")
    return str(found or "")


def load_weights(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Run the hooks of loading and fill the module, before optimizers are configured."""
    module, caller = trainer.lightning_module, trainer.caller
    caller.module("on_load_checkpoint", checkpoint)
    datamodule = trainer.datamodule
    if datamodule is not None and type(datamodule).__qualname__ in checkpoint:
        caller.call("load_state_dict", datamodule.load_state_dict, checkpoint[type(datamodule).__qualname__])
    if trainer.is_fitting:
        caller.callbacks("on_load_checkpoint", checkpoint)
        states = checkpoint.get("callbacks") or {}
        for callback in trainer.callbacks:
            state = _state_of(callback, states)
            if state is not None:
                callback.load_state_dict(state)
    fill(module, checkpoint["state_dict"], strict=module.strict_loading)


def _state_of(callback: Any, states: dict[str, Any]) -> Any:
    """Return a callback's state, by its key or by that of Lightning's class of the same name."""
    if callback.state_key in states:
        return states[callback.state_key]
    name = type(callback).__qualname__
    return next((state for key, state in states.items() if str(key).split("{")[0] == name), None)


def fill(module: Any, weights: dict[str, Any], *, strict: bool) -> None:
    """Load weights into a module.

    Raises:
        CheckpointError: names or shapes differ; all differences are named.
    """
    try:
        module.load_state_dict(weights, strict=strict)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        raise CheckpointError(
            f"the checkpoint does not fit {type(module).__name__}: {' '.join(lines)}",
            fix="Build the module as it was saved, or pass strict=False.",
        ) from None


def restore(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Give optimizers, schedulers, counters, position and random streams back, once all is prepared."""
    state = trainer.loop_state
    for optimizer, saved in zip(trainer.optimizers, checkpoint.get("optimizer_states") or [], strict=False):
        if saved:
            optimizer.load_state_dict(saved)
    for config, saved in zip(trainer.lr_scheduler_configs, checkpoint.get("lr_schedulers") or [], strict=False):
        config.scheduler.load_state_dict({**config.scheduler.state_dict(), **saved})
    trainer.global_step = int(checkpoint.get("global_step", 0))
    state.restored = True
    own = checkpoint.get("camshaft")
    if own is None:
        _follow_lightning(trainer, checkpoint)
        return
    state.progress = Progress(**own["progress"])
    world = state.strategy.data_world_size
    state.progress.epoch_batches = state.progress.epoch_batches * own["world_size"] // world
    state.validation_pending = own["validation_pending"]
    if own["scaler"] is not None:
        state.strategy.micro_step(sync=True, precision=state.precision)
        if state.strategy.scaler is not None:
            state.strategy.scaler.load_state_dict(own["scaler"])
    trainer.open_train()
    state.train_data.load(own["stream"])
    trainer.journal.know(own["metrics"])
    if len(own["journal"]) == world:
        trainer.journal.load(own["journal"][state.strategy.data_rank])
    if len(own["streams"]) == state.strategy.world_size:
        mine = own["streams"][state.strategy.rank]
        state.streams = lambda: _give_back(mine)


def _follow_lightning(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Go on from the epoch of a checkpoint that Lightning wrote: it has neither a position nor random streams."""
    progress = trainer.loop_state.progress
    loops = (checkpoint.get("loops") or {}).get("fit_loop") or {}
    done = ((loops.get("epoch_progress") or {}).get("current") or {}).get("processed")
    progress.epoch = int(done if done is not None else checkpoint.get("epoch", -1) + 1)
    progress.step = int(loops.get("epoch_loop.state_dict", {}).get("_batches_that_stepped", trainer.global_step))


def load_module(cls: type[Made], path: Any, map_location: Any, hparams_file: Any, strict: bool | None, given: Any) -> Made:
    """Build a module from a checkpoint's hyper-parameters and ``given``, and fill it."""
    content = read(path, map_location if map_location is not None else "cpu")
    saved = dict(content.get("hyper_parameters") or {})
    if hparams_file is not None:
        saved |= _read_file(hparams_file)
    name = content.get("hparams_name")
    module: Any = _build(cls, saved, name, given, path)
    module.on_load_checkpoint(content)
    fill(module, content["state_dict"], strict=module.strict_loading if strict is None else strict)
    if map_location is not None and not callable(map_location) and not isinstance(map_location, dict):
        module.to(torch.device(map_location))
    return module  # type: ignore[no-any-return]


def load_datamodule(cls: type[Made], path: Any, given: Any) -> Made:
    """Build a data module from the hyper-parameters that a checkpoint has of it."""
    content = read(path)
    saved = dict(content.get("datamodule_hyper_parameters") or {})
    return _build(cls, saved, content.get("datamodule_hyper_parameters_name", content.get("datamodule_hparams_name")), given, path)


def _build(cls: type[Made], saved: dict[str, Any], name: str | None, given: dict[str, Any], path: Any) -> Made:
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    whole = name if name in parameters and name != "kwargs" and name not in saved else None
    if whole is not None:
        from camshaft.hparams import Hparams

        arguments: dict[str, Any] = {whole: Hparams({**saved, **given})}
        arguments |= {key: value for key, value in given.items() if key in parameters}
    else:
        arguments = {**saved, **given}
        if not takes_all:
            arguments = {key: value for key, value in arguments.items() if key in parameters or key in given}
    needed = [
        p.name for p in list(parameters.values())[1:]
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in arguments
    ]  # fmt: skip
    if needed:
        raise CheckpointError(
            f"{path} does not say {', '.join(needed)} of {cls.__name__}.",
            why="It was not kept by save_hyperparameters, or is no plain data.",
            fix=f"Pass it: {cls.__name__}.load_from_checkpoint(path, {', '.join(f'{n}=...' for n in needed)}).",
        )
    return cls(**arguments)


def _read_file(path: Any) -> dict[str, Any]:
    import yaml

    text = Path(str(path)).read_text(encoding="utf-8")
    if str(path).endswith(".csv"):
        rows = [line.split(",", 1) for line in text.splitlines()[1:] if line.strip()]
        return {key: yaml.safe_load(value) for key, value in rows}
    loaded = yaml.safe_load(text)
    return dict(loaded or {})
