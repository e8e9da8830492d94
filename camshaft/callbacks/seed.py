"""Seed every random stream, so that a run can be repeated."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from camshaft.callback import Callback
from camshaft.errors import RecipeError
from camshaft.sampler import derive_seed
from camshaft.streams import seed_streams

if TYPE_CHECKING:
    from camshaft.state import Checkpoint, State
    from camshaft.strategies.base import Strategy


class Seed(Callback):
    """Seed python, numpy and torch before the module is built, alike on all ranks, then apart.

    Weights are built alike everywhere. From the start of training, ranks beyond the first draw from
    streams of their own, derived from (seed, rank), so that dropout differs; rank 0 goes on with the
    stream that a hand-written script would have. Samplers and loader workers have their own seeds.
    ``deterministic`` also asks torch for deterministic algorithms, and raises where there is none.
    """

    def __init__(self, seed: int = 0, *, deterministic: bool = False) -> None:
        if not 0 <= seed < 1 << 63:
            raise RecipeError(
                f"Seed.seed is {seed}.",
                why="Random streams of torch take no such seed.",
                fix="Use a whole number from 0 to 9223372036854775807.",
            )
        self.seed = seed
        self.deterministic = deterministic
        self._resumed = False
        self._was_deterministic = False

    def on_launch(self, strategy: Strategy) -> None:
        """Seed all streams alike."""
        del strategy
        seed_streams(self.seed)
        if self.deterministic:
            # cuBLAS reads this when its first handle is made.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            self._was_deterministic = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(True)

    def on_restore(self, state: State, checkpoint: Checkpoint) -> None:
        """Leave the streams to the checkpoint."""
        del state, checkpoint
        self._resumed = True

    def on_fit_start(self, state: State) -> None:
        """Give each further rank its own streams."""
        rank = state.strategy.data_rank
        if rank > 0 and not self._resumed:
            seed_streams(derive_seed(self.seed, "rank", rank))

    def on_fit_end(self, state: State) -> None:
        """Give torch its own choice of algorithms back."""
        del state
        if self.deterministic:
            torch.use_deterministic_algorithms(self._was_deterministic)
