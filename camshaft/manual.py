"""Let a module step its own optimizers, with the same counters, clipping, precision and accumulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from camshaft.data import Window
from camshaft.errors import ModuleError

if TYPE_CHECKING:
    from camshaft.hooks import Hooks
    from camshaft.state import State


class ManualOptimizer:
    """An optimizer as ``training_step`` drives it: ``zero_grad``, ``manual_backward``, ``step``.

    ``step`` unscales, fires ``on_gradients`` (so clipping works) and updates. With accumulation it
    updates on the last micro-batch of the window only, and ``zero_grad`` goes back to what this
    optimizer has accumulated: gradients that another loss left on its parameters in between are
    dropped, as they are without accumulation. Everything else is the optimizer's own.
    """

    def __init__(self, optimizer: Optimizer, driver: ManualDriver) -> None:
        self.optimizer = optimizer
        self._driver = driver
        self._kept: list[Tensor | None] | None = None

    def zero_grad(self) -> None:
        """Forget the gradients, or go back to those that the window has accumulated so far."""
        if self._driver.is_first or self._kept is None:
            self.optimizer.zero_grad()
            return
        for parameter, gradient in zip(self._parameters(), self._kept, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()

    def step(self) -> None:
        """Update, if this is the window's last micro-batch; otherwise keep what it has accumulated."""
        if self._driver.is_last:
            self._kept = None
            self._driver.step(self.optimizer)
        else:
            self._kept = [None if p.grad is None else p.grad.clone() for p in self._parameters()]

    def toggled(self) -> Any:
        """Return a context in which only this optimizer's parameters ask for gradients."""
        return _toggled(self.optimizer, self._driver.optimizers)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class ManualDriver:
    """Make the updates of a module with ``automatic_optimization = False``: the ``step`` of its loop."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._hooks: Hooks | None = None
        self._divisor = 1
        self._took = False
        self.is_first = self.is_last = True
        self.optimizers = [ManualOptimizer(optimizer, self) for optimizer in state.optimizers]

    def __call__(self, state: State, window: Window, hooks: Hooks) -> bool:
        """Run the window's micro-batches through ``training_step``; say whether any optimizer updated.

        ``progress.step`` counts the window once, however many optimizers stepped.
        """
        strategy, progress = state.strategy, state.progress
        self._hooks, self._divisor, self._took = hooks, len(window.batches), False
        hooks.on_step_start(state, window.batches)
        for index, host in enumerate(window.batches):
            self.is_first, self.is_last = index == 0, index == self._divisor - 1
            strategy.micro_step(sync=self.is_last, precision=state.precision)
            batch = hooks.on_batch(state, strategy.to_device(host))
            state.metrics.weight, state.metrics.muted = window.samples[index], not window.samples[index]
            strategy.run("training_step", batch, window.first + index)
            progress.micro_step += 1
        state.metrics.muted = False
        strategy.active = list(state.optimizers)
        if not self._took:
            progress.skipped_steps += 1
            state.in_update = False
            return False
        progress.step += 1
        progress.samples += window.total
        hooks.on_step(state)
        state.in_update = False
        return True

    def backward(self, loss: Tensor) -> None:
        """Run backward on a loss, divided by the window's micro-batches and scaled as precision needs."""
        assert self._hooks is not None
        self._state.strategy.backward(loss if self._divisor == 1 else loss / self._divisor)
        self._hooks.on_backward(self._state, loss.detach())

    def step(self, optimizer: Optimizer) -> None:
        """Update one optimizer's parameters from their gradients."""
        assert self._hooks is not None
        state = self._state
        state.strategy.active = [optimizer]
        if state.strategy.unscale():
            self._hooks.on_gradients(state)
        state.in_update = True
        took = state.strategy.step(skip=state.control.skipping is not None)
        state.control.skipping = None
        self._took = self._took or took


def _toggled(optimizer: Optimizer, others: list[ManualOptimizer]) -> Any:
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    frozen = [
        p
        for other in others
        for group in other.optimizer.param_groups
        for p in group["params"]
        if id(p) not in own and p.requires_grad
    ]
    return _Toggle(frozen)


class _Toggle:
    """Switch ``requires_grad`` off for some parameters inside a context."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters

    def __enter__(self) -> None:
        for parameter in self._parameters:
            parameter.requires_grad_(False)

    def __exit__(self, *_error: object) -> None:
        for parameter in self._parameters:
            parameter.requires_grad_(True)


class Link:
    """Connect a module to its run: what it logs, its optimizers, and manual backward."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.log = state.metrics.log
        self.driver: ManualDriver | None = None

    def log_text(self, name: str, text: str) -> None:
        """Hand text to the loggers of the main process."""
        self._state.loggers.log_text(name, text, self._state.progress.step)

    def log_image(self, name: str, image: Tensor) -> None:
        """Hand an image to the loggers of the main process."""
        if image.ndim != 3 or not torch.is_floating_point(image):
            raise ModuleError(
                f"log_image({name!r}) got a {image.dtype} tensor of shape {tuple(image.shape)}.",
                fix="Pass one image of shape (C, H, W), floats in [0, 1]; torchvision's make_grid makes one of many.",
            )
        self._state.loggers.log_image(name, image, self._state.progress.step)

    def manual_backward(self, loss: Tensor) -> None:
        """Run backward as automatic optimization would."""
        self._manual().backward(loss)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers as manual optimization drives them."""
        return list(self._manual().optimizers)

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers in the order of ``configure_optimizers``."""
        return [plan.scheduler for plan in self._state.plans]

    @property
    def planned_steps(self) -> int | None:
        """Optimizer updates of the whole run, when its data has a length."""
        return self._state.planned_steps

    def _manual(self) -> ManualDriver:
        if self.driver is None:
            raise ModuleError(
                f"{type(self._state.module).__name__} has automatic_optimization = True.",
                why="The engine steps its optimizers itself; a second step would train it twice.",
                fix="Set automatic_optimization = False in the class, or return the loss and leave the rest.",
            )
        return self.driver
