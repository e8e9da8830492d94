"""Cut micro-batches smaller when memory runs out, with the same batch and the same result."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from camshaft import terminal
from camshaft.callback import Callback
from camshaft.cutting import Rewind, cut_window, is_out_of_memory
from camshaft.errors import CallbackError, RecipeError, StrategyError
from camshaft.step import Weighting

if TYPE_CHECKING:
    from camshaft.data import Window
    from camshaft.hooks import Hooks
    from camshaft.module import Module
    from camshaft.state import State
    from camshaft.strategies.base import Strategy


class MicroBatch(Callback):
    """Run each window in micro-batches of at most ``size`` samples a rank; halve that when memory runs out.

    A window that ran out of memory is taken back - gradients, random streams, buffers, what was logged - and
    run again in smaller micro-batches, after all ranks agreed. Batch, weights of the samples and update are
    those of the window that was asked for, and the run goes on with the size that was found, also when it is
    resumed. Without ``size`` it begins with the micro-batches that ``accumulate`` makes. Below ``minimum`` the
    error of the device ends the run.

    It costs one agreement of the ranks a step, and gradients are reduced after backward, not meanwhile. Batch
    norms see smaller batches. Callbacks hear ``on_step_start`` again for a window that is run again.
    """

    def __init__(self, size: int | None = None, *, minimum: int = 1) -> None:
        if minimum < 1 or (size is not None and size < minimum):
            raise RecipeError(
                f"MicroBatch has size {size} and minimum {minimum}.",
                fix="Use a minimum of 1 or more, and a size that is not below it.",
            )
        self.size = size
        self.minimum = minimum

    def on_launch(self, strategy: Strategy) -> None:
        """Refuse a strategy whose forward or backward takes all ranks."""
        if not strategy.reduces_apart:
            raise StrategyError(
                f"callbacks.{self.name} cannot run under {strategy.name}.",
                why="Its ranks exchange parameters or gradients inside a micro-batch: one that ran out of memory "
                "there would leave the others waiting.",
                fix="Use strategy: single or ddp (without static_graph), or set accumulate by hand.",
            )

    def on_module(self, module: Module) -> None:
        """Refuse a module that updates by hand."""
        if not module.automatic_optimization:
            raise RecipeError(
                f"callbacks.{self.name} cannot cut the steps of {type(module).__name__}, which optimizes by hand.",
                why="Nobody but the module knows what belongs to one of its updates.",
                fix="Remove the callback, or use automatic optimization.",
            )

    def on_fit_start(self, state: State) -> None:
        """Let no forward wait for another rank from here on, as the first one may for buffers."""
        if state.stage == "fit":
            state.strategy.reduce_gradients()

    def train_step(self, state: State, window: Window, hooks: Hooks) -> bool:
        """Make one update, in as many micro-batches as it takes; say whether it was taken. Every rank calls this."""
        while True:
            before = Rewind(state)
            part = cut_window(window, self.size)
            weighting, failure = self._accumulate(state, part, hooks)
            if not state.strategy.any(failure is not None):
                state.strategy.reduce_gradients()
                return _update(state, part, weighting, hooks)
            before.undo()
            self._shrink(state, part, failure)
            # The exception holds the frames that hold the tensors.
            failure = None
            state.strategy.zero_grad()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def state_dict(self) -> dict[str, Any]:
        """Return the size that was found."""
        return {"size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the size back."""
        self.size = state["size"]

    def _accumulate(self, state: State, window: Window, hooks: Hooks) -> tuple[Weighting, BaseException | None]:
        """Run the micro-batches without any collective; return what went wrong if it was memory."""
        strategy, metrics = state.strategy, state.metrics
        hooks.on_step_start(state, window.batches)
        strategy.zero_grad()
        weighting = Weighting(state, window)
        try:
            for index, host in enumerate(window.batches):
                strategy.micro_step(sync=False, precision=state.precision)
                batch = hooks.on_batch(state, strategy.to_device(host))
                metrics.weight, metrics.muted = weighting.weights[index], not window.samples[index]
                loss, share = weighting.weigh(index, strategy.run("training_step", batch, window.first + index))
                strategy.backward(share)
                state.progress.micro_step += 1
                hooks.on_backward(state, loss)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return weighting, error
        finally:
            metrics.muted = False
        return weighting, None

    def _shrink(self, state: State, window: Window, failure: BaseException | None) -> None:
        """Agree on smaller micro-batches, or give up."""
        found = state.strategy.gather_objects((failure is not None, max(window.samples)))
        ranks = [rank for rank, (failed, _) in enumerate(found) if failed]
        tried = max(size for _, size in found)
        smaller = -(-tried // 2)
        if tried == smaller or smaller < self.minimum:
            fix = "Use activation_checkpointing, a lower precision, lora or a strategy that shards the module."
            if failure is not None:
                failure.add_note(f"camshaft: there is no memory even for micro-batches of {tried}. {fix}")
                raise failure
            raise CallbackError(f"rank {ranks[0]} has no memory even for micro-batches of {tried}.", fix=fix)
        self.size = smaller
        if state.strategy.is_main:
            norms = any(getattr(m, "track_running_stats", False) for m in state.module.modules())
            terminal.say(
                f"{self.name}: no memory for micro-batches of {tried} on rank {', '.join(map(str, ranks))}; "
                f"from step {state.progress.step + 1} on they have at most {smaller}, in the same batch"
                + ("; batch norms see smaller batches" if norms else "")
            )


def _update(state: State, window: Window, weighting: Weighting, hooks: Hooks) -> bool:
    """Update with the gradients of a window, as the engine's own step does."""
    strategy, progress = state.strategy, state.progress
    if weighting.is_late:
        weighting.divide_gradients()
    if strategy.unscale():
        hooks.on_gradients(state)
    state.in_update = True
    took = strategy.step(skip=weighting.is_empty or state.control.skipping is not None)
    state.control.skipping = None
    if took:
        progress.step += 1
        progress.samples += window.total
        progress.tokens += weighting.tokens
        for plan in state.step_plans:
            plan.advance(progress.step)
        hooks.on_step(state)
    else:
        progress.skipped_steps += 1
    state.in_update = False
    return took
