"""Define the errors that users see: each says what happened, why it matters and how to fix it."""

from __future__ import annotations


class CamshaftError(Exception):
    """Carry ``what`` happened (with the value), ``why`` it matters and how to ``fix`` it.

    Each part is one sentence or two. ``str(error)`` puts ``what`` on the first line and the rest,
    indented, below it.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what = what
        self.why = why
        self.fix = fix
        super().__init__(what, why, fix)

    def __str__(self) -> str:
        rest = " ".join(part for part in (self.why, self.fix) if part)
        return f"{self.what}\n  {rest}" if rest else self.what

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process boundaries by pickle, which would drop the keyword arguments.
        return (_rebuild, (type(self), self.what, self.why, self.fix))


def _rebuild(kind: type[CamshaftError], what: str, why: str, fix: str) -> CamshaftError:
    return kind(what, why=why, fix=fix)


class RecipeError(CamshaftError):
    """A recipe, or an argument that a recipe passes, is wrong."""


class ModuleError(CamshaftError):
    """A user's module breaks the contract of ``Module``."""


class DataError(CamshaftError):
    """A loader, dataset or batch cannot be used as asked."""


class CallbackError(CamshaftError):
    """A callback breaks the contract of ``Callback``."""


class StrategyError(CamshaftError):
    """A parallelism strategy cannot do what was asked."""


class CheckpointError(CamshaftError):
    """A checkpoint is missing, incomplete, damaged or does not fit."""


class StateError(CamshaftError):
    """Training state and its owner disagree: names, shapes or counts."""


class MetricError(CamshaftError):
    """A metric was logged, monitored or reduced in a way that has no meaning."""


class LossError(CamshaftError):
    """A loss cannot be trained on: not a scalar, no gradient, or not finite."""
