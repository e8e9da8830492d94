"""Shard parameters, gradients and optimizer state over ranks: FSDP2 (``fully_shard``) through Accelerate."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from camshaft.errors import StrategyError
from camshaft.strategies.nothing import Stand
from camshaft.strategies.sharded import Sharded
from camshaft.strategies.shim import pretend_gpu_kind
from camshaft.strategies.wrapping import find_wrapped, recompute_activations

if TYPE_CHECKING:
    from accelerate import Accelerator

    from camshaft.module import Module
    from camshaft.strategies.dispatch import Dispatch

Dtype = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class FSDP(Sharded):
    """Give every rank a part of each parameter; whole ones exist only while their layer computes.

    Args:
        wrap: what is gathered together: class names of layers, or the least number of parameters of a
            layer. None gathers the whole module at once, which saves optimizer state only.
        mixed_precision: ``{param: bf16, reduce: fp32, output: fp32}``: gather and compute in ``param``,
            reduce gradients in ``reduce``. Without it, parameters are gathered as they are and
            ``precision`` computes under autocast.
        reshard_after_forward: free gathered parameters between forward and backward.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        activation_checkpointing: recompute the activations of every wrapped layer in backward.
        dp_replicate, dp_shard: shard over ``dp_shard`` ranks and replicate that ``dp_replicate`` times (HSDP).
        sync_every_micro_batch: reduce gradients after each micro-batch. Otherwise whole gradients are
            kept until the last one: less communication, and the memory of an unsharded model.
    """

    name = "fsdp"
    evaluates_wrapped: ClassVar[bool] = True
    needs_equal_forwards: ClassVar[bool] = True
    least_processes: ClassVar[int] = 2
    takes_manual: ClassVar[bool] = False

    def __init__(
        self,
        *,
        wrap: Sequence[str] | str | int | None = None,
        mixed_precision: Mapping[str, Dtype] | None = None,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        activation_checkpointing: bool = False,
        dp_replicate: int = 1,
        dp_shard: int | None = None,
        sync_every_micro_batch: bool = True,
        device: str = "auto",
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(device=device, timeout_s=timeout_s)
        self.wrap: list[str] | int | None = (
            [wrap] if isinstance(wrap, str) else wrap if isinstance(wrap, int) else list(wrap or ()) or None
        )
        self.policy = _read_policy(mixed_precision)
        if self.policy is not None and self.policy.param_dtype is not None:
            self.precisions = frozenset({_NAMES[self.policy.param_dtype]})
            self.switches_precision, self.precision_setting = False, "mixed_precision"
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.activation_checkpointing = activation_checkpointing
        self.dp_replicate = dp_replicate
        self.dp_shard = dp_shard
        self.sync_every_micro_batch = sync_every_micro_batch
        self._syncs = True
        self._layers: list[FSDPModule] = []

    # -- a step ----------------------------------------------------------------------------------

    def micro_step(self, *, sync: bool, precision: str) -> None:
        """Announce a micro-batch; see ``sync_every_micro_batch``."""
        super().micro_step(sync=sync, precision=precision)
        sync = sync or self.sync_every_micro_batch
        if sync != self._syncs:
            self._syncs = sync
            self._wrapped.set_requires_gradient_sync(sync)

    def _set_precision(self, precision: str) -> None:
        if self.policy is None or self.policy.param_dtype is None:
            super()._set_precision(precision)
            return
        computes = _NAMES[self.policy.param_dtype]
        if precision != computes:
            raise StrategyError(
                f"strategy fsdp has mixed_precision.param {computes}, and the run's precision is {precision}.",
                why="Only one of them can be what forward computes in.",
                fix=f"Write precision: {computes}, or leave mixed_precision out and let autocast follow precision.",
            )
        super()._set_precision(precision)
        self._autocast = None
        assert self._dispatch is not None
        self._dispatch.autocast = contextlib.nullcontext()

    # -- parameters ------------------------------------------------------------------------------

    def full_parameters(self) -> AbstractContextManager[None]:
        """Make whole parameters readable through the module inside the context; changes are dropped."""
        return self._whole()

    def parameters_changed(self) -> None:
        """Drop gathered copies, which the root keeps after a forward without a backward."""
        for layer in self._layers:
            layer.reshard()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        self.parameters_changed()
        for layer in self._layers:
            layer.unshard()
        try:
            yield
        finally:
            self.parameters_changed()

    # -- set-up ----------------------------------------------------------------------------------

    def _make_accelerator(self) -> Accelerator:
        from accelerate import Accelerator
        from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

        pretend_gpu_kind(self.device)
        shard = self._shard_size()
        # torch's advice to Accelerate, which slices the mesh of replicas and shards.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh", category=UserWarning)
        config = (
            ParallelismConfig(dp_replicate_size=self.dp_replicate, dp_shard_size=shard)
            if self.dp_replicate > 1
            else None
        )
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="no_wrap" if self.wrap is None else "transformer_based_wrap",
            transformer_cls_names_to_wrap=[],  # the module is not built yet
            reshard_after_forward=self.reshard_after_forward,
            cpu_offload=CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.cpu_offload else False,
            mixed_precision_policy=self.policy,
            cpu_ram_efficient_loading=False,
            activation_checkpointing=False,
        )
        return Accelerator(
            mixed_precision="no", fsdp_plugin=plugin, parallelism_config=config, step_scheduler_with_optimizer=False
        )

    def _wrap(self, dispatch: Dispatch, optimizers: list[Optimizer]) -> list[Optimizer]:
        assert self.module is not None
        chosen = find_wrapped(self.module, self.wrap)
        classes = {type(self.module.get_submodule(name)).__name__ for name in chosen}
        self.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(classes)
        if self.activation_checkpointing:
            recompute_activations(self.module, chosen)
        if not self.cpu_offload:
            dispatch.to(self.device)
        # Accelerate shards a module only together with an optimizer, so evaluation gives it one to forget.
        given: list[Optimizer] = optimizers or [torch.optim.SGD(dispatch.parameters(), lr=0.0)]
        self._wrapped, *_ = self.accelerator.prepare(dispatch, *given)
        self._hold()
        self._layers = [m for m in self._wrapped.modules() if isinstance(m, FSDPModule)]
        inner = [layer for layer in self._layers if layer is not self._wrapped]
        self._stand = Stand(inner, keeps_batch=bool(inner))  # type: ignore[arg-type]
        return optimizers

    def _verify(self) -> None:
        whole = [name for name, p in self._named_parameters() if not isinstance(p, DTensor)]
        if not isinstance(self._wrapped, FSDPModule) or whole:
            raise StrategyError(
                f"FSDP left {', '.join(whole[:5]) or 'the module'} whole.",
                why="Accelerate fell back to replicas, silently.",
                fix="Report this with the output of accelerate env.",
            )
        held = {id(p) for _, p in self._named_parameters()}
        strange = [p for o in self.optimizers for g in o.param_groups for p in g["params"] if id(p) not in held]
        if strange:
            raise StrategyError(
                f"{len(strange)} parameter(s) of the optimizer are not the module's after sharding.",
                why="They would never be trained.",
                fix="Give the optimizer parameters of the module only.",
            )

    def _check_module(self, module: Module, optimizers: Sequence[Optimizer]) -> None:
        super()._check_module(module, optimizers)
        if any(p.is_floating_point() for _, p in module.named_parameters()):
            return
        raise StrategyError(f"{type(module).__name__} has no parameters to shard.", fix="Use strategy: single.")

    def _shard_size(self) -> int:
        shard = self.dp_shard if self.dp_shard is not None else self.world_size // max(1, self.dp_replicate)
        if shard * self.dp_replicate != self.world_size:
            raise StrategyError(
                f"dp_replicate {self.dp_replicate} x dp_shard {shard} is not the {self.world_size} processes "
                "that were started.",
                fix="Make their product the number of processes, or leave dp_shard out.",
            )
        return shard

    def _shards(self) -> str:
        copies = f", {self.dp_replicate} copies" if self.dp_replicate > 1 else ""
        held = sum(self.local(p).numel() for _, p in self._named_parameters())
        whole = sum(p.numel() for _, p in self._named_parameters())
        units = f"{len(self._layers)} gathered units"
        return f"{self._shard_size()} shards{copies} ({held} of {whole} parameters here, {units})"

    def dtypes(self) -> dict[str, str]:
        """Return the dtypes of parameters, of gradients as they are reduced, and of the optimizer."""
        found = super().dtypes()
        dtype = self.policy.reduce_dtype or self.policy.param_dtype if self.policy is not None else None
        return found if dtype is None else found | {"gradients": str(dtype).removeprefix("torch.")}

    def _reachable(self) -> Iterator[Tensor]:
        """Yield the root's own parameters, which are gathered while it runs."""
        return (p for p in self._wrapped.parameters() if p.requires_grad and not isinstance(p, DTensor))


def _read_policy(given: Mapping[str, Dtype] | None) -> MixedPrecisionPolicy | None:
    if given is None:
        return None
    unknown = set(given) - {"param", "reduce", "output"} | {v for v in given.values() if v not in _DTYPES}
    if unknown:
        raise StrategyError(
            f"mixed_precision has {min(unknown)!r}.",
            fix="It maps param, reduce and output to fp32, bf16 or fp16.",
        )
    chosen = {name: _DTYPES[value] for name, value in given.items()}
    return MixedPrecisionPolicy(
        param_dtype=chosen.get("param"), reduce_dtype=chosen.get("reduce"), output_dtype=chosen.get("output")
    )
