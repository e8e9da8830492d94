"""Find every parameter's part of ZeRO's flat partitions, and reach its gradients and master weights there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fragment:
    """Locate one rank's part of a parameter: ``numel`` elements of ``flat`` from ``offset``.

    They are the elements of the flattened parameter from ``start``. ``flat`` is the float32 master
    partition for what the optimizer trains, else the parameter's own memory.
    """

    shape: tuple[int, ...]
    start: int
    numel: int
    flat: Tensor
    offset: int

    @property
    def values(self) -> Tensor:
        """The elements, sharing memory."""
        return self.within(self.flat)

    def within(self, flat: Tensor) -> Tensor:
        """Return the elements that belong to this fragment of a tensor laid out like ``flat``."""
        return flat.detach().narrow(0, self.offset, self.numel)


class Stage12:
    """ZeRO 1 and 2: each rank owns a range of every parameter group's flat tensor."""

    def __init__(self, engine: Any) -> None:
        self.optimizer = engine.optimizer
        # The norm is taken, and gradients are scaled, in ``clip_grad_norm``: once, not again in step().
        self.optimizer.compute_grad_norm = False

    def fragments(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Fragment]]:
        """Yield the fragment of every trained parameter that this rank owns some of, in its groups' order."""
        names = {id(p): name for name, p in parameters.items()}
        for flat, group in zip(
            self.optimizer.single_partition_of_fp32_groups, self.optimizer.bit16_groups, strict=True
        ):
            for parameter in group:
                mapping = parameter._hp_mapping
                shape = tuple(parameter.shape)
                if mapping is None:
                    yield names[id(parameter)], Fragment(shape, 0, 0, flat, 0)
                    continue
                inside, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield names[id(parameter)], Fragment(shape, whole.start, whole.numel, flat, inside.start)

    def gradients(self) -> list[Tensor]:
        """Return the reduced gradients of this rank's partitions; no element is on two ranks."""
        if self.optimizer.cpu_offload:
            return [flat.grad for flat in self.optimizer.single_partition_of_fp32_groups]
        averaged = self.optimizer.averaged_gradients
        return [
            g
            for group in averaged.values()
            if group is not None
            for g in ([group] if isinstance(group, Tensor) else group)
        ]

    def publish(self) -> None:
        """Give every rank the parameters that belong to the master weights."""
        self.optimizer.update_lp_params()

    def discard(self) -> None:
        """Forget the gradients of an update that is not taken."""
        optimizer = self.optimizer
        optimizer.micro_step_id = -1
        optimizer.zero_grad(set_to_none=True)
        optimizer._release_preflattened_grad_buffers()
        if optimizer.cpu_offload:
            optimizer._offload_accumulated_param_ids = set()
            optimizer.reset_cpu_buffers()
            return
        for index in optimizer.averaged_gradients:
            optimizer.averaged_gradients[index] = None
            optimizer.all_grad_tensors[index] = None


class Stage3:
    """ZeRO 3: each rank owns an equal range of every flattened parameter, padded at the end."""

    def __init__(self, engine: Any) -> None:
        self.optimizer = engine.optimizer
        # As for the other stages; here step() asks for the norm in any case.
        self.optimizer._get_norm_groups = lambda: [torch.zeros((), device=engine.device)]

    def fragments(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Fragment]]:
        """Yield the fragment of every trained parameter."""
        optimizer = self.optimizer
        names = {id(p): name for name, p in parameters.items()}
        for group in optimizer.fp16_groups:
            for parameter in group:
                index, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                start, numel = partition_range(parameter, optimizer._get_param_partition_rank(parameter))
                flat = optimizer.fp32_partitioned_groups_flat[index]
                yield names[id(parameter)], Fragment(tuple(parameter.ds_shape), start, numel, flat, offset)

    def gradients(self) -> list[Tensor]:
        """Return the reduced gradients of this rank's partitions; no element is on two ranks."""
        if self.optimizer.offload_optimizer:
            return [flat.grad for flat in self.optimizer.fp32_partitioned_groups_flat]
        return [gradient for group in self.optimizer.averaged_gradients.values() for gradient in group or ()]

    def publish(self) -> None:
        """Make the next forward gather what the master weights hold now."""
        optimizer = self.optimizer
        optimizer.empty_partition_cache()
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def discard(self) -> None:
        """Forget the gradients of an update that is not taken."""
        optimizer = self.optimizer
        optimizer._pre_step()
        optimizer._partition_all_parameters()
        optimizer._overflow_clean_up(1.0)


def untrained(parameter: Any, rank: int) -> Fragment:
    """Return this rank's fragment of a ZeRO-3 parameter that no optimizer has: in the parameter's own partition."""
    start, numel = partition_range(parameter, rank)
    return Fragment(tuple(parameter.ds_shape), start, numel, parameter.ds_tensor.data, 0)


def partition_range(parameter: Any, rank: int) -> tuple[int, int]:
    """Return the start and the count of the real elements in this rank's partition of a ZeRO-3 parameter."""
    size = parameter.ds_tensor.ds_numel
    start = min(size * rank, parameter.ds_numel)
    return start, min(size, parameter.ds_numel - start)
