"""Split the matrices of a module over ranks that all see the same batch: tensor parallelism by torch's styles."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from camshaft.errors import StrategyError
from camshaft.strategies.placing import move_state
from camshaft.strategies.sharded import Sharded

if TYPE_CHECKING:
    from accelerate import Accelerator

    from camshaft.module import Module
    from camshaft.strategies.dispatch import Dispatch

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_scatter": lambda: RowwiseParallel(input_layouts=Replicate()),
}


class TensorParallel(Sharded):
    """Split layers over all ranks, as the module's ``tensor_parallel_plan()`` says; ranks share every batch.

    The plan maps layer names, with wildcards, to "colwise" (split the outputs), "rowwise" (split the
    inputs of what a colwise layer put out), "colwise_gather", "rowwise_scatter", or a torch ``ParallelStyle``.
    What it leaves out is copied. Data is not split: the run's data world is one.
    """

    name = "tensor_parallel"
    evaluates_wrapped: ClassVar[bool] = True
    needs_equal_forwards: ClassVar[bool] = True
    least_processes: ClassVar[int] = 2

    def launch(self) -> None:
        """Join the other processes; all of them are one rank of the data."""
        super().launch()
        self._data = (0, 1)

    def full_parameters(self) -> AbstractContextManager[None]:
        """Make whole parameters readable inside the context; the module cannot run there."""
        return self._replaced_by_whole()

    def gather_data(self, value: Any) -> list[Any]:
        """Return the value of the main process alone, since all ranks see the same data."""
        return self.gather_objects(value)[:1]

    def reduce_data(self, value: Tensor) -> Tensor:
        """Return the value itself, since all ranks see the same data."""
        self._check_collective("reduce_data")
        return value

    def _make_accelerator(self) -> Accelerator:
        # Not its ParallelismConfig: for tensor parallelism that asks for Transformers and its models' own plans.
        from accelerate import Accelerator

        return Accelerator(cpu=self.device.type == "cpu", mixed_precision="no", step_scheduler_with_optimizer=False)

    def _wrap(self, dispatch: Dispatch, optimizers: list[Optimizer]) -> list[Optimizer]:
        assert self.module is not None
        dispatch.to(self.device)
        move_state(optimizers, self.device)
        plan = _read_plan(self.module, self.world_size)
        before = {name: id(p) for name, p in self._named_parameters()}
        mesh = init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("tp",))
        parallelize_module(self.module, mesh, plan)
        self._hold()
        now = {before[name]: p for name, p in self._named_parameters()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [now[id(p)] for p in group["params"]]
                if len({isinstance(p, DTensor) for p in group["params"]}) > 1:
                    # torch's foreach and fused updates refuse groups that mix DTensors and tensors.
                    group |= {key: False for key in ("foreach", "fused") if key in group}
        self._wrapped = dispatch
        return optimizers

    def _reachable(self) -> Iterator[Tensor]:
        """Yield this rank's parts."""
        return (p.to_local() if isinstance(p, DTensor) else p for p in self._trainable())

    def _verify(self) -> None:
        if not any(isinstance(p, DTensor) for _, p in self._named_parameters()):
            raise StrategyError(
                "tensor_parallel_plan() split no parameter.",
                why="Every rank would do the whole work.",
                fix="Name linear or embedding layers in it.",
            )

    def _check_module(self, module: Module, optimizers: Sequence[Optimizer]) -> None:
        super()._check_module(module, optimizers)
        if not callable(getattr(module, "tensor_parallel_plan", None)):
            raise StrategyError(
                f"{type(module).__name__} has no tensor_parallel_plan().",
                why="Only its author knows which matrices can be split which way.",
                fix="Return {'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'} from it, or use strategy: fsdp.",
            )

    def _shards(self) -> str:
        split = sum(isinstance(p, DTensor) for _, p in self._named_parameters())
        return f"{split} parameters split {self.world_size} ways, one batch for all"


def _read_plan(module: nn.Module, size: int) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    layers = dict(module.named_modules())
    author: Any = module
    given: dict[str, Any] = author.tensor_parallel_plan()
    for pattern, style in given.items():
        names = [name for name in layers if fnmatch.fnmatch(name, pattern)]
        if not names:
            raise StrategyError(
                f"tensor_parallel_plan() names {pattern!r}, and the module has no such layer.",
                fix=f"Its layers are {', '.join(name for name in layers if name)}.",
            )
        if isinstance(style, str) and style not in _STYLES:
            raise StrategyError(
                f"tensor_parallel_plan() gives {pattern!r} the style {style!r}.",
                fix=f"Use one of {', '.join(_STYLES)}.",
            )
        for name in names:
            _check_divides(name, layers[name], style, size)
            plan[name] = _STYLES[style]() if isinstance(style, str) else style
    return plan


def _check_divides(name: str, layer: nn.Module, style: Any, size: int) -> None:
    weight = getattr(layer, "weight", None)
    if weight is None:
        return
    is_columns = isinstance(style, ColwiseParallel) or str(style).startswith("colwise")
    split = weight.shape[0 if is_columns != isinstance(layer, nn.Embedding) else 1]
    if split % size:
        raise StrategyError(
            f"{name} has {split} {'outputs' if is_columns else 'inputs'}, which {size} processes do not divide.",
            why="Shards of unequal size would make every collective wrong or slow.",
            fix=f"Start a number of processes that divides {split}, or leave {name} out of the plan.",
        )
