"""Wrap an optimizer so that its ``step`` fires hooks, unscales, clips and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from camshaft.lightning.trainer import Trainer


class LightningOptimizer:
    """An optimizer as ``self.optimizers()`` gives it: all is the optimizer's own, but ``step``.

    It is an instance of the optimizer's class too, so that a scheduler takes it.
    """

    is_surface = True

    def __init__(self, optimizer: Optimizer, trainer: Trainer) -> None:
        self._optimizer = optimizer
        self._trainer = trainer
        kind = type(optimizer)
        self.__class__ = type(f"Lightning{kind.__name__}", (LightningOptimizer, kind), {})

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself."""
        return self._optimizer

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run the closure, if there is one, and update."""
        return self._trainer.stepper.step(self._optimizer, closure, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only this optimizer's parameters ask for gradients; without ``sync_grad`` ranks do not average them."""
        trainer = self._trainer
        module = trainer.lightning_module
        if not sync_grad:
            trainer.engine.micro_step(sync=False, precision=trainer.loop_state.precision)
        module.toggle_optimizer(self)
        try:
            yield
        finally:
            module.untoggle_optimizer(self)
            if not sync_grad:
                trainer.engine.micro_step(sync=True, precision=trainer.loop_state.precision)

    def __getattribute__(self, name: str) -> Any:
        # The class of the optimizer has methods and properties of its own, which must see its own state.
        if name in _OWN or name.startswith("__"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_optimizer"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or name.startswith("__"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def __repr__(self) -> str:
        return f"Lightning{self._optimizer!r}"


_OWN = frozenset({"_optimizer", "_trainer", "optimizer", "step", "zero_grad", "toggle_model", "__class__"})


def raw(optimizer: Any) -> Optimizer:
    """Return the optimizer inside a wrapper, or itself."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def runs_closure_once(optimizer: Optimizer) -> bool:
    """Say whether ``step(closure)`` does nothing with the closure but call it first."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.LBFGS)
