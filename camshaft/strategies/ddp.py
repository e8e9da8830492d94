"""Train copies of the module that average their gradients: DistributedDataParallel through Accelerate."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from camshaft.errors import StrategyError
from camshaft.strategies.accelerated import Accelerated
from camshaft.strategies.placing import move_state

if TYPE_CHECKING:
    from accelerate import Accelerator

    from camshaft.state import Batch
    from camshaft.strategies.dispatch import Dispatch


class DDP(Accelerated):
    """Give every process a whole copy of the module; gradients are averaged while backward runs.

    ``find_unused_parameters`` is for steps that leave parameters out, ``static_graph`` for steps that
    always use the same ones, perhaps several times; it reduces every micro-batch of a window.
    ``sync_batchnorm`` takes
    batch statistics over all ranks. ``bucket_cap_mb`` and ``gradient_as_bucket_view`` are torch's.
    """

    name = "ddp"

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        bucket_cap_mb: int = 25,
        sync_batchnorm: bool = False,
        device: str = "auto",
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(device=device, timeout_s=timeout_s)
        self.find_unused_parameters = find_unused_parameters
        self.sync_batchnorm = sync_batchnorm
        self._always_syncs = static_graph
        self.reduces_apart = not static_graph
        self._options = {
            "static_graph": static_graph, "gradient_as_bucket_view": gradient_as_bucket_view,
            "broadcast_buffers": broadcast_buffers, "bucket_cap_mb": bucket_cap_mb,
        }  # fmt: skip

    def micro_step(self, *, sync: bool, precision: str) -> None:
        """Announce a micro-batch; gradients stay on this rank unless ``sync``."""
        super().micro_step(sync=sync, precision=precision)
        # torch learns a static graph in a first backward that reduces. Reducing only that one more often
        # would make a resumed run differ in the last bit, so all do: the mean of a mean is the mean.
        self._wrapped.require_backward_grad_sync = sync or self._always_syncs

    def run(self, method: str, batch: Batch, *indices: int) -> Any:
        """Call a training step through DDP, whose complaint about unused parameters then names them."""
        if method == "training_step" and self._is_manual:
            # The step runs backward itself, so DDP is told about each loss in ``backward``.
            return super(Accelerated, self).run(method, batch, *indices)
        try:
            return super().run(method, batch, *indices)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            raise self._unused(error) from error

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar; on the window's last micro-batch they are averaged over ranks."""
        if self._is_manual and self._wrapped.require_backward_grad_sync:
            self._wrapped.reducer.prepare_for_backward([loss])
        super().backward(loss)

    def reduce_gradients(self) -> None:
        """Average over ranks what micro-batches without ``sync`` left, and give every rank the main one's buffers."""
        wrapped = self._wrapped
        wrapped.require_backward_grad_sync = True
        # Adds nothing: it makes the reducer see every gradient as the last of its window.
        zero: Any = sum(p.sum() * 0.0 for p in self._trainable())
        wrapped.reducer.prepare_for_backward([zero])
        zero.backward()
        # A forward that broadcasts them would, after one that failed on this rank alone, wait for the others.
        wrapped.require_forward_param_sync = False
        if wrapped.broadcast_buffers and wrapped.modules_buffers:
            wrapped._sync_buffers()

    def train_also(self, names: Collection[str]) -> None:
        """Let frozen parameters train from the next step on. DDP listens to what trained before: it is made anew."""
        super().train_also(names)
        assert self._dispatch is not None
        for parameter in self._dispatch.parameters():
            parameter.grad = None
        self.accelerator._models.clear()
        shares_buffers = self._wrapped.require_forward_param_sync
        self._wrapped = self.accelerator.prepare_model(self._dispatch)
        self._wrapped.require_forward_param_sync = shares_buffers

    def _make_accelerator(self) -> Accelerator:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        return Accelerator(
            cpu=self.device.type == "cpu", mixed_precision="no", step_scheduler_with_optimizer=False,
            kwargs_handlers=[DistributedDataParallelKwargs(**self._options)],
        )  # fmt: skip

    def _wrap(self, dispatch: Dispatch, optimizers: list[Optimizer]) -> list[Optimizer]:
        dispatch.to(self.device)
        move_state(optimizers, self.device)
        if self.sync_batchnorm:
            self._share_batch_statistics(dispatch)
        if not optimizers or not any(p.requires_grad for p in dispatch.parameters()):
            self._wrapped = dispatch
            dispatch.require_backward_grad_sync = True  # type: ignore[assignment]
            return optimizers
        self.accelerator.ddp_handler.find_unused_parameters = self.find_unused_parameters or self._is_manual
        self._wrapped = self.accelerator.prepare_model(dispatch)
        return optimizers

    def _share_batch_statistics(self, dispatch: Dispatch) -> None:
        if self.device.type == "cpu":
            raise StrategyError(
                "sync_batchnorm needs CUDA: torch has no SyncBatchNorm on the CPU.",
                fix="Remove sync_batchnorm, or use normalisation without batch statistics (LayerNorm, GroupNorm).",
            )
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(dispatch)  # type: ignore[no-untyped-call]

    def _verify(self) -> None:
        if self.optimizers and not isinstance(self._wrapped, DistributedDataParallel):
            raise StrategyError(
                f"Accelerate made a {type(self._wrapped).__name__} instead of DistributedDataParallel.",
                why="Ranks would drift apart, silently.",
                fix="Report this with the output of accelerate env; strategy: fsdp is another way.",
            )

    @property
    def _is_manual(self) -> bool:
        return self.module is not None and not self.module.automatic_optimization

    def _unused(self, error: RuntimeError) -> StrategyError:
        names = self._names_from(error)
        listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        return StrategyError(
            f"the last training step gave no gradient to {listed or 'some parameters'}.",
            why="DDP waits for the gradient of every parameter on every rank.",
            fix="Freeze them (requires_grad_(False)), use them in the loss, or set "
            "strategy: {name: ddp, find_unused_parameters: true}, which costs a walk through the graph each step.",
        )

    def _names_from(self, error: RuntimeError) -> list[str]:
        """Name the parameters whose numbers torch lists."""
        listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        numbers = [int(number) for number in listed.group(1).split()] if listed else []
        trainable = [name for name, p in self._named_parameters() if p.requires_grad]
        return [trainable[number] for number in numbers if number < len(trainable)]
