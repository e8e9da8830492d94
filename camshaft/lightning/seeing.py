"""Show the engine's strategy as modules and callbacks expect one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from camshaft.lightning.facade import Facade


class StrategyView:
    """What ``trainer.strategy`` gives: the device, and collectives under Lightning's names."""

    is_surface = True

    def __init__(self, trainer: Facade) -> None:
        self._trainer = trainer

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        device: torch.device = self._trainer.engine.device
        return device

    @property
    def lightning_module(self) -> Any:
        """The module."""
        return self._trainer.lightning_module

    model = lightning_module

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes."""
        return self._trainer.is_global_zero

    @property
    def global_rank(self) -> int:
        """Number of this process."""
        return self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine."""
        return self._trainer.local_rank

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self._trainer.world_size

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank."""
        self._trainer.engine.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the main process's object on every rank."""
        return self._trainer.engine.broadcast_object(obj)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        """Reduce a tensor over all ranks: mean, sum, min or max."""
        if not isinstance(tensor, Tensor):
            return tensor
        return self._trainer.engine.reduce(tensor, "mean" if reduce_op in (None, "avg") else reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - Lightning's name
        """Say whether all ranks, or any, decided so."""
        engine = self._trainer.engine
        return not engine.any(not decision) if all else bool(engine.any(decision))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks, stacked."""
        from camshaft.lightning.gathering import all_gather

        return all_gather(tensor, self._trainer.engine, sync_grads=sync_grads)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device."""
        return self._trainer.engine.to_device(batch)
