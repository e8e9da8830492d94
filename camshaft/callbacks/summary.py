"""Print what is about to be trained, and how."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from camshaft import terminal
from camshaft.callback import Callback, main_process_only
from camshaft.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from camshaft.state import State


class ModelSummary(Callback):
    """Print the module's children down to ``depth`` with their parameters, what the strategy runs, and the LR plan.

    Counts are of whole parameters, however they are sharded; a tied parameter counts once. Metrics of
    torchmetrics are left out.
    """

    def __init__(self, depth: int = 1) -> None:
        if depth < 0:
            raise RecipeError(f"ModelSummary.depth is {depth}.", fix="Use 0 for one line, 1 for the children, or more.")
        self.depth = depth

    @main_process_only
    def on_fit_start(self, state: State) -> None:
        """Print the summary of a fit."""
        if state.stage != "fit":
            return
        from rich.table import Table

        table = Table("name", "type", "parameters", "trainable", "dtype", "size", box=None, pad_edge=False)
        for column in table.columns[2:4] + table.columns[5:]:
            column.justify = "right"
        for name, module in state.module.named_modules():
            if name and name.count(".") < self.depth and not _is_metric(module):
                table.add_row(name, type(module).__name__, *_cells(module.parameters()))
        table.add_row("total", type(state.module).__name__, *_cells(state.module.parameters()))
        terminal.console().print(table)
        terminal.say(state.strategy.describe())
        for plan in state.plans:
            terminal.say(f"learning rate: {plan.describe(state.planned_steps)}")


def _is_metric(module: nn.Module) -> bool:
    """Say whether a child is a metric of torchmetrics, which is no part of what is trained."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(module, torchmetrics.Metric)


def _cells(parameters: Iterable[nn.Parameter]) -> list[str]:
    unique = {id(p): p for p in parameters}.values()
    total = sum(map(_count, unique))
    trainable = sum(_count(p) for p in unique if p.requires_grad)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in unique})
    return [f"{total:,}", f"{trainable:,}", ", ".join(dtypes), _size(sum(_count(p) * p.element_size() for p in unique))]


def _count(parameter: Tensor) -> int:
    # ZeRO 3 leaves an empty tensor in place of a parameter, with its real number of elements beside it.
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
