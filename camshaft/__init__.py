"""camshaft trains PyTorch modules: an event-driven loop, callbacks composed in a recipe, any parallelism.

Names load on first use, so that ``import camshaft`` costs nothing and does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from camshaft.callback import Callback as Callback
    from camshaft.callback import main_process_only as main_process_only
    from camshaft.data import DataModule as DataModule
    from camshaft.errors import CallbackError as CallbackError
    from camshaft.errors import CamshaftError as CamshaftError
    from camshaft.errors import CheckpointError as CheckpointError
    from camshaft.errors import DataError as DataError
    from camshaft.errors import LossError as LossError
    from camshaft.errors import MetricError as MetricError
    from camshaft.errors import ModuleError as ModuleError
    from camshaft.errors import RecipeError as RecipeError
    from camshaft.errors import StateError as StateError
    from camshaft.errors import StrategyError as StrategyError
    from camshaft.loggers.base import Logger as Logger
    from camshaft.loggers.base import Record as Record
    from camshaft.loggers.base import Run as Run
    from camshaft.module import Module as Module
    from camshaft.schedule import Schedule as Schedule
    from camshaft.session import Result as Result
    from camshaft.session import run as run
    from camshaft.state import Checkpoint as Checkpoint
    from camshaft.state import State as State
    from camshaft.strategies.base import Strategy as Strategy

__all__ = [
    "Callback",
    "CallbackError",
    "CamshaftError",
    "Checkpoint",
    "CheckpointError",
    "DataError",
    "DataModule",
    "Logger",
    "LossError",
    "MetricError",
    "Module",
    "ModuleError",
    "RecipeError",
    "Record",
    "Result",
    "Run",
    "Schedule",
    "State",
    "StateError",
    "Strategy",
    "StrategyError",
    "main_process_only",
    "run",
]

_HOMES = {
    "Callback": "callback", "main_process_only": "callback", "DataModule": "data", "CallbackError": "errors",
    "CamshaftError": "errors", "CheckpointError": "errors", "DataError": "errors", "LossError": "errors",
    "MetricError": "errors", "ModuleError": "errors", "RecipeError": "errors", "StateError": "errors",
    "StrategyError": "errors", "Logger": "loggers.base", "Record": "loggers.base", "Run": "loggers.base",
    "Module": "module", "Schedule": "schedule", "Result": "session", "run": "session", "Checkpoint": "state",
    "State": "state", "Strategy": "strategies.base",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'camshaft' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"camshaft.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
