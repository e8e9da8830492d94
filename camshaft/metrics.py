"""Gather what a run logs, without waiting for the device, and reduce it to honest numbers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from camshaft.errors import MetricError
from camshaft.objects import compute_all, require_own_object

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
        device = self.pending[-1].device
        values = torch.stack([v if v.device == device else v.to(device) for v in self.pending])
        if isinstance(self.total, Tensor):
            self.total = self.total.to(device)
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
    # min() and max() drop a NaN that does not come first; a NaN must show, as it does in tensors.
    if math.isnan(left) or math.isnan(right):
        return math.nan
    return min(left, right) if reduce == "min" else max(left, right)


class Table:
    """Named series that are flushed together."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.objects: dict[str, Any] = {}
        self.resets: dict[int, Any] = {}

    def open(self, name: str, reduce: str, *, prog_bar: bool) -> Series:
        """Return the series of a name, made on first use.

        Raises:
            MetricError: the name is reduced in another way already.
        """
        series = self.series.setdefault(name, Series(reduce, prog_bar=prog_bar))
        if series.reduce != reduce:
            raise MetricError(
                f"{name!r} is logged with reduce={reduce!r}, and was with {series.reduce!r}.",
                why="One name is one number.",
                fix="Use one of them, or two names.",
            )
        return series

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
        ranks = gather((own, sorted(self.objects)))
        values = _merge(numbers for numbers, _ in ranks)
        _require_equal([names for _, names in ranks])
        values |= compute_all(self.objects)
        for metric in self.resets.values():
            metric.reset()
        self.objects.clear()
        self.resets.clear()
        return values


def _to_host(used: dict[str, Series]) -> dict[str, float]:
    for series in used.values():
        series.compact()
    device = [name for name, s in used.items() if isinstance(s.total, Tensor)]
    host: list[float] = []
    if device:
        first: Any = used[device[0]].total
        host = torch.stack([torch.as_tensor(used[name].total, device=first.device) for name in device]).tolist()
    moved = dict(zip(device, host, strict=True))
    return {name: moved[name] if name in moved else float(s.total) for name, s in used.items()}


def _require_equal(ranks: list[list[str]]) -> None:
    """Refuse metric objects that some ranks lack: their ``compute`` is a collective, and would hang."""
    common = set(ranks[0]).intersection(*ranks)
    for number, names in enumerate(ranks):
        if odd := sorted(set(names) - common):
            raise MetricError(
                f"{odd[0]!r} is a metric object that rank {number} logged and another rank did not.",
                why="Computing it waits for all ranks, one of which would never come.",
                fix="Log it on every rank, and give every rank at least one batch.",
            )


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


class Metrics:
    """Take values from the module, the loop and callbacks, and hand them on when they are due.

    Args:
        reads_at_once: whether CPU scalars are read where they are logged: reading them waits for
            nothing. Scalars of any other device are copied there, and read at the flush.

    """

    def __init__(self, *, reads_at_once: bool = True) -> None:
        self.reads_at_once = reads_at_once
        self.weight = 1.0
        self.training = True
        self.muted = False
        self.prefix = ""
        self.suffix = ""
        self.step = Table()
        self.epoch = Table()
        self.evaluation = Table()
        self.prog_bar: set[str] = set()
        self.logs_loss = False
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
            if hasattr(value, "compute"):
                # Its compute at the epoch's end takes every rank, also one without a sample.
                self._log_object(name, value, on_step, on_epoch)
            return
        weight = self.weight if batch_size is None else float(batch_size)
        key = (name, on_step, on_epoch, reduce, self.training, self.prefix, self.suffix)
        routes = self._routes.get(key)
        if routes is None:
            if hasattr(value, "compute"):
                self._log_object(name, value, on_step, on_epoch)
                return
            routes = self._routes[key] = self._route(name, on_step, on_epoch, prog_bar=prog_bar, reduce=reduce)
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
        elif type(value) is not float:
            value = _number(name, value)
        for series in routes:
            series.add(value, weight)

    def log_loss(self, loss: Tensor, weight: float) -> None:
        """Record the loss of a training step as ``train/loss``, unless the module logs that name itself."""
        if self.logs_loss:
            return
        series = self._loss
        if series is None:
            series = self._loss = self.step.open("train/loss", "mean", prog_bar=True)
            self.prog_bar.add("train/loss")
        if self.reads_at_once and loss.is_cpu:
            # Series.add, without a call: this runs every micro-batch.
            series.total += loss.item() * weight
            series.weight += weight
            series.count += 1
        else:
            series.add_tensor(loss.detach().clone().reshape(()), weight)

    def names(self) -> set[str]:
        """Return the names that training has logged so far, of metric objects those that it logged them under."""
        return {*self.step.series, *self.epoch.series, *self.epoch.objects}

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
                # Added, not set: one rank may take back the sums of several.
                adds = reduce in ("mean", "sum")
                series.total = series.total + total if adds else _extreme(reduce, series.total, total)
                series.weight, series.count = series.weight + weight, series.count + count
                if prog_bar:
                    self.prog_bar.add(name)

    def _route(
        self, name: str, on_step: bool | None, on_epoch: bool | None, *, prog_bar: bool, reduce: str
    ) -> tuple[Series, ...]:
        """Choose, once per name and flags, the series that a value goes to."""
        if reduce not in ("mean", "sum", "min", "max"):
            raise MetricError(f"{name!r} is reduced by {reduce!r}.", fix="Use mean, sum, min or max.")
        if not isinstance(name, str) or not name:
            raise MetricError(f"{name!r} is not the name of a metric.", fix="Log under a text such as 'val/loss'.")
        if prog_bar:
            self.prog_bar.update({name, f"{name}_step", f"{name}_epoch"})
        if not self.training:
            return (self.evaluation.open(self.prefix + name + self.suffix, reduce, prog_bar=prog_bar),)
        if name == "train/loss":
            self._take_over_loss(reduce)
        on_step = True if on_step is None else on_step
        both = on_step and on_epoch
        routes = []
        if on_step:
            routes.append(self.step.open(f"{name}_step" if both else name, reduce, prog_bar=prog_bar))
        if on_epoch:
            routes.append(self.epoch.open(f"{name}_epoch" if both else name, reduce, prog_bar=prog_bar))
        return tuple(routes)

    def _take_over_loss(self, reduce: str) -> None:
        """Let the module log ``train/loss`` itself from here on, in whatever way it likes."""
        self.logs_loss = True
        if self._loss is not None and self._loss.reduce != reduce:
            del self.step.series["train/loss"]

    def _log_object(self, name: str, metric: Any, on_step: bool | None, on_epoch: bool | None) -> None:
        """Keep a torchmetrics object until its epoch ends; its value of this batch goes to the step series.

        In training, too, the epoch's value is the default: it is what such an object is for.
        """
        table = self.epoch if self.training else self.evaluation
        both = bool(on_step and on_epoch and self.training)
        table.resets[id(metric)] = metric
        require_own_object(table.objects, name, metric, self.suffix)
        if on_epoch is not False or not self.training:
            table.objects[self.prefix + name + ("_epoch" if both else "") + self.suffix] = metric
        if not (self.training and on_step) or self.muted:
            return
        members = metric.items(keep_base=False, copy_state=False) if hasattr(metric, "items") else [("", metric)]
        for key, member in members:
            value = getattr(member, "_forward_cache", None)
            if isinstance(value, Tensor):
                label = f"{name}/{key}" if key else name
                self.log(f"{label}_step" if on_epoch is not False else label, value, on_step=True, on_epoch=False)


def _number(name: str, value: Any) -> float:
    """Return any kind of number as a float: numpy's scalars and arrays of one element, fractions, booleans."""
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, dict):
        raise _not_a_number(name, "a dict", "Use log_dict.")
    if getattr(value, "size", 1) == 1 and not isinstance(value, str):
        try:
            return float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError):
            pass
    raise _not_a_number(name, f"a {type(value).__name__}", "Log a number, a scalar tensor or a Metric.")


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
