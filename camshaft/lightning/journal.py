"""Keep what ``self.log`` is given: values of steps as they come, and reductions over an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from camshaft.batches import batch_size_of
from camshaft.lightning.calling import LOGS_EPOCH_ONLY, STEP_HOOKS
from camshaft.lightning.errors import MisconfigurationException

if TYPE_CHECKING:
    from camshaft.lightning.trainer import Trainer

_REDUCTIONS = {
    "mean": "mean", "avg": "mean", torch.mean: "mean", "sum": "sum", torch.sum: "sum", sum: "sum",
    "min": "min", torch.min: "min", min: "min", "max": "max", torch.max: "max", max: "max",
}  # fmt: skip


@dataclass(slots=True, eq=False)
class Entry:
    """One name that one hook logs.

    ``value`` is what the last step logged; ``total`` and ``weight`` are what the epoch has so far, and
    ``reduced`` its value over all ranks, once that was asked for.
    """

    name: str
    suffix: str
    reduce: str
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    main_only: bool
    metric: Any = None
    value: Tensor | None = None
    total: Tensor | None = None
    weight: float = 0.0
    reduced: Tensor | None = None

    def update(self, value: Tensor, weight: float) -> None:
        """Take a value of a step that stands for ``weight`` samples."""
        self.value, self.reduced = value, None
        if not self.on_epoch:
            return
        exact = value.double() if value.is_floating_point() and value.device.type != "mps" else value
        if self.reduce == "mean":
            exact = exact * weight
        if self.total is None:
            self.total = exact
        elif self.reduce in ("mean", "sum"):
            self.total = self.total + exact
        else:
            self.total = torch.minimum(self.total, exact) if self.reduce == "min" else torch.maximum(self.total, exact)
        self.weight += weight

    def local(self) -> Tensor | None:
        """Return the epoch's value of this rank alone."""
        if self.total is None:
            return None
        value = self.total / self.weight if self.reduce == "mean" and self.weight else self.total
        return value.float() if value.dtype == torch.float64 else value

    def step_value(self) -> Tensor | None:
        """Return the value of the last step."""
        if self.metric is not None:
            cached = getattr(self.metric, "_forward_cache", None)
            return cached if isinstance(cached, Tensor) else None
        return self.value

    def forked(self, on_step: bool) -> str:
        """Return the name under which a logger gets it: both kinds of value need two names."""
        kind = ("_step" if on_step else "_epoch") if self.on_step and self.on_epoch else ""
        return f"{self.name}{kind}{self.suffix}"

    @property
    def full_name(self) -> str:
        """The name that callbacks monitor."""
        return f"{self.name}{self.suffix}"


class Book:
    """The entries of one loop, training's or an evaluation's."""

    def __init__(self) -> None:
        self.entries: dict[tuple[Any, ...], Entry] = {}

    def values(self, *, on_step: bool, training: bool) -> dict[str, dict[str, Any]]:
        """Return what callbacks, loggers and the progress bar see: of the last step, or of the epoch."""
        seen: dict[str, dict[str, Any]] = {"callback": {}, "log": {}, "pbar": {}}
        for entry in self.entries.values():
            value = entry.step_value() if on_step else _epoch_value(entry)
            if value is None or not (entry.on_step if on_step else entry.on_epoch):
                continue
            name = entry.forked(on_step)
            if entry.logger:
                seen["log"][name] = value
            if training or not on_step:
                seen["callback"][entry.full_name] = value
                seen["callback"][name] = value
            if entry.prog_bar:
                seen["pbar"][name] = value
        return seen

    def reduce(self, strategy: Any) -> None:
        """Reduce over all ranks what was logged since. Every rank calls this, at the same point."""
        open_entries = {
            (e.name, e.suffix, fx): e
            for (fx, *_), e in self.entries.items()
            if e.on_epoch and e.reduced is None
        }
        for entry in open_entries.values():
            if entry.metric is not None:
                entry.reduced = _computed(entry.metric)
        tensors = {key: entry for key, entry in open_entries.items() if entry.metric is None}
        if strategy.world_size == 1:
            for entry in tensors.values():
                entry.reduced = entry.local()
            return
        own = {
            key: (e.reduce, float(e.total), e.weight)
            for key, e in tensors.items()
            if e.total is not None and not e.main_only
        }
        merged = _merge(strategy.gather_data(own))
        for key, entry in tensors.items():
            entry.reduced = torch.tensor(merged[key]) if key in merged else entry.local()

    def reset(self) -> None:
        """Forget everything, and reset the metric objects that were logged."""
        for entry in self.entries.values():
            if entry.metric is not None:
                entry.metric.reset()
        self.entries.clear()


def _epoch_value(entry: Entry) -> Tensor | None:
    if entry.reduced is not None:
        return entry.reduced
    return _computed(entry.metric) if entry.metric is not None else entry.local()


def _computed(metric: Any) -> Any:
    value = metric.compute()
    return value if not isinstance(value, Tensor) or value.numel() == 1 else None


def _merge(ranks: list[Mapping[Any, tuple[str, float, float]]]) -> dict[Any, float]:
    merged: dict[Any, tuple[str, float, float]] = {}
    for own in ranks:
        for key, (reduce, total, weight) in own.items():
            if key not in merged:
                merged[key] = (reduce, total, weight)
                continue
            _, sofar, count = merged[key]
            if reduce in ("mean", "sum"):
                merged[key] = (reduce, sofar + total, count + weight)
            elif math.isnan(sofar) or math.isnan(total):
                merged[key] = (reduce, math.nan, count + weight)
            else:
                merged[key] = (reduce, (min if reduce == "min" else max)(sofar, total), count + weight)
    return {key: total / weight if reduce == "mean" and weight else total for key, (reduce, total, weight) in merged.items()}


class Journal:
    """All that a trainer's run logs. ``epoch_over`` says whether values are the epoch's or the last step's."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.training = Book()
        self.evaluation = Book()
        self.active: Book = self.training
        self.epoch_over = True
        self.batch: Any = None
        self.muted = False
        self.suffix: int | None = None
        self._size: int | None = None
        self._callback: dict[str, Tensor] = {}
        self._logged: dict[str, Tensor] = {}
        self._bar: dict[str, Any] = {}

    # -- what hooks log ----------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        *,
        prog_bar: bool,
        logger: bool,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Any,
        sync_dist: bool,
        add_dataloader_idx: bool,
        batch_size: int | None,
        rank_zero_only: bool,
    ) -> None:
        """Record a value under the rules of the hook that runs."""
        fx = self._trainer.caller.current
        on_step, on_epoch = _when(fx, name, on_step, on_epoch)
        if self.muted and not hasattr(value, "compute"):
            return
        suffix = f"/dataloader_idx_{self.suffix}" if add_dataloader_idx and self.suffix is not None else ""
        key = (fx, name, suffix)
        entry = self.active.entries.get(key)
        if entry is None:
            entry = Entry(
                name, suffix, _reduction(name, reduce_fx), on_step, on_epoch, prog_bar, logger, rank_zero_only
            )
            self.active.entries[key] = entry
        if hasattr(value, "compute"):
            entry.metric, entry.reduced = value, None
            return
        tensor = self._tensor(name, value)
        if sync_dist and self._trainer.engine.world_size > 1 and on_step:
            tensor = self._trainer.engine.reduce(tensor.clone(), "mean")
        entry.update(tensor, self._weight(batch_size) if entry.reduce == "mean" and entry.on_epoch else 1.0)

    def _tensor(self, name: str, value: Any) -> Tensor:
        if isinstance(value, dict):
            raise MisconfigurationException(f"{name!r} was logged as a dict.", fix="Use self.log_dict.")
        device = self._trainer.lightning_module.device
        try:
            tensor = value.detach().clone() if isinstance(value, Tensor) else torch.as_tensor(value, device=device)
        except (TypeError, ValueError, RuntimeError):
            raise _not_a_number(name, f"a {type(value).__name__}") from None
        if not isinstance(value, Tensor) and tensor.dtype == torch.float64:
            tensor = tensor.to(torch.get_default_dtype())
        if tensor.numel() != 1:
            raise _not_a_number(name, f"a tensor of shape {tuple(tensor.shape)}")
        tensor = tensor.squeeze()
        return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())

    def _weight(self, given: int | None) -> float:
        if given is not None:
            return float(given)
        if self._size is None:
            self._size = batch_size_of(self.batch) if self.batch is not None else 1
        return float(self._size)

    # -- what the loops tell -----------------------------------------------------------------------

    def begin_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """Note the batch in hand: values of hooks that come are those of a step."""
        self.batch, self._size, self.epoch_over, self.suffix = batch, None, False, dataloader_idx

    def end_batch(self) -> None:
        """Let go of the batch, and keep what its steps logged."""
        self.refresh()
        self.batch = None

    def end_epoch(self) -> None:
        """Reduce over all ranks; from here on values are the epoch's. Every rank calls this."""
        self.epoch_over, self.suffix, self.batch, self._size = True, None, None, None
        self.active.reduce(self._trainer.engine)
        self.refresh()

    def refresh(self) -> None:
        """Bring the three views up to date."""
        seen = self.active.values(on_step=not self.epoch_over, training=self.active is self.training)
        self._callback.update(seen["callback"])
        self._logged.update(seen["log"])
        self._bar.update(seen["pbar"])

    def to_log(self) -> dict[str, Tensor]:
        """Return what loggers get now."""
        return self.active.values(on_step=not self.epoch_over, training=self.active is self.training)["log"]

    def evaluating(self) -> Iterator[None]:
        """Switch to the book of an evaluation, and back."""
        before = (self.active, self.epoch_over, self.batch, self._size, self.suffix)
        self.evaluation.reset()
        self.active, self.epoch_over = self.evaluation, True
        try:
            yield
        finally:
            self.active, self.epoch_over, self.batch, self._size, self.suffix = before

    def save(self) -> list[list[Any]]:
        """Return what the running epoch has so far, as plain data; metric objects keep their own state."""
        return [
            [fx, e.name, e.suffix, e.reduce, e.on_step, e.on_epoch, e.prog_bar, e.logger, e.main_only,
             None if e.total is None else e.total.item(), e.weight]
            for (fx, *_), e in self.training.entries.items()
            if e.metric is None
        ]  # fmt: skip

    def load(self, saved: list[list[Any]]) -> None:
        """Take back what ``save`` returned."""
        for fx, name, suffix, *rest, total, weight in saved:
            entry = Entry(name, suffix, *rest, weight=weight)
            entry.total = None if total is None else torch.tensor(total, dtype=torch.float64)
            self.training.entries[fx, name, suffix] = entry

    def know(self, metrics: Mapping[str, float]) -> None:
        """Take what a run knew when it was saved, for callbacks and schedulers that monitor it."""
        self._callback.update({name: torch.tensor(value) for name, value in metrics.items()})

    def clear(self) -> None:
        """Forget all views: a new run begins, or a sanity check is over."""
        self.training.reset()
        self.evaluation.reset()
        self._callback, self._logged, self._bar = {}, {}, {}

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """What callbacks monitor."""
        self.refresh()
        return self._callback

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """What loggers were given."""
        self.refresh()
        return self._logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What the progress bar shows."""
        self.refresh()
        return {name: float(value) for name, value in self._bar.items()}


def _when(fx: str | None, name: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    """Return the defaults of a hook.

    Raises:
        MisconfigurationException: nothing may be logged there, or not like that.
    """
    if fx in STEP_HOOKS:
        evaluates = fx.startswith(("validation_", "test_", "on_validation_", "on_test_"))
        on_step = not evaluates if on_step is None else on_step
        on_epoch = evaluates if on_epoch is None else on_epoch
    elif fx in LOGS_EPOCH_ONLY:
        if on_step:
            raise MisconfigurationException(
                f"self.log({name!r}, on_step=True) was called in {fx}.",
                why="No step is in hand there.",
                fix="Leave on_step out.",
            )
        on_step, on_epoch = False, True if on_epoch is None else on_epoch
    else:
        raise MisconfigurationException(
            f"self.log({name!r}) was called in {fx or 'no hook of the loop'}.",
            why="No loop is running there that the value would belong to.",
            fix="Log in a step, or in a hook of a batch or of an epoch; or hand it to self.logger directly.",
        )
    if not on_step and not on_epoch:
        raise MisconfigurationException(
            f"self.log({name!r}, on_step=False, on_epoch=False) goes nowhere.", fix="Set one of them."
        )
    return on_step, on_epoch


def _reduction(name: str, reduce_fx: Any) -> str:
    reduce = _REDUCTIONS.get(reduce_fx)
    if reduce is None:
        raise MisconfigurationException(
            f"{name!r} is logged with reduce_fx={reduce_fx!r}.",
            why="Only mean, sum, min and max can be taken over ranks and batches.",
            fix="Use one of them, or log a torchmetrics object.",
        )
    return reduce


def _not_a_number(name: str, kind: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"{name!r} was logged as {kind}.", why="A logged value is one number.", fix="Take its mean or sum first."
    )

