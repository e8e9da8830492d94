"""Log how fast training goes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from camshaft.callback import Callback

if TYPE_CHECKING:
    from pathlib import Path

    from camshaft.state import Batch, Checkpoint, State


class Throughput(Callback):
    """Log rates over the steps since the last log step, of all ranks together, without waiting for the device.

    ``speed/steps_per_s``, ``speed/samples_per_s`` and, where the module weighs its batches,
    ``speed/tokens_per_s``. Time in validation and in saving is left out. On CUDA also
    ``speed/memory_bytes``, the most that was allocated on any rank so far.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._paused_at: float | None = None
        self._paused = 0.0
        self._step = 0
        self._samples = 0
        self._tokens = 0.0

    def on_fit_start(self, state: State) -> None:
        """Start the clock."""
        self._restart(state)

    def on_step_start(self, state: State, window: list[Batch]) -> None:
        """End the pause of a save that goes on in the background."""
        del state, window
        self._go_on()

    def on_step(self, state: State) -> None:
        """Log the rates at log steps."""
        progress = state.progress
        if progress.step % state.limits.log_every:
            return
        elapsed = time.perf_counter() - self._since - self._paused
        if elapsed > 0:
            rates = {
                "speed/steps_per_s": progress.step - self._step,
                "speed/samples_per_s": progress.samples - self._samples,
                "speed/tokens_per_s": progress.tokens - self._tokens,
            }
            for name, count in rates.items():
                if count:
                    state.metrics.log(name, count / elapsed, batch_size=1)
        if state.strategy.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(state.strategy.device)
            state.metrics.log("speed/memory_bytes", peak, reduce="max")
        self._restart(state)

    def on_validation_start(self, state: State) -> None:
        """Stop the clock."""
        del state
        self._pause()

    def on_validation_end(self, state: State, metrics: dict[str, float] | None) -> None:
        """Let the clock go on."""
        del state, metrics
        self._go_on()

    def on_checkpoint(self, state: State, checkpoint: Checkpoint) -> None:
        """Stop the clock."""
        del state, checkpoint
        self._pause()

    def on_checkpoint_saved(self, state: State, path: Path) -> None:
        """Let the clock go on."""
        del state, path
        self._go_on()

    def _pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = time.perf_counter()

    def _go_on(self) -> None:
        if self._paused_at is not None:
            self._paused += time.perf_counter() - self._paused_at
            self._paused_at = None

    def _restart(self, state: State) -> None:
        progress = state.progress
        self._since, self._paused = time.perf_counter(), 0.0
        self._step, self._samples, self._tokens = progress.step, progress.samples, progress.tokens
