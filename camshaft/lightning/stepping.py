"""Make the updates of a fit: Lightning's hooks in their order, around the engine's strategy and weighting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from camshaft.data import Window
from camshaft.lightning.errors import MisconfigurationException
from camshaft.lightning.hooks import is_overridden
from camshaft.lightning.optimizer import raw, runs_closure_once
from camshaft.step import Weighting

if TYPE_CHECKING:
    from camshaft.hooks import Hooks
    from camshaft.lightning.trainer import Trainer
    from camshaft.state import State


class Stepper:
    """The ``step`` of a fit's loop: one window of micro-batches, through the hooks of Lightning.

    Attributes:
        window: the window in hand, None between steps.
        is_last_batch: whether the batch in hand is the epoch's last.
        is_closing_window: whether the window's update is done, and only its last hooks are left.
        took: whether an optimizer was stepped in it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._owns_backward = False
        self._weighting: Weighting | None = None
        self.took = self.is_closing_window = False
        self._had_loss = False
        self.window: Window | None = None
        self.is_last_batch = False

    def begin(self) -> None:
        """Look, once, at what the module overrides."""
        self._owns_backward = is_overridden("backward", self._trainer.lightning_module)

    def __call__(self, state: State, window: Window, hooks: Hooks) -> bool:
        """Run every batch of the window; say whether an optimizer was stepped."""
        trainer = self._trainer
        automatic = trainer.lightning_module.automatic_optimization
        self.window, self.took, self._had_loss = window, False, False
        self.is_closing_window = False
        self._weighting = Weighting(state, window) if automatic else None
        last = len(window.batches) - 1
        try:
            for index in range(last + 1):
                self.is_last_batch = window.is_last and index == last
                if not self._batch(state, window, index, is_stepping=index == last):
                    break
        finally:
            self.window = None
        self._stop_if_asked(state, window)
        state.in_update = False
        if not self.took:
            state.progress.skipped_steps += 1
        return self.took

    def _batch(self, state: State, window: Window, index: int, *, is_stepping: bool) -> bool:
        """Run one batch with its hooks; False when a hook ended the epoch before it."""
        trainer, caller = self._trainer, self._trainer.caller
        batch_idx = window.first + index
        state.strategy.micro_step(sync=is_stepping, precision=state.precision)
        batch = caller.transfer(trainer.converted(window.batches[index]), 0)
        trainer.journal.begin_batch(batch)
        trainer.journal.muted = not window.samples[index]
        if caller.both("on_train_batch_start", batch, batch_idx) == -1:
            window.is_last = state.at_epoch_end = True
            trainer.advance_schedulers("epoch", plateau=False)
            return False
        run = self._automatic if trainer.lightning_module.automatic_optimization else self._manual
        output = run(state, batch, batch_idx, index, is_stepping)
        state.progress.micro_step += 1
        if is_stepping:
            self._count(state, window)
            self.is_closing_window = True
            trainer.advance_schedulers("step", plateau=False)
        if self.is_last_batch:
            trainer.advance_schedulers("epoch", plateau=False)
        trainer.plan_validation(batch_idx, is_last=self.is_last_batch, is_stepping=is_stepping)
        caller.both("on_train_batch_end", output, batch, batch_idx)
        trainer.journal.end_batch()
        trainer.journal.muted = False
        if is_stepping:
            trainer.log_step()
            if not trainer.validation_due:
                trainer.advance_schedulers("step", plateau=True)
        return True

    def _count(self, state: State, window: Window) -> None:
        if self.took:
            state.progress.step += 1
            state.progress.samples += window.total

    # -- automatic ---------------------------------------------------------------------------------

    def _automatic(self, state: State, batch: Any, batch_idx: int, index: int, is_stepping: bool) -> Any:
        trainer, kept = self._trainer, {}
        optimizer = trainer.lightning_optimizers[0] if trainer.lightning_optimizers else None

        def closure() -> Tensor | None:
            output = trainer.caller.call("training_step", state.strategy.run, "training_step", batch, batch_idx)
            kept["output"] = output
            return self._backward_of(output, batch_idx, index, optimizer)

        if is_stepping and optimizer is not None:
            trainer.caller.module("optimizer_step", trainer.current_epoch, batch_idx, optimizer, closure)
        else:
            closure()
        return _detached(kept.get("output"))

    def _backward_of(self, output: Any, batch_idx: int, index: int, optimizer: Any) -> Tensor | None:
        """Clear gradients before a window's first backward, and run that of a step's output."""
        trainer, caller, weighting = self._trainer, self._trainer.caller, self._weighting
        assert weighting is not None
        _require_loss(output, trainer.lightning_module)
        is_nothing = output is None or (isinstance(output, dict) and output.get("loss") is None)
        if isinstance(output, dict):
            output = output["loss"]
        loss, share = weighting.weigh(index, output)
        if index == 0 and optimizer is not None:
            self._clear(batch_idx, raw(optimizer))
        if is_nothing and trainer.engine.world_size == 1:
            return None
        self._had_loss = True
        if optimizer is None:
            return loss.detach()
        self.backward(share)
        return loss.detach()

    def _clear(self, batch_idx: int, optimizer: Optimizer) -> None:
        trainer, caller = self._trainer, self._trainer.caller
        caller.both("on_before_zero_grad", optimizer)
        if is_overridden("optimizer_zero_grad", trainer.lightning_module):
            caller.module("optimizer_zero_grad", trainer.current_epoch, batch_idx, optimizer)
        else:
            trainer.engine.zero_grad()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the hooks and backward of a loss; scaled for fp16, through the module's own ``backward`` if it has one."""
        trainer, caller, strategy = self._trainer, self._trainer.caller, self._trainer.engine
        caller.both("on_before_backward", loss)
        if not (self._owns_backward or args or kwargs):
            strategy.backward(loss)
        else:
            if not strategy.replicates and strategy.name == "deepspeed":
                raise MisconfigurationException(
                    "DeepSpeed runs backward itself.",
                    why="An own backward, or arguments for it, would be passed over.",
                    fix="Use another strategy, or leave them out.",
                )
            scaled = loss if strategy.scaler is None else loss * strategy.scaler.scale
            caller.module("backward", scaled, *args) if not kwargs else caller.call(
                "backward", lambda: trainer.lightning_module.backward(scaled, *args, **kwargs)
            )
        caller.both("on_after_backward")

    # -- manual ------------------------------------------------------------------------------------

    def _manual(self, state: State, batch: Any, batch_idx: int, index: int, is_stepping: bool) -> Any:
        output = self._trainer.caller.call("training_step", state.strategy.run, "training_step", batch, batch_idx)
        state.strategy.active = list(state.optimizers)
        return _detached(output)

    # -- an optimizer's step -----------------------------------------------------------------------

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        """Run a closure and update one optimizer, with its hooks, unscaling and clipping."""
        strategy = self._trainer.engine
        strategy.active = [optimizer]
        if closure is not None and not runs_closure_once(optimizer):
            return self._step_with(optimizer, closure, **kwargs)
        with torch.enable_grad():
            result = closure() if closure is not None else None
        automatic = self._trainer.lightning_module.automatic_optimization
        skips = automatic and not self._had_loss
        if not skips:
            self._before_step(optimizer)
        self._trainer.loop_state.in_update = True
        if strategy.step(skip=skips):
            self.took = True
            self._trainer.global_step += 1
        return result

    def _step_with(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Hand the closure to an optimizer that calls it as often as it likes."""
        trainer = self._trainer
        if trainer.engine.scaler is not None or not trainer.engine.replicates:
            raise MisconfigurationException(
                f"{type(optimizer).__name__} runs its closure itself.",
                why="Gradients of its own calls would be neither unscaled nor reduced over shards.",
                fix="Use precision 32-true or bf16-mixed, and strategy auto or ddp.",
            )

        def wrapped() -> Any:
            with torch.enable_grad():
                result = closure()
            self._before_step(optimizer)
            return result

        result = optimizer.step(wrapped, **kwargs)
        self.took = True
        trainer.global_step += 1
        return result

    def _before_step(self, optimizer: Optimizer) -> None:
        trainer, caller = self._trainer, self._trainer.caller
        if self._weighting is not None and self._weighting.is_late:
            self._weighting.divide_gradients()
        is_finite = trainer.engine.scaler is None or trainer.engine.unscale()
        if not is_finite:
            return
        caller.both("on_before_optimizer_step", optimizer)
        module = trainer.lightning_module
        if module.automatic_optimization:
            caller.module(
                "configure_gradient_clipping", optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            )

    def _stop_if_asked(self, state: State, window: Window) -> None:
        """End the run when a limit is reached or somebody set ``trainer.should_stop``."""
        trainer = self._trainer
        if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
            state.control.stop(f"max_steps={trainer.max_steps} is reached", everywhere=True)
        elif trainer.should_stop and trainer.may_stop:
            if not window.is_last:
                window.is_last = state.at_epoch_end = True
                trainer.plan_validation(window.first, is_last=True, is_stepping=True)
            state.control.stop("trainer.should_stop was set", everywhere=True)


def _require_loss(output: Any, module: Any) -> None:
    """Refuse outputs that Lightning refuses, and the (sum, weight) pairs that only camshaft's own modules return."""
    if isinstance(output, dict) and "loss" not in output:
        raise MisconfigurationException(
            f"{type(module).__name__}.training_step returned a dict without 'loss'.",
            why=f"It has {', '.join(map(str, output)) or 'nothing'}, and nothing to run backward from.",
            fix="Return the loss, a dict that has it under 'loss', or None to skip the batch.",
        )
    if output is not None and not isinstance(output, (dict, Tensor)):
        raise MisconfigurationException(
            f"{type(module).__name__}.training_step returned a {type(output).__name__}.",
            why="Nothing in it says which tensor is the loss.",
            fix="Return the loss, a dict that has it under 'loss', or None to skip the batch.",
        )


def _detached(output: Any) -> Any:
    """Return a step's output for ``on_train_batch_end``, without its graph; a lone loss in a dict, as Lightning does."""
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    if isinstance(output, dict):
        return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
    return output
