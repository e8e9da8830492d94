"""Define the contract of a parallelism strategy, in its one-process form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from camshaft.callback import inside_main_only
from camshaft.dtypes import held_dtypes
from camshaft.errors import StrategyError
from camshaft.module import bind_step
from camshaft.scaler import LossScaler
from camshaft.strategies.optimizers import load_state, plain_state, tensor_state
from camshaft.strategies.placing import move, move_state

if TYPE_CHECKING:
    from camshaft.module import Module
    from camshaft.state import Batch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-true": torch.bfloat16}
ReduceOp = Literal["sum", "mean", "min", "max"]


class Strategy:
    """Hide processes, devices, wrappers and collectives from the loop, the module and the callbacks.

    The class works for one process and is what others refine. All ranks call every method, in the
    same order, unless its docstring says otherwise. A strategy of the user's own passes
    ``camshaft.testing.check_strategy``.

    Attributes:
        rank, local_rank, world_size: of this process among those of the run, and of its machine.
        device: where the module and its batches live.
        active: the optimizers that the next ``step`` updates; all of them, but for manual optimization.
        scaler: scales the loss while the precision is fp16.
        needs_equal_forwards: evaluation must run as many forwards on every rank, or it would hang.
        precisions: what ``micro_step`` can compute in; "bf16-true" is bf16 with parameters that are stored so.
        switches_precision: whether the precision may change between steps.
        replicates: whether every rank holds whole parameters, gradients and optimizer state.
        reduces_apart: whether micro-batches without ``sync`` take no collective, and ``reduce_gradients`` may follow.
        trains_late: whether ``train_also`` works.
        precision_setting: the setting of the strategy's own that leaves it with only these precisions, if one does.
        recipe: what the run has of batch_size (over all ranks), accumulate and max_norm (of clipping);
            set before ``launch``, for a back end with settings of its own that must agree.
        hang_timeout_s: several processes end themselves when one makes no progress for so long; set before ``launch``.
    """

    name: ClassVar[str] = "base"
    needs_equal_forwards: ClassVar[bool] = False
    precisions: frozenset[str] = frozenset({"fp32", "bf16", "fp16", "bf16-true"})
    switches_precision: bool = True
    replicates: ClassVar[bool] = True
    reduces_apart: bool = True
    trains_late: ClassVar[bool] = True
    precision_setting: str = ""

    def __init__(self) -> None:
        self.rank = 0
        self.local_rank = 0
        self.world_size = 1
        self._data: tuple[int, int] | None = None
        self.device = torch.device("cpu")
        self.module: Module | None = None
        self.optimizers: list[Optimizer] = []
        self.active: list[Optimizer] = []
        self.scaler: LossScaler | None = None
        self.recipe: Mapping[str, Any] = {}
        self.hang_timeout_s: float | None = None
        self._steps: dict[str, Callable[..., Any]] = {}
        self._autocast: AbstractContextManager[Any] | None = None
        self._precision = "fp32"
        self._finite = True
        self._parameters: tuple[tuple[int, ...], list[Tensor]] = ((), [])

    @property
    def is_main(self) -> bool:
        """Whether this process writes files, logs and prints."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Number this rank among those that get different data.

        Tensor-parallel ranks share theirs: samplers, seeds, batch sizes and loss weights go by this.
        """
        return self.rank if self._data is None else self._data[0]

    @property
    def data_world_size(self) -> int:
        """How many ranks get different data; gradients are averaged over them."""
        return self.world_size if self._data is None else self._data[1]

    @property
    def is_first_of_data(self) -> bool:
        """Whether this rank is the one of those that share its data that writes what came of it."""
        return self._data is None or self.rank == 0

    # -- set-up ----------------------------------------------------------------------------------

    def launch(self) -> None:
        """Join the other processes and choose the device. Nothing is built yet."""

    def prepare(self, module: Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Place and wrap a module and its optimizers; return the optimizers to step.

        ``optimizers`` is empty for evaluation. Afterwards the strategy has checked that it really is
        what was asked.
        """
        self.module = module.to(self.device)
        self._bind(module)
        self.optimizers = self.active = list(optimizers)
        move_state(self.optimizers, self.device)
        return self.optimizers

    def train_also(self, names: Collection[str]) -> None:
        """Let frozen parameters, which optimizers hold already, train from the next step on. Every rank calls this."""
        for name, parameter in self._named_parameters():
            if name in names:
                parameter.requires_grad_(True)

    def describe(self) -> str:
        """Say in one line what runs: dtypes of parameters, compute, reduction and optimizer, shards, world size."""
        processes = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        return f"{self.name} on {self.device}, {processes}, parameters {self.dtypes()['parameters']}"

    def dtypes(self) -> dict[str, str]:
        """Return the dtypes, joined by "/", of parameters, of gradients as they are reduced, and of the optimizer.

        The optimizer's are those of its state, or of the parameters it holds while it has none.
        """
        return held_dtypes([(self.local(p), p.requires_grad) for _, p in self._named_parameters()], self.optimizers)

    def teardown(self) -> None:
        """Leave the other processes. Called once, last, after an exception too."""

    # -- a step ----------------------------------------------------------------------------------

    def to_device(self, batch: Batch) -> Batch:
        """Move every tensor of a batch to the device, in lists, tuples, dicts and objects with ``to``."""
        return batch if self.device.type == "cpu" else move(batch, self.device)

    def micro_step(self, *, sync: bool, precision: str) -> None:
        """Announce a micro-batch: whether its backward must reduce gradients, and what forward computes in."""
        del sync
        if precision != self._precision:
            self._set_precision(precision)

    def run(self, method: str, batch: Batch, *indices: int) -> Any:
        """Call a step of the module through whatever wraps it, in the announced precision.

        ``indices`` is the batch's, and for evaluation that of its loader too.
        """
        if self._autocast is None:
            return self._steps[method](batch, *indices)
        with self._autocast:
            return self._steps[method](batch, *indices)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar, scaled where the precision needs it."""
        if self.scaler is not None:
            loss = loss * self.scaler.scale
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce_gradients(self) -> None:
        """Average over ranks what micro-batches without ``sync`` left, for a step that has none with it."""

    def zero_loss(self) -> Tensor:
        """Return a loss whose backward reaches every parameter with zero, for a step that returned None."""
        return sum((p.sum() * 0.0 for p in self.parameters()), torch.zeros((), device=self.device))

    def unscale(self) -> bool:
        """Undo the loss scaling on the gradients of ``active``; say whether they are finite on all ranks."""
        if self.scaler is None:
            return True
        self._finite = self.scaler.unscale(self.parameters())
        return self._finite

    def clip_grad_norm(self, max_norm: float, parameters: Sequence[Tensor] | None = None) -> Tensor:
        """Scale the gradients so that their L2 norm over all ranks' shards is at most ``max_norm``.

        Returns the norm before, a device scalar. ``parameters`` defaults to those of ``active``.
        """
        return torch.nn.utils.clip_grad_norm_(self.parameters() if parameters is None else parameters, max_norm)

    def clip_grad_value(self, limit: float) -> None:
        """Clamp every gradient entry to [-limit, limit]."""
        torch.nn.utils.clip_grad_value_(self.parameters(), limit)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of ``active``, for a loss whose weight was only known after backward."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, factor)

    def step(self, *, skip: bool = False) -> bool:
        """Update the parameters of ``active`` unless ``skip`` or an overflow forbids it; say whether it did."""
        if self.scaler is not None:
            self.scaler.update(finite=self._finite)
        if skip or not self._finite:
            self._finite = True
            return False
        for optimizer in self.active:
            optimizer.step()
        return True

    def zero_grad(self) -> None:
        """Forget the gradients of ``active``."""
        for optimizer in self.active:
            if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in optimizer.__dict__:
                optimizer.zero_grad()
                continue
            # What torch's does, without the 8 us that its profiling takes.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def parameters(self) -> list[Tensor]:
        """Return the parameters of ``active``, from a cache that notices added groups."""
        key = tuple(
            part for o in self.active for part in (id(o), *(len(group["params"]) for group in o.param_groups))
        )  # fmt: skip
        if key != self._parameters[0]:
            found = [p for o in self.active for group in o.param_groups for p in group["params"]]
            self._parameters = (key, found)
        return self._parameters[1]

    # -- agreement and collectives ---------------------------------------------------------------

    def any(self, flag: bool) -> bool:
        """Say whether any rank's flag is set. Blocks until all ranks ask."""
        self._check_collective("any")
        return flag

    def agree(self, requests: int, *, due: bool) -> int:
        """Combine the ranks' request bits without blocking the step.

        Called at every boundary; the bits take effect where ``due`` says that an exchange ends, at
        the same boundary on every rank.
        """
        del due
        return requests

    def reduce(self, value: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce a tensor over all ranks and return the result on every rank; blocks."""
        del op
        self._check_collective("reduce")
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's small plain object, in the order of ranks, on every rank; blocks."""
        self._check_collective("gather_objects")
        return [value]

    def gather_data(self, value: Any) -> list[Any]:
        """Do as ``gather_objects`` with one value per rank of the data: for counts and sums over samples."""
        return self.gather_objects(value)

    def reduce_data(self, value: Tensor) -> Tensor:
        """Do as ``reduce`` with one value per rank of the data, and sum: for counts and sums over samples."""
        return self.reduce(value)

    def broadcast_object(self, value: Any) -> Any:
        """Return the main process's small plain object on every rank; blocks."""
        self._check_collective("broadcast_object")
        return value

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._check_collective("barrier")

    # -- parameters as files and averages see them -----------------------------------------------

    def full_parameters(self) -> AbstractContextManager[None]:
        """Make whole parameters readable through the module inside the context; changes are dropped."""
        return nullcontext()

    def local(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter or of a tensor shaped like it, sharing its memory."""
        return parameter

    def shard(self, name: str, tensor: Tensor) -> Any:
        """Return what this rank writes of a tensor: itself, a ``checkpoint.Shard``, or None when others do.

        ``name`` is the parameter's canonical name, or that of the parameter a state tensor is shaped like.
        """
        del name
        return tensor if self.is_main else None

    def load(self, name: str, tensor: Tensor, reader: Any, key: str) -> None:
        """Fill this rank's part of ``tensor`` from entry ``key`` of a checkpoint's reader."""
        del name
        tensor.copy_(reader.tensor(key))

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the canonical name and the tensor, as this strategy holds it, of all parameters and kept buffers.

        Tied parameters come once. Buffers that are not persistent are left out.
        """
        if self.module is None:
            return
        yield from self._named_parameters()
        kept = {canonical(name) for name in self.module.state_dict(keep_vars=True)}
        buffers = ((canonical(name), buffer) for name, buffer in self.module.named_buffers())
        yield from ((name, buffer) for name, buffer in buffers if name in kept)

    def optimizer_tensors(self) -> Iterator[tuple[int, str, str, Tensor]]:
        """Yield (optimizer index, parameter name, state key, tensor) of every state tensor that has a dim."""
        names = self.parameter_names()
        for index, optimizer in enumerate(self.optimizers):
            for name, key, tensor in tensor_state(optimizer, names):
                yield index, name, key, tensor

    def optimizer_data(self) -> list[dict[str, Any]]:
        """Return, for each optimizer, its groups and scalar state as JSON; the same on every rank."""
        names = self.parameter_names()
        return [plain_state(optimizer, names) for optimizer in self.optimizers]

    def load_optimizers(self, data: Sequence[Mapping[str, Any]], reader: Any) -> None:
        """Put back what ``optimizer_data`` and ``optimizer_tensors`` gave, from a checkpoint of any strategy."""
        names = self.parameter_names()
        for index, (optimizer, saved) in enumerate(zip(self.optimizers, data, strict=True)):
            load_state(self, optimizer, index, names, saved, reader)

    def parameter_names(self) -> dict[int, str]:
        """Map the ``id`` of every parameter, as the optimizers hold it, to its canonical name."""
        return {id(p): name for name, p in self._named_parameters()}

    @contextlib.contextmanager
    def swapped(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Run the context with other values in the named parameters, and put the old ones back exactly."""
        own = dict(self.named_local())
        names = [name for name in tensors if name in own]
        with torch.no_grad():
            kept = [own[name].clone() for name in names]
            for name in names:
                own[name].copy_(tensors[name])
            self.parameters_changed()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in zip(names, kept, strict=True):
                    own[name].copy_(value)
                self.parameters_changed()

    def named_local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter's canonical name and this rank's part of its values."""
        for name, parameter in self._named_parameters():
            yield name, self.local(parameter.detach())

    def parameters_changed(self) -> None:
        """Tell the wrapper that parameter values were written from outside: drop gathered copies."""

    # -- for subclasses --------------------------------------------------------------------------

    def _bind(self, module: Module) -> None:
        self._steps = {name: bind_step(module, name) for name in module._steps}

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters as this strategy holds them, under their canonical names."""
        if self.module is not None:
            yield from ((canonical(name), p) for name, p in self.module.named_parameters())

    def _set_precision(self, precision: str) -> None:
        if precision not in self.precisions:
            raise StrategyError(
                f"{self.name} cannot compute in {precision!r}.",
                fix=f"Use one of {', '.join(sorted(self.precisions))}.",
            )
        if self._precision != "fp32" and not self.switches_precision:
            raise StrategyError(
                f"{self.name} cannot switch the precision from {self._precision} to {precision} while it trains.",
                fix="Give one precision for the whole run.",
            )
        dtype = _AUTOCAST.get(precision)
        self._autocast = torch.autocast(self.device.type, dtype) if dtype is not None else None
        self.scaler = LossScaler(any_rank=self.any) if precision == "fp16" else None
        self._precision = precision

    def _check_collective(self, name: str) -> None:
        if inside_main_only():
            raise StrategyError(
                f"{name} was called inside a hook that only the main process runs.",
                why="The other ranks would never join it, and the run would hang.",
                fix="Do the collective in a hook without @main_process_only, and write its result in one with it.",
            )


def canonical(name: str) -> str:
    """Return a parameter's name without what activation checkpointing and compilation put in between."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
