"""Declare ``Module``: the class a user writes."""

from __future__ import annotations

import copy
import difflib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from camshaft.errors import ModuleError
from camshaft.hparams import Hparams, check_plain, hyperparameters

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader


class Engine(Protocol):
    """What a running engine gives a module: sinks for what it logs, and manual optimization."""

    def log(
        self,
        name: str,
        value: Any,
        on_step: bool | None,
        on_epoch: bool | None,
        prog_bar: bool,
        batch_size: float | None,
        reduce: str,
    ) -> None:
        """Record a value of the current micro-batch."""

    def log_text(self, name: str, text: str) -> None:
        """Hand text to the loggers."""

    def log_image(self, name: str, image: Tensor) -> None:
        """Hand an image to the loggers."""

    def manual_backward(self, loss: Tensor) -> None:
        """Run backward as automatic optimization would."""

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers as manual optimization drives them."""

    @property
    def schedulers(self) -> list[LRScheduler]:
        """The learning-rate schedulers, in the order of ``configure_optimizers``."""

    @property
    def planned_steps(self) -> int | None:
        """Optimizer updates of the whole run."""


class Module(torch.nn.Module):
    """A model with its losses: override the steps, log what matters, and let a recipe do the rest.

    A module never asks which device, precision or parallelism it runs under. Anything else than the
    steps belongs in a callback.
    """

    automatic_optimization: bool = True
    # What is frozen and trains later, as (parameters by name, options of their group): a callback puts it here in
    # ``on_module``, for the recipe's optimizer and for averages.
    later_groups: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Any]]] = ()
    _engine: Engine | None = None
    _hparams: Hparams | None = None
    _steps: ClassVar[tuple[str, ...]] = ("training_step", "validation_step", "test_step", "predict_step")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._check_definition()

    # -- what a user overrides -------------------------------------------------------------------

    # A signature cannot say that the indices may be left out; this one lets a type checker accept all that may be
    # written: (batch), (batch, batch_idx) and, for evaluation, (batch, batch_idx, dataloader_idx=0).

    def training_step(self, batch: Any, /, *indices: Any, **named: Any) -> Any:
        """Return the loss of a micro-batch: a scalar, a (sum, weight) pair, a dict with 'loss', or None to skip.

        A scalar is the mean over the samples of ``batch``. A pair is the sum of the losses and what
        to divide it by, over all micro-batches and ranks of a step. ``batch_idx`` may be left out.
        """
        raise NotImplementedError

    def validation_step(self, batch: Any, /, *indices: Any, **named: Any) -> Any:
        """Evaluate a batch: log metrics. ``batch_idx`` and ``dataloader_idx`` may be left out."""
        raise NotImplementedError

    def test_step(self, batch: Any, /, *indices: Any, **named: Any) -> Any:
        """Evaluate a batch of the test split; as ``validation_step`` unless overridden."""
        return bind_step(self, "validation_step")(batch, *indices)

    def predict_step(self, batch: Any, /, *indices: Any, **named: Any) -> Any:
        """Return the predictions for a batch: tensors with one row a sample, alone or in a dict."""
        return self(batch)

    def batch_weight(self, batch: Any) -> float:
        """Return what a micro-batch weighs in its step, known before forward: for example its tokens.

        Where this is overridden, the weights of a step are summed over micro-batches and ranks, and
        a scalar loss is the mean over its own weight.
        """
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        """Return optimizers and schedulers, in any shape that Lightning accepts; None for none."""
        return None

    def train_dataloader(self) -> DataLoader[Any] | Iterable[Any] | None:
        """Return the training loader, when the module owns its data."""
        return None

    def val_dataloader(self) -> Any:
        """Return one validation loader or a list of them, when the module owns its data."""
        return None

    def test_dataloader(self) -> Any:
        """Return one test loader or a list of them, when the module owns its data."""
        return None

    def predict_dataloader(self) -> Any:
        """Return one loader to predict or a list of them, when the module owns its data."""
        return None

    # -- what a user calls -----------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        *,
        prog_bar: bool = False,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        batch_size: float | None = None,
        reduce: str = "mean",
    ) -> None:
        """Log a number, a scalar tensor, a ``torchmetrics`` Metric or a MetricCollection under ``name``.

        In training the default is ``on_step``: the mean since the last record, every ``log_every``
        steps. In evaluation it is ``on_epoch``: the mean over all samples of all ranks, weighted by
        ``batch_size`` (default: the samples of the batch), or what a Metric computes. With both, the
        names get ``_step`` and ``_epoch``. No host synchronisation happens here.
        ``reduce`` is mean, sum, min or max.
        """
        if self._engine is not None:
            self._engine.log(name, value, on_step, on_epoch, prog_bar, batch_size, reduce)

    def log_dict(self, values: Mapping[str, Any], **options: Any) -> None:
        """Log each entry as ``log`` does."""
        for name, value in values.items():
            self.log(name, value, **options)

    def log_text(self, name: str, text: str) -> None:
        """Hand text to every logger that takes text, at the current step."""
        if self._engine is not None:
            self._engine.log_text(name, text)

    def log_image(self, name: str, image: Tensor) -> None:
        """Hand an image to every logger that takes images: (C, H, W), floats in [0, 1]."""
        if self._engine is not None:
            self._engine.log_image(name, image)

    def optimizers(self) -> Any:
        """Return the optimizer, or the list of them when there are several, for manual optimization."""
        optimizers = self._attached.optimizers
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """Return the scheduler, the list of them when there are several, or None."""
        schedulers = self._attached.schedulers
        return schedulers[0] if len(schedulers) == 1 else (schedulers or None)

    def manual_backward(self, loss: Tensor) -> None:
        """Run backward on ``loss`` with the scaling that precision, accumulation and strategy need."""
        self._attached.manual_backward(loss)

    def save_hyperparameters(self, *names: str | Mapping[str, Any], ignore: Iterable[str] = ()) -> None:
        """Keep the arguments of ``__init__`` as ``hparams``: call it there, with no arguments for all.

        Names keep only those; a mapping is kept as it is. A base class keeps the arguments of the class
        derived from it too, so that ``hparams`` are what the object was made with.

        Raises:
            ModuleError: an argument is not plain data (numbers, text, None, lists, dicts); named, since
                a checkpoint could not hold it without running code on load. Or a name is no argument.
        """
        frame = inspect.currentframe()
        ignored = {ignore} if isinstance(ignore, str) else set(ignore)
        given = {k: v for entry in names if isinstance(entry, Mapping) for k, v in entry.items()}
        asked = [entry for entry in names if not isinstance(entry, Mapping)]
        chosen = given or hyperparameters(self, frame.f_back if frame is not None else None, asked)
        chosen = {name: value for name, value in chosen.items() if name not in ignored}
        for name, value in chosen.items():
            check_plain(f"{type(self).__name__}({name}=...)", name, value)
        # Copies: what happens to the arguments later is not what the object was made with.
        self.hparams.update(copy.deepcopy(chosen))

    @property
    def planned_steps(self) -> int | None:
        """Optimizer updates of the whole run, for a schedule in ``configure_optimizers``; None when unknown."""
        return self._attached.planned_steps

    @property
    def hparams(self) -> Hparams:
        """Hyper-parameters kept by ``save_hyperparameters``; empty when it was not called."""
        if self._hparams is None:
            object.__setattr__(self, "_hparams", Hparams())
        return self._hparams  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer; the CPU when there is none."""
        tensor = next(self.parameters(), next(self.buffers(), None))
        return torch.device("cpu") if tensor is None else tensor.device

    # -- what the engine calls -------------------------------------------------------------------

    def attach(self, engine: Engine | None) -> None:
        """Connect what the module logs to a running engine; None disconnects it."""
        # Not nn.Module.__setattr__: an engine is no submodule, and the entry must not be saved.
        object.__setattr__(self, "_engine", engine)

    def overrides(self, method: str) -> bool:
        """Say whether the user's class has its own ``method``."""
        return getattr(type(self), method) is not getattr(Module, method)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.pop("_engine", None)
        return state

    @property
    def _attached(self) -> Engine:
        if self._engine is None:
            raise ModuleError(
                f"{type(self).__name__} is not being trained.",
                why="Optimizers exist only while an engine runs the module.",
                fix="Call optimizers(), lr_schedulers() and manual_backward() inside training_step.",
            )
        return self._engine

    @classmethod
    def _check_definition(cls) -> None:
        """Refuse, at class definition, names that would silently never be called."""
        for name, value in vars(cls).items():
            if name.startswith("_") or not inspect.isfunction(value) or hasattr(Module, name):
                continue
            replacement = _REPLACED.get(name) or (_OF_CALLBACKS if _HOOK.match(name) else None)
            if replacement is not None:
                raise ModuleError(
                    f"{cls.__qualname__}.{name} is not called by camshaft.", why="It would never run.", fix=replacement
                )
            nearest = _SHORT.get(name) or difflib.get_close_matches(name, _OVERRIDABLE, n=1, cutoff=0.88)
            if nearest and getattr(cls, nearest[0]) is getattr(Module, nearest[0]):
                raise ModuleError(
                    f"{cls.__qualname__}.{name} looks like a misspelling.",
                    why="It would never be called.",
                    fix=f"Did you mean {nearest[0]!r}?",
                )


_REPLACED = {
    "training_epoch_end": "Log with on_epoch=True in training_step, or write a Callback with on_epoch_end.",
    "validation_epoch_end": "Log in validation_step: means are taken over the epoch. Or use on_validation_end.",
    "test_epoch_end": "Log in test_step: means are taken over the epoch. Or use a Callback's on_validation_end.",
    "validation_end": "Write a Callback with on_validation_end.",
    "optimizer_step": "Write a Callback with on_gradients or on_step, or set automatic_optimization = False.",
    "configure_optimizer": "Write configure_optimizers.",
}
_OF_CALLBACKS = "Write a Callback: its events are on_fit_start, on_epoch_start, on_step, on_validation_end and others."
_HOOK = re.compile(
    r"on_((train|validation|test|predict|fit|sanity_check)_(start|end|(batch|epoch|model)_\w+)|epoch_(start|end)"
    r"|(before|after)_(zero_grad|backward|optimizer_step|batch_transfer)|(save|load)_checkpoint|step(_start)?"
    r"|batch(_start|_end)?|backward|gradients|exception|checkpoint(_saved)?|restore|launch|module)$"
)
_OVERRIDABLE = (
    "training_step", "validation_step", "test_step", "predict_step", "batch_weight", "configure_optimizers",
    "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
)  # fmt: skip
_SHORT = {
    "train_step": ["training_step"], "val_step": ["validation_step"], "valid_step": ["validation_step"],
    "validate_step": ["validation_step"], "validation_dataloader": ["val_dataloader"],
    "training_dataloader": ["train_dataloader"], "prediction_step": ["predict_step"],
}  # fmt: skip


def bind_step(module: Module, name: str) -> Any:
    """Return ``step(batch, *indices)`` that passes only what the user's method takes.

    ``training_step`` is called with the batch's index, the others with their loader's index too.

    Raises:
        ModuleError: the method takes more than a batch, its index and its loader's index.
    """
    method = getattr(module, name)
    parameters = list(inspect.signature(method).parameters.values())
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return method
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in parameters[1:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    # An argument that has a default and another name is the user's own, and keeps its default.
    taken = [p for p in parameters[1:] if p in required or p.name in _INDICES]
    sources = _sources([p.name for p in taken])
    if not positional or sources is None:
        raise ModuleError(
            f"{type(module).__name__}.{name}{inspect.signature(method)} cannot be called.",
            why="A step gets a batch, its index, and the index of its loader.",
            fix=f"Write 'def {name}(self, batch)', and after it, if wanted, 'batch_idx' and 'dataloader_idx'.",
        )
    if name == "training_step" and sources == [0] and len(positional) == len(("batch", "batch_idx")):
        # As it is: a call less in every step.
        return method
    if [p.name for p in positional[1:]] == [p.name for p in taken]:
        return _by_position(method, sources)
    keys = [p.name for p in taken]
    return lambda batch, index, loader=0: method(
        batch, **{key: (index, loader)[source] for key, source in zip(keys, sources, strict=True)}
    )


_INDICES = {"batch_idx": 0, "dataloader_idx": 1}


def _sources(names: list[str]) -> list[int] | None:
    """Return which index each argument takes, by its name or else its place; None when there is none for it."""
    sources = [_INDICES.get(name, place) for place, name in enumerate(names)]
    known = len(set(sources)) == len(sources) <= len(_INDICES)
    return sources if known and "optimizer_idx" not in names else None


def _by_position(method: Any, sources: list[int]) -> Any:
    match sources:
        case []:
            return lambda batch, _index, _loader=0: method(batch)
        case [0]:
            return lambda batch, index, _loader=0: method(batch, index)
        case [1]:
            return lambda batch, _index, loader=0: method(batch, loader)
        case [1, 0]:
            return lambda batch, index, loader=0: method(batch, loader, index)
        case _:
            return method
