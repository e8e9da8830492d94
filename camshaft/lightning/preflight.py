"""Refuse, before anything starts, what would fail later or be ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from camshaft.lightning.errors import MisconfigurationException
from camshaft.lightning.hooks import is_overridden

if TYPE_CHECKING:
    from camshaft.lightning.trainer import Trainer

_STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_DEFAULT_EPOCHS = 1000


def require_step(trainer: Trainer, stage: str) -> None:
    """Refuse a module without the step of a stage."""
    module, name = trainer.lightning_module, _STEPS[stage]
    has_forward = stage == "predict"
    if not is_overridden(name, module) and not has_forward:
        raise MisconfigurationException(
            f"{type(module).__name__} has no {name}.", fix=f"Write 'def {name}(self, batch, batch_idx)'."
        )


def require_fit(trainer: Trainer) -> None:
    """Refuse a fit that cannot work: a step or the end is missing, or flags contradict the module."""
    require_step(trainer, "fit")
    module = trainer.lightning_module
    if not is_overridden("configure_optimizers", module):
        raise MisconfigurationException(
            f"{type(module).__name__} has no configure_optimizers.",
            why="Nothing would be trained.",
            fix="Return an optimizer from it, or None to train nothing on purpose.",
        )
    _require_end(trainer)
    if not module.automatic_optimization:
        _require_manual(trainer)


def _require_end(trainer: Trainer) -> None:
    """Give a run without a limit Lightning's, where something else can end it; refuse it otherwise."""
    if trainer.max_epochs is not None:
        return
    if trainer.max_steps != -1 or trainer.max_secs is not None:
        trainer.max_epochs = -1
        return
    if not any(callback.can_stop for callback in trainer.callbacks):
        raise MisconfigurationException(
            "the Trainer has none of max_epochs, max_steps and max_time.",
            why="Lightning would train 1000 epochs.",
            fix="Say how long: Trainer(max_epochs=...); -1 never ends.",
        )
    trainer.max_epochs = _DEFAULT_EPOCHS


def _require_manual(trainer: Trainer) -> None:
    ignored: dict[str, Any] = {
        "gradient_clip_val": trainer.gradient_clip_val,
        "accumulate_grad_batches": trainer.accumulate_grad_batches if trainer.accumulate_grad_batches != 1 else None,
    }
    instead = {
        "gradient_clip_val": "call self.clip_gradients(optimizer, gradient_clip_val=...) before optimizer.step()",
        "accumulate_grad_batches": "step the optimizer every N-th batch in training_step",
    }
    for name, value in ignored.items():
        if value is not None:
            raise MisconfigurationException(
                f"Trainer({name}={value}) and automatic_optimization = False contradict each other.",
                why="The module steps its optimizers itself.",
                fix=f"Leave the flag out, and {instead[name]}.",
            )
