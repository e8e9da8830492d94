"""Gather what a run logs, without waiting for the device, and reduce it to honest numbers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from camshaft.errors import MetricError

Reduce: TypeAlias = Literal["mean", "sum", "min", "max"]
Gather: TypeAlias = Callable[[Any], list[Any]]
_COMPACT_AT = 256


class Series:
    """Accumulate one name: a weighted sum, or an extreme, and the sum of the weights.

    Host numbers are added at once. Device scalars are kept as they came and folded into one float64
    tensor every 256 values, so that logging costs no synchronisation and memory stays bounded.
    """

    __slots__ = ("count", "pending", "pending_weights", "prog_bar", "reduce", "total", "weight")

    def __init__(self, reduce: str, *, prog_bar: bool) -> None:
        self.reduce = reduce
        self.prog_bar = prog_bar
        self.clear()

    def clear(self) -> None:
        """Forget everything that was added."""
        self.total: float | Tensor = {"min": math.inf, "max": -math.inf}.get(self.reduce, 0.0)
        self.weight = 0.0
        self.count = 0
        self.pending: list[Tensor] = []
        self.pending_weights: list[float] = []

    def add(self, value: float, weight: float) -> None:
        """Add a host number."""
        if self.reduce == "mean":
            self.total += value * weight
        elif self.reduce == "sum":
            self.total += value
        else:
            # min and max of a tensor total meet host numbers when both kinds are logged.
            self.total = _extreme(self.reduce, self.total, value)
        self.weight += weight
        self.count += 1

    def add_tensor(self, value: Tensor, weight: float) -> None:
        """Add a device scalar that nobody else writes to."""
        self.pending.append(value)
        self.pending_weights.append(weight)
        self.weight += weight
        self.count += 1
        if len(self.pending) >= _COMPACT_AT:
            self.compact()

    def compact(self) -> None:
        """Fold the pending scalars into the total, on their device."""
        if not self.pending:
            return
        values = torch.stack(self.pending)
        if values.device.type != "mps":
            values = values.double()
        if self.reduce == "mean":
            self.total = self.total + values @ values.new_tensor(self.pending_weights)
        elif self.reduce == "sum":
            self.total = self.total + values.sum()
        else:
            self.total = _extreme(self.reduce, self.total, values.amin() if self.reduce == "min" else values.amax())
        self.pending.clear()
        self.pending_weights.clear()


def _extreme(reduce: str, left: Any, right: Any) -> Any:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        reference = left if isinstance(left, Tensor) else right
        left, right = (torch.as_tensor(x, dtype=reference.dtype, device=reference.device) for x in (left, right))
        return torch.minimum(left, right) if reduce == "min" else torch.maximum(left, right)
    return min(left, right) if reduce == "min" else max(left, right)


class Table:
    """Named series that are flushed together."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.objects: dict[str, Any] = {}

    def open(self, name: str, reduce: str, *, prog_bar: bool) -> Series:
        """Return the series of a name, made on first use."""
        if name not in self.series:
            self.series[name] = Series(reduce, prog_bar=prog_bar)
        return self.series[name]

    def flush(self, gather: Gather) -> dict[str, float]:
        """Reduce every series that got a value since the last flush over all ranks, and clear it.

        One host transfer on each rank, then one gather of (total, weight) pairs in float64, so that
        ranks may have logged different names and different counts. All ranks call this together.
        """
        used = {name: s for name, s in self.series.items() if s.count}
        totals = _to_host(used)
        own = {name: (s.reduce, totals[name], s.weight) for name, s in used.items()}
        for series in used.values():
            series.clear()
        values = _merge(gather(own))
        for name, metric in sorted(self.objects.items()):
            values.update(_compute(name, metric))
        self.objects.clear()
        return values


def _to_host(used: dict[str, Series]) -> dict[str, float]:
    for series in used.values():
        series.compact()
    device = [name for name, s in used.items() if isinstance(s.total, Tensor)]
    host = torch.stack([used[name].total for name in device]).tolist() if device else []  # type: ignore[misc]
    moved = dict(zip(device, host, strict=True))
    return {name: moved[name] if name in moved else float(s.total) for name, s in used.items()}


def _snapshot(table: Table) -> Iterable[tuple[str, Series, float]]:
    used = {name: s for name, s in table.series.items() if s.count}
    totals = _to_host(used)
    return [(name, series, totals[name]) for name, series in used.items()]


def _merge(ranks: Iterable[dict[str, tuple[str, float, float]]]) -> dict[str, float]:
    parts: dict[str, tuple[str, list[float], list[float]]] = {}
    for own in ranks:
        for name, (reduce, total, weight) in own.items():
            entry = parts.setdefault(name, (reduce, [], []))
            entry[1].append(total)
            entry[2].append(weight)
    values: dict[str, float] = {}
    for name, (reduce, totals, weights) in parts.items():
        match reduce:
            case "mean":
                weight = math.fsum(weights)
                values[name] = sum(totals) / weight if weight else math.nan
            case "sum":
                values[name] = sum(totals)
            case _:
                # min and max of a list drop a NaN that is not first; a NaN must show.
                nan = any(math.isnan(t) for t in totals)
                values[name] = math.nan if nan else (min(totals) if reduce == "min" else max(totals))
    return values


def _compute(name: str, metric: Any) -> dict[str, float]:
    """Compute a torchmetrics Metric or collection over its epoch, on all ranks, and reset it."""
    result = metric.compute()
    metric.reset()
    if isinstance(result, dict):
        return {f"{name}/{key}": _scalar(key, value) for key, value in result.items()}
    return {name: _scalar(name, result)}


def _scalar(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise MetricError(
            f"{name!r} computed a tensor of shape {tuple(value.shape)}.",
            why="A logged value is one number.",
            fix="Give the metric average='macro' or 'micro', or log each entry under its own name.",
        )
    return float(value)


class Metrics:
    """Take values from the module, the loop and callbacks, and hand them on when they are due.

    Args:
        device: where logged tensors live. Reading a CPU scalar waits for nothing, so it is read at
            once; on any other device it is copied there, and read at the flush.

    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.reads_at_once = device is None or device.type == "cpu"
        self.weight = 1.0
        self.training = True
        self.muted = False
        self.prefix = ""
        self.suffix = ""
        self.step = Table()
        self.epoch = Table()
        self.evaluation = Table()
        self.prog_bar: set[str] = set()
        self._loss: Series | None = None
        self._routes: dict[tuple[Any, ...], tuple[Series, ...]] = {}

    def log(
        self,
        name: str,
        value: Any,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        prog_bar: bool = False,
        batch_size: float | None = None,
        reduce: str = "mean",
    ) -> None:
        """Record a value of the current micro-batch, as ``Module.log`` describes."""
        if self.muted:
            return
        key = (name, on_step, on_epoch, self.training)
        routes = self._routes.get(key)
        if routes is None:
            routes = self._route(key, prog_bar=prog_bar, reduce=reduce, value=value)
        weight = self.weight if batch_size is None else batch_size
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise _not_a_number(name, f"a tensor of shape {tuple(value.shape)}", "Take its mean() or sum() first.")
            if self.reads_at_once and value.is_cpu:
                value = value.item()
            else:
                # A copy, since "loss /= n" after logging would change the record.
                value = value.detach().clone().reshape(())
                for series in routes:
                    series.add_tensor(value, weight)
                return
        elif type(value) is not float and not isinstance(value, (int, float)):
            self._log_object(name, value, key)
            return
        for series in routes:
            series.add(value, weight)

    def log_loss(self, loss: Tensor, weight: float) -> None:
        """Record the loss of a training step as ``train/loss``, unless the module logs that name itself."""
        series = self._loss
        if series is None:
            if any(key[0] == "train/loss" for key in self._routes):
                return
            series = self._loss = self.step.open("train/loss", "mean", prog_bar=True)
            self.prog_bar.add("train/loss")
        if self.reads_at_once and loss.is_cpu:
            series.add(loss.item(), weight)
        else:
            series.add_tensor(loss.detach().clone().reshape(()), weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums that are not yet flushed, as host numbers; a save is a moment to wait for the device."""
        return {
            table: {
                n: [s.reduce, total, s.weight, s.count, s.prog_bar] for n, s, total in _snapshot(getattr(self, table))
            }
            for table in ("step", "epoch")
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        for table, entries in state.items():
            for name, (reduce, total, weight, count, prog_bar) in entries.items():
                series = getattr(self, table).open(name, reduce, prog_bar=prog_bar)
                series.total, series.weight, series.count = total, weight, count
                if prog_bar:
                    self.prog_bar.add(name)

    def _route(self, key: tuple[Any, ...], *, prog_bar: bool, reduce: str, value: Any) -> tuple[Series, ...]:
        """Choose, once per name and flags, the series that a value goes to."""
        name, on_step, on_epoch, training = key
        if reduce not in ("mean", "sum", "min", "max"):
            raise MetricError(f"{name!r} is reduced by {reduce!r}.", fix="Use mean, sum, min or max.")
        if not isinstance(name, str) or not name:
            raise MetricError(f"{name!r} is not the name of a metric.", fix="Log under a text such as 'val/loss'.")
        if hasattr(value, "compute"):
            return ()
        on_step = training if on_step is None else on_step
        on_epoch = (not training) if on_epoch is None else on_epoch
        both = on_step and on_epoch and training
        routes = []
        if training and on_step:
            routes.append(self.step.open(f"{name}_step" if both else name, reduce, prog_bar=prog_bar))
        if training and on_epoch:
            routes.append(self.epoch.open(f"{name}_epoch" if both else name, reduce, prog_bar=prog_bar))
        if not training:
            routes.append(self.evaluation.open(self.prefix + name + self.suffix, reduce, prog_bar=prog_bar))
        if prog_bar:
            self.prog_bar.update({name, f"{name}_step", f"{name}_epoch"})
        if not self.suffix and not self.prefix:
            self._routes[key] = tuple(routes)
        return tuple(routes)

    def _log_object(self, name: str, value: Any, key: tuple[Any, ...]) -> None:
        """Keep a torchmetrics object until its epoch ends; its value of this batch goes to the step series."""
        _, on_step, on_epoch, training = key
        if hasattr(value, "compute") and hasattr(value, "reset"):
            is_collection = isinstance(value, dict) or hasattr(value, "items")
            target = self.epoch if training else self.evaluation
            if on_epoch is not False:
                target.objects[self.prefix + name + self.suffix] = value
            if training and on_step and not is_collection:
                cached = getattr(value, "_forward_cache", None)
                if cached is not None:
                    self.log(f"{name}_step" if on_epoch is not False else name, cached, on_step=True, on_epoch=False)
            return
        if isinstance(value, dict):
            raise _not_a_number(name, "a dict", "Use log_dict.")
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise _not_a_number(
                name, f"a {type(value).__name__}", "Log a number, a scalar tensor or a Metric."
            ) from None
        self.log(name, number, on_step=on_step, on_epoch=on_epoch)


def _not_a_number(name: str, kind: str, fix: str) -> MetricError:
    return MetricError(f"{name!r} was logged as {kind}.", why="A logged value is one number.", fix=fix)


def missing_metric(name: str, existing: Iterable[str], who: str) -> MetricError:
    """Say that a monitored name is logged by nothing, with the names that exist and the nearest."""
    names = sorted(existing)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return MetricError(
        f"{who} monitors {name!r}, which nothing logs.",
        why=f"The names that exist are {', '.join(names) or '(none)'}.",
        fix=f"Did you mean {nearest[0]!r}?" if nearest else "Log it with self.log in validation_step.",
    )
