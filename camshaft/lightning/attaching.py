"""Give a trainer its callbacks and loggers, and connect it with the module and data of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from camshaft.lightning.callback import Callback
from camshaft.lightning.errors import MisconfigurationException
from camshaft.lightning.module import LightningModule

if TYPE_CHECKING:
    from camshaft.lightning.trainer import Trainer


def default_callbacks(trainer: Trainer) -> list[Any]:
    """Return the callbacks that were passed, and those that a trainer has by itself; checkpoints come last.

    Raises:
        MisconfigurationException: what was passed is no callback, or contradicts a flag.
    """
    from camshaft.lightning.callbacks import ModelCheckpoint, ModelSummary, ProgressBar, TQDMProgressBar

    flags = trainer.flags
    given = flags["callbacks"]
    callbacks = [] if given is None else [given] if isinstance(given, Callback) else list(given)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise MisconfigurationException(
                f"Trainer(callbacks=...) holds a {type(callback).__name__}.",
                why="It has no hooks of a callback.",
                fix="Derive it from camshaft.lightning.Callback; callbacks of lightning itself need their import changed.",
            )
    extras = {
        "enable_checkpointing": (ModelCheckpoint, lambda: ModelCheckpoint()),
        "enable_progress_bar": (ProgressBar, lambda: TQDMProgressBar()),
        "enable_model_summary": (ModelSummary, lambda: ModelSummary()),
    }
    quiet = bool(flags["barebones"])
    for name, (kind, make) in extras.items():
        has_one = any(isinstance(callback, kind) for callback in callbacks)
        wanted = flags[name] if flags[name] is not None else not quiet
        if has_one and flags[name] is False:
            raise MisconfigurationException(
                f"Trainer({name}=False) contradicts the {kind.__name__} in callbacks.", fix="Remove one of the two."
            )
        fast = bool(flags["fast_dev_run"]) and name == "enable_checkpointing"
        if wanted and not has_one and not fast:
            callbacks.append(make())
    if flags["fast_dev_run"]:
        callbacks = [c for c in callbacks if not (isinstance(c, ModelCheckpoint) or c.is_monitoring and c.can_stop)]
    _require_own_keys(callbacks)
    return in_order(callbacks)


def in_order(callbacks: list[Any]) -> list[Any]:
    """Return callbacks with those that save last, so that they see what all others did."""
    from camshaft.lightning.callbacks import Checkpoint

    return [c for c in callbacks if not isinstance(c, Checkpoint)] + [c for c in callbacks if isinstance(c, Checkpoint)]


def default_loggers(trainer: Trainer) -> list[Any]:
    """Return the loggers that were passed; TensorBoard where nothing was said."""
    flags = trainer.flags
    given = flags["logger"]
    if flags["fast_dev_run"] or (flags["barebones"] and given is None):
        return []
    if given is None or given is True:
        from camshaft.lightning.loggers import TensorBoardLogger

        return [TensorBoardLogger(save_dir=trainer.default_root_dir)]
    if given is False:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def attach(trainer: Trainer, module: Any, datamodule: Any) -> None:
    """Connect module, data and callbacks with the trainer.

    Raises:
        MisconfigurationException: the module is none, or one of lightning itself.
    """
    if module is None:
        raise MisconfigurationException(
            "the Trainer has no module yet.", fix="Pass one: trainer.test(model, ...), or call fit first."
        )
    if not isinstance(module, LightningModule):
        family = [kind.__module__.split(".")[0] for kind in type(module).__mro__]
        theirs = next((name for name in family if name in ("lightning", "pytorch_lightning")), None)
        raise MisconfigurationException(
            f"{type(module).__name__} is no LightningModule of camshaft.",
            why=f"It derives from that of {theirs}." if theirs else "It has no steps that could be called.",
            fix="Change its import to 'import camshaft.lightning as L' and derive it from L.LightningModule.",
        )
    trainer.lightning_module = module
    trainer.datamodule = datamodule if datamodule is not None else trainer.datamodule
    module.trainer = trainer
    if trainer.datamodule is not None:
        trainer.datamodule.trainer = trainer
    own = module.configure_callbacks()
    own = list(own) if isinstance(own, (list, tuple)) else [own]
    kinds = {type(callback) for callback in own}
    trainer.callbacks = in_order([c for c in trainer.callbacks if type(c) not in kinds] + own)
    _require_own_keys(trainer.callbacks)
    for callback in trainer.callbacks:
        # Callbacks log as the module does.
        callback.log, callback.log_dict = module.log, module.log_dict


def _require_own_keys(callbacks: list[Any]) -> None:
    """Refuse two callbacks whose states a checkpoint could not tell apart."""
    seen: dict[str, Any] = {}
    for callback in callbacks:
        has_state = type(callback).state_dict is not Callback.state_dict
        if has_state and callback.state_key in seen:
            raise MisconfigurationException(
                f"two callbacks have the state_key {callback.state_key!r}.",
                why="A checkpoint could keep the state of only one.",
                fix="Give one other arguments, or a state_key of its own.",
            )
        if has_state:
            seen[callback.state_key] = callback
