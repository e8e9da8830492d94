"""Partition optimizer state, gradients and parameters: DeepSpeed ZeRO through Accelerate."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from camshaft.checkpoint.entries import Shard
from camshaft.errors import StrategyError
from camshaft.strategies.accelerated import Accelerated
from camshaft.strategies.dsconfig import complete, read_config
from camshaft.strategies.dtensor import limit_norm
from camshaft.strategies.nothing import Stand
from camshaft.strategies.zero import Fragment, Stage3, Stage12, untrained
from camshaft.strategies.zerostate import ZeroState

if TYPE_CHECKING:
    from accelerate import Accelerator

    from camshaft.module import Module
    from camshaft.strategies.dispatch import Dispatch


class DeepSpeed(Accelerated):
    """Train with ZeRO: stage 1 partitions optimizer state, 2 gradients too, 3 parameters too; 0 nothing.

    ``offload_optimizer`` and ``offload_param`` (stage 3) move partitions to "cpu" or "nvme". ``config`` is
    a DeepSpeed JSON file or mapping; its ``auto`` values are filled in, and what contradicts the recipe
    is an error. Clipping, accumulation, schedulers and autocast are the engine's, as everywhere.
    """

    name = "deepspeed"
    takes_manual: ClassVar[bool] = False
    replicates: ClassVar[bool] = False
    reduces_apart = False
    trains_late: ClassVar[bool] = False

    def __init__(
        self,
        stage: Literal[0, 1, 2, 3] | None = None,
        *,
        offload_optimizer: Literal["cpu", "nvme"] | None = None,
        offload_param: Literal["cpu", "nvme"] | None = None,
        nvme_path: str | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        device: str = "auto",
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(device=device, timeout_s=timeout_s)
        own = {
            "stage": stage,
            "offload_optimizer": offload_optimizer,
            "offload_param": offload_param,
            "nvme_path": nvme_path,
        }
        self.config = read_config(config, own)
        self.stage = int(self.config["zero_optimization"]["stage"])
        self.evaluates_wrapped = self.needs_equal_forwards = self.stage == 3  # type: ignore[misc]
        # Its float32 master weights are what it updates: storing the parameters in bfloat16 is its own bf16 section.
        self.precisions = self.precisions - {"bf16-true"}
        if (self.config.get("bf16") or {}).get("enabled") is True:
            self.precisions, self.switches_precision = frozenset({"bf16"}), False
            self.precision_setting = "bf16.enabled in the DeepSpeed config"
        self._filled: dict[str, Any] = {}
        self._partitions: Stage12 | Stage3 | None = None
        self._state: ZeroState | None = None
        self._fragments: dict[str, Fragment] = {}
        self._by_id: dict[int, Fragment] = {}

    # -- set-up ----------------------------------------------------------------------------------

    def launch(self) -> None:
        """Join the other processes.

        Raises:
            StrategyError: DeepSpeed cannot be imported.
        """
        _quieten()
        _require_deepspeed()
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints which operators it compiled
            super().launch()

    def teardown(self) -> None:
        """Leave the other processes, and the groups that DeepSpeed made among them."""
        joined = self._group is not None
        self._partitions = self._state = None
        self._fragments, self._by_id = {}, {}
        super().teardown()
        if joined:
            _forget_groups()

    def _make_accelerator(self) -> Accelerator:
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        config, self._filled = complete(self.config, world_size=self.world_size, recipe=self.recipe)
        backend = "gloo" if self.device.type == "cpu" else "nccl"
        return Accelerator(
            mixed_precision="no", step_scheduler_with_optimizer=False,
            deepspeed_plugin=_make_plugin(config),
            kwargs_handlers=[InitProcessGroupKwargs(backend=backend)],
        )  # fmt: skip

    def _wrap(self, dispatch: Dispatch, optimizers: list[Optimizer]) -> list[Optimizer]:
        dispatch.to(self.device)
        if not optimizers and self.stage < 3:
            self._wrapped = dispatch
            return optimizers
        if self.stage and optimizers:
            self._state = ZeroState(optimizers[0], self.parameter_names())
        self._wrapped, *_ = (
            result if isinstance(result := self.accelerator.prepare(dispatch, *optimizers), tuple) else (result,)
        )
        self._adopt(optimizers)
        return optimizers

    def _adopt(self, optimizers: list[Optimizer]) -> None:
        """Learn where ZeRO put every parameter."""
        parameters = dict(self._named_parameters())
        if self.stage and optimizers:
            assert self._state is not None
            assert self._dispatch is not None
            self._partitions = Stage3(self._wrapped) if self.stage == 3 else Stage12(self._wrapped)
            self._fragments = dict(self._partitions.fragments(parameters))
            base = self._wrapped.optimizer.optimizer
            self._state.attach(base, self._fragments)
            if base is not optimizers[0]:
                # DeepSpeed's own CPU Adam took its place: schedulers still hold ours.
                optimizers[0].param_groups = base.param_groups
            inner = [m for m in self._dispatch.modules() if m is not self._dispatch] if self.stage == 3 else []
            self._stand = Stand([m for m in inner if any(True for _ in m.parameters(recurse=False))], inner)
        if self.stage == 3:
            rank = dist.get_rank()
            rest = {name: untrained(p, rank) for name, p in parameters.items() if name not in self._fragments}
            self._fragments |= rest
        self._by_id = {id(p): self._fragments[name] for name, p in parameters.items() if name in self._fragments}

    def _verify(self) -> None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        if not self.optimizers and self.stage < 3:
            return
        found = self._wrapped.zero_optimization_stage() if isinstance(self._wrapped, DeepSpeedEngine) else None
        if found != self.stage:
            made = f"stage {found}" if found is not None else "no DeepSpeed engine"
            raise StrategyError(
                f"ZeRO stage {self.stage} was asked for, and Accelerate made {made}.",
                why="It fell back, silently.",
                fix="Report this with the output of accelerate env.",
            )

    def _check_module(self, module: Module, optimizers: Sequence[Optimizer]) -> None:
        super()._check_module(module, optimizers)
        if len(optimizers) > 1:
            raise StrategyError(
                f"configure_optimizers returned {len(optimizers)} optimizers, and DeepSpeed manages one.",
                why="Parameters of the others would drift apart, silently.",
                fix="Use one optimizer with several parameter groups, or strategy: ddp or fsdp.",
            )

    # -- a step ----------------------------------------------------------------------------------

    def micro_step(self, *, sync: bool, precision: str) -> None:
        """Announce a micro-batch. Stages 2 and 3 reduce the gradients of each one."""
        super().micro_step(sync=sync, precision=precision)
        if self.optimizers:
            self._wrapped.set_gradient_accumulation_boundary(sync)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar, in the partitions that ZeRO keeps."""
        self._wrapped.backward(loss if self.scaler is None else loss * self.scaler.scale)
        self._done += 1

    def unscale(self) -> bool:
        """Undo the loss scaling on this rank's partitions; say whether they are finite on all ranks."""
        if self.scaler is None or self._partitions is None:
            return super().unscale()
        self._finite = self.scaler.unscale_gradients(self._partitions.gradients())
        return self._finite

    def clip_grad_norm(self, max_norm: float, parameters: Sequence[Tensor] | None = None) -> Tensor:
        """Scale the gradients so that their L2 norm over all partitions is at most ``max_norm``."""
        if self._partitions is None:
            return super().clip_grad_norm(max_norm, list(self._trainable()) if parameters is None else parameters)
        if parameters is not None and len(list(parameters)) != len(list(self._trainable())):
            raise StrategyError(
                "ZeRO keeps the gradients of all parameters in flat partitions; some of them cannot be clipped alone.",
                fix="Clip all parameters together, or use strategy: ddp or fsdp.",
            )
        gradients = self._partitions.gradients()
        square = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).square().sum().to(self.device)
        dist.all_reduce(square)
        norm = square.sqrt()
        limit_norm(gradients, norm, max_norm)
        return norm

    def clip_grad_value(self, limit: float) -> None:
        """Clamp every gradient entry to [-limit, limit]."""
        gradients = self._gradients()
        torch._foreach_clamp_min_(gradients, -limit)
        torch._foreach_clamp_max_(gradients, limit)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients."""
        torch._foreach_mul_(self._gradients(), factor)

    def step(self, *, skip: bool = False) -> bool:
        """Update the parameters unless ``skip`` or an overflow forbids it; say whether it did."""
        if self.scaler is not None:
            self.scaler.update(finite=self._finite)
        if skip or not self._finite:
            self._finite = True
            if self._partitions is not None:
                self._partitions.discard()
            return False
        self._wrapped.step()
        return not getattr(self._wrapped.optimizer, "overflow", False)

    def zero_grad(self) -> None:
        """Forget gradients; ZeRO does so itself when it steps or discards."""
        if self._partitions is None:
            super().zero_grad()

    # -- parameters ------------------------------------------------------------------------------

    def full_parameters(self) -> AbstractContextManager[None]:
        """Make whole parameters readable through the module inside the context; changes are dropped."""
        if self.stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([p for _, p in self._named_parameters()])  # type: ignore[no-any-return]

    def local(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter: its master weights in float32, flat."""
        fragment = self._by_id.get(id(parameter))
        return parameter if fragment is None else fragment.values

    def named_local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter's canonical name and this rank's part of its values, flat and in float32."""
        for name, parameter in self._named_parameters():
            fragment = self._fragments.get(name)
            yield name, parameter.detach() if fragment is None else fragment.values

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors; a partitioned parameter is a meta tensor of its whole shape."""
        for name, tensor in super().named_state():
            fragment = self._fragments.get(name)
            yield (
                name,
                tensor if fragment is None else torch.empty(fragment.shape, dtype=fragment.flat.dtype, device="meta"),
            )

    def shard(self, name: str, tensor: Tensor) -> Any:
        """Return this rank's range of a partitioned parameter, or of a tensor shaped like its part."""
        fragment = self._fragments.get(name)
        if fragment is None or not (tensor.is_meta or tensor.shape == (fragment.numel,)):
            return super().shard(name, tensor)
        values = fragment.values if tensor.is_meta else tensor.detach()
        return Shard(values, shape=fragment.shape, flat_start=fragment.start)

    def load(self, name: str, tensor: Tensor, reader: Any, key: str) -> None:
        """Fill this rank's range of a partitioned parameter, or of a tensor shaped like its part."""
        fragment = self._fragments.get(name)
        if fragment is None or not (tensor.is_meta or tensor.shape == (fragment.numel,)):
            super().load(name, tensor, reader, key)
        elif fragment.numel:
            target = fragment.values if tensor.is_meta else tensor
            target.copy_(reader.read_flat(key, fragment.start, fragment.numel))

    def parameters_changed(self) -> None:
        """Give every rank the parameters that belong to the master weights, which were written from outside."""
        if self._partitions is not None:
            self._partitions.publish()
        elif self.stage == 3:
            self._wrapped.empty_partition_cache()

    def optimizer_tensors(self) -> Iterator[tuple[int, str, str, Tensor]]:
        """Yield (0, parameter name, state key, this rank's elements) of every state tensor."""
        if self._state is None:
            yield from super().optimizer_tensors()
        else:
            yield from ((0, name, key, tensor) for name, key, tensor in self._state.tensors())

    def optimizer_data(self) -> list[dict[str, Any]]:
        """Return the groups' options and scalar state as JSON; the same on every rank."""
        return super().optimizer_data() if self._state is None else [self._state.data()]

    def load_optimizers(self, data: Sequence[Mapping[str, Any]], reader: Any) -> None:
        """Put back the state of an optimizer from a checkpoint of any strategy."""
        if self._state is None:
            super().load_optimizers(data, reader)
        else:
            self._state.load(data[0], reader)

    def _reachable(self) -> Iterator[Tensor]:
        """Yield nothing where ZeRO expects gradients in the order of a real backward."""
        return iter(()) if self._stand is not None else self._trainable()

    def _gradients(self) -> list[Tensor]:
        if self._partitions is not None:
            return self._partitions.gradients()
        return [p.grad for p in self._trainable() if p.grad is not None]

    def _shards(self) -> str:
        held = sum(self.local(p).numel() for _, p in self._named_parameters())
        filled = "".join(f"; auto {key}: {value}" for key, value in self._filled.items())
        return f"ZeRO stage {self.stage}, {held} master weights here{filled}"


def _quieten() -> None:
    """Leave out what DeepSpeed says of itself on every rank, and torch's advice to it."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings(
        "ignore", message=".*(all_gather_into|reduce_scatter)_tensor. is deprecated", category=FutureWarning
    )


def _require_deepspeed() -> None:
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise StrategyError(
            "strategy deepspeed cannot import deepspeed.",
            why=f"The import says: {error}.",
            fix="pip install 'camshaft[deepspeed]'; on CPUs it also compiles operators once, with g++ and ninja.",
        ) from error


def _make_plugin(config: Mapping[str, Any]) -> Any:
    """Return Accelerate's plugin, without the registration that makes Transformers build modules under ZeRO-3.

    That would need Transformers to be installed, and modules here are built by the user's class.
    """
    from accelerate.utils import DeepSpeedPlugin

    class Plugin(DeepSpeedPlugin):  # type: ignore[misc]
        def set_deepspeed_weakref(self) -> None:
            return None

    return Plugin(hf_ds_config=config, zero3_init_flag=False)


def _forget_groups() -> None:
    """Let a later run in this process start anew: DeepSpeed keeps its communicator in a global."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    groups._release_process_group_references(group=None)
    comm.cdb = None
