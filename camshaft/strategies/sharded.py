"""Share what strategies with DTensor parameters have in common: FSDP and tensor parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from camshaft.strategies.accelerated import Accelerated
from camshaft.strategies.dtensor import fill, layout_of, limit_norm, local_of, part_of, total_norm

if TYPE_CHECKING:
    from camshaft.module import Module


class Sharded(Accelerated):
    """Work on the local parts of parameters and gradients, whatever their layouts."""

    replicates: ClassVar[bool] = False
    reduces_apart = False

    def __init__(self, *, device: str = "auto", timeout_s: float = 1800.0) -> None:
        super().__init__(device=device, timeout_s=timeout_s)
        self._held: dict[str, Tensor] = {}

    def prepare(self, module: Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Shard the module in place and return the optimizers to step."""
        self._held = {}
        return super().prepare(module, optimizers)

    def clip_grad_norm(self, max_norm: float, parameters: Sequence[Tensor] | None = None) -> Tensor:
        """Scale the gradients so that their L2 norm over all ranks' parts is at most ``max_norm``."""
        chosen = self.parameters() if parameters is None else parameters
        gradients = [p.grad for p in chosen if p.grad is not None]
        norm = total_norm(gradients, self.device)
        limit_norm(gradients, norm, max_norm)
        return norm

    def clip_grad_value(self, limit: float) -> None:
        """Clamp every gradient entry to [-limit, limit]."""
        gradients = self._local_gradients()
        torch._foreach_clamp_min_(gradients, -limit)
        torch._foreach_clamp_max_(gradients, limit)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of ``active``."""
        torch._foreach_mul_(self._local_gradients(), factor)

    def local(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter or of a tensor laid out like it, sharing its memory."""
        return local_of(parameter)

    def shard(self, name: str, tensor: Tensor) -> Any:
        """Return this rank's part of a tensor as a ``checkpoint.Shard``; of copies, one rank's."""
        layout = layout_of(tensor, self._held.get(name))
        if layout is not None:
            return part_of(tensor, layout)
        return super().shard(name, tensor)

    def load(self, name: str, tensor: Tensor, reader: Any, key: str) -> None:
        """Fill this rank's part of ``tensor`` from a checkpoint."""
        layout = layout_of(tensor, self._held.get(name))
        if layout is not None:
            fill(tensor, layout, reader, key)
        else:
            super().load(name, tensor, reader, key)

    @contextlib.contextmanager
    def _replaced_by_whole(self) -> Iterator[None]:
        """Put whole copies of all sharded parameters into the module inside the context."""
        assert self.module is not None
        owners: list[tuple[nn.Module, str, Any]] = [
            (m, n, p) for m in self.module.modules() for n, p in m._parameters.items() if isinstance(p, DTensor)
        ]
        with torch.no_grad():
            whole = {id(p): nn.Parameter(p.full_tensor(), p.requires_grad) for _, _, p in owners}
        for owner, name, parameter in owners:
            owner._parameters[name] = whole[id(parameter)]
        try:
            yield
        finally:
            for owner, name, parameter in owners:
                owner._parameters[name] = parameter

    def _local_gradients(self) -> list[Tensor]:
        return [local_of(p.grad) for p in self.parameters() if p.grad is not None]

    def _hold(self) -> None:
        """Keep the sharded parameters: while a layer computes, whole ones stand in their place."""
        self._held = dict(super()._named_parameters())

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._held.items() if self._held else super()._named_parameters()
