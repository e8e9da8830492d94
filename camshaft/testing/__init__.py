"""Test what is built on camshaft: record events, train tiny modules, start processes, check contracts."""

from camshaft.testing.contracts import check_callback as check_callback
from camshaft.testing.contracts import check_strategies as check_strategies
from camshaft.testing.contracts import check_strategy as check_strategy
from camshaft.testing.processes import run_processes as run_processes
from camshaft.testing.recorder import Recorder as Recorder
from camshaft.testing.tiny import ManualTiny as ManualTiny
from camshaft.testing.tiny import StopAt as StopAt
from camshaft.testing.tiny import TinyData as TinyData
from camshaft.testing.tiny import TinyIterable as TinyIterable
from camshaft.testing.tiny import TinyModule as TinyModule
from camshaft.testing.tiny import tiny_run as tiny_run

__all__ = [
    "ManualTiny",
    "Recorder",
    "StopAt",
    "TinyData",
    "TinyIterable",
    "TinyModule",
    "check_callback",
    "check_strategies",
    "check_strategy",
    "run_processes",
    "tiny_run",
]
