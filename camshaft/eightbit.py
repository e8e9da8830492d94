"""Keep the state of AdamW in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bitsandbytes.optim import AdamW8bit as _AdamW8bit


class AdamW8bit(_AdamW8bit):  # type: ignore[misc]
    """Update as AdamW does, with both moments in 8 bits and a scale for every 256 values: a quarter of their memory.

    Tensors of fewer than ``min_8bit_size`` elements keep float32 moments. Needs ``bitsandbytes``, and
    parameters that are whole on every rank. Source: Dettmers et al. (2022), 8-bit optimizers.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        min_8bit_size: int = 4096,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, min_8bit_size=min_8bit_size
        )
