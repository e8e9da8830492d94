"""Declare the events of a run and the ``Callback`` that listens to them."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from camshaft.errors import CallbackError
from camshaft.schedule import Schedule

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from camshaft.module import Module
    from camshaft.state import Batch, Checkpoint, State
    from camshaft.strategies.base import Strategy

Hook = TypeVar("Hook", bound=Callable[..., Any])


class Callback:
    """Listen to events by overriding ``on_*`` methods; an event that is not overridden costs nothing.

    Callbacks run in the order of the recipe; events that end in ``_end``, and ``on_exception``, run
    in reverse, so that pairs nest. Every rank runs every hook unless it is ``@main_process_only``.

    Attributes:
        name: the key of the callback in its recipe, and of its state in checkpoints.
        schedule: when the events of a step (``on_step_start`` to ``on_step``) reach this callback;
            None is every step. Other events always do.
        on_error: ``"raise"`` ends the run with the callback's exception; ``"disable"`` warns once
            and drops the callback on that rank for the rest of the run.
        train_step: makes the updates in place of the engine's own ``camshaft.step.train_step``, with its arguments.
        needs_host_sync: True declares that a hook of a step reads a device value on the host.
    """

    name: str = ""
    schedule: Schedule | None = None
    on_error: Literal["raise", "disable"] = "raise"
    needs_host_sync: bool = False
    train_step: Callable[..., bool] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for attribute, value in vars(cls).items():
            if attribute.startswith("on_") and callable(value):
                _check_hook(cls, attribute, value)

    def on_launch(self, strategy: Strategy) -> None:
        """Fire once on every rank: the processes are up, the device is chosen, nothing is built."""

    def on_module(self, module: Module) -> None:
        """Fire once on every rank: the module is built, not wrapped, and has no optimizer yet.

        Freeze, add adapters, convert or compile here, in place.
        """

    def on_restore(self, state: State, checkpoint: Checkpoint) -> None:
        """Fire once on every rank when resumed: weights, counters, callback state, position and RNG are back."""

    def on_fit_start(self, state: State) -> None:
        """Fire once on every rank: everything is prepared and restored; ``state.stage`` says for what."""

    def on_epoch_start(self, state: State) -> None:
        """Fire on every rank before an epoch's first step; not repeated when a run resumes inside the epoch."""

    def on_step_start(self, state: State, window: list[Batch]) -> None:
        """Fire on every rank before a step with its micro-batches in hand, on the host.

        Knobs set here (``state.precision``, the groups of an optimizer) apply to this step.
        """

    def on_batch(self, state: State, batch: Batch) -> Batch | None:
        """Fire on every rank per micro-batch: it is on the device, before forward. May return a replacement."""

    def on_backward(self, state: State, loss: Tensor) -> None:
        """Fire on every rank after the backward of a micro-batch; ``loss`` is detached and undivided.

        Gradients are partial, and scaled under fp16, until the last micro-batch of the step.
        """

    def on_gradients(self, state: State) -> None:
        """Fire on every rank once a step: gradients are reduced and unscaled, ``.grad`` is still set.

        Clip or inspect them, or call ``state.control.skip_step``.
        """

    def on_step(self, state: State) -> None:
        """Fire on every rank after an update; ``state.progress.step`` counts it. Not fired for a skipped step."""

    def on_validation_start(self, state: State) -> None:
        """Fire on every rank: eval mode, no gradients. Also for testing and prediction (``state.stage``)."""

    def on_validation_batch(self, state: State, output: Any) -> None:
        """Fire on every rank after each batch with what the module's step returned."""

    def on_validation_end(self, state: State, metrics: dict[str, float] | None) -> None:
        """Fire on every rank with the reduced metrics, the same everywhere; None when the run was abandoned."""

    def on_checkpoint(self, state: State, checkpoint: Checkpoint) -> None:
        """Fire on every rank before a save is committed; add entries to ``checkpoint``."""

    def on_checkpoint_saved(self, state: State, path: Path) -> None:
        """Fire on every rank once a checkpoint is committed and durable."""

    def on_epoch_end(self, state: State) -> None:
        """Fire on every rank after an epoch's last step, its validation and the reduction of its means."""

    def on_exception(self, state: State, error: BaseException) -> None:
        """Fire on the failing rank before ``error`` is raised again. Peers may be gone: no collectives."""

    def on_fit_end(self, state: State) -> None:
        """Fire once, always, after an exception too (then without collectives)."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain JSON data. Tensors are added in ``on_checkpoint``."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned; called on every rank before ``on_restore``."""


EVENTS: tuple[str, ...] = tuple(name for name in vars(Callback) if name.startswith("on_") and name != "on_error")
STEP_EVENTS = frozenset({"on_step_start", "on_batch", "on_backward", "on_gradients", "on_step"})


class _MainOnly:
    """Count how deep the process is inside hooks that only the main process runs."""

    depth = 0


def main_process_only(hook: Hook) -> Hook:
    """Run a hook on the main process alone.

    Other ranks drop it from their tables. A collective called inside it would wait for ranks that
    never come, so the strategy raises ``StrategyError`` there instead.
    """

    @functools.wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _MainOnly.depth += 1
        try:
            return hook(*args, **kwargs)
        finally:
            _MainOnly.depth -= 1

    guarded.main_process_only = True  # type: ignore[attr-defined]
    return guarded  # type: ignore[return-value]


def is_main_only(hook: Callable[..., Any]) -> bool:
    """Say whether a hook was marked with ``main_process_only``."""
    return getattr(hook, "main_process_only", False)


def inside_main_only() -> bool:
    """Say whether a hook that only the main process runs is on the stack."""
    return _MainOnly.depth > 0


def _check_hook(cls: type, name: str, hook: Callable[..., Any]) -> None:
    """Refuse, at class definition, a hook that would never be called or could not be."""
    if name not in EVENTS:
        nearest = difflib.get_close_matches(name, EVENTS, n=1, cutoff=0.0)
        raise CallbackError(
            f"{cls.__qualname__}.{name} is not an event.",
            why="It would never be called.",
            fix=f"Did you mean {nearest[0]!r}? The events are {', '.join(EVENTS)}.",
        )
    if inspect.iscoroutinefunction(hook) or inspect.isgeneratorfunction(hook):
        raise CallbackError(
            f"{cls.__qualname__}.{name} is a coroutine or a generator.",
            why="Calling it would run nothing of it.",
            fix=f"Write a plain 'def {name}'.",
        )
    expected, given = inspect.signature(getattr(Callback, name)), inspect.signature(hook)
    try:
        given.bind(*expected.parameters)
    except TypeError:
        raise CallbackError(
            f"{cls.__qualname__}.{name}{given} does not take the arguments of its event.",
            why="The first time it fired it would fail.",
            fix=f"Write 'def {name}({', '.join(expected.parameters)})'.",
        ) from None
