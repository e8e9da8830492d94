"""Check that a callback, or a strategy, keeps its contract."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from camshaft.callback import Callback
from camshaft.strategies.base import Strategy
from camshaft.strategies.single import Single
from camshaft.testing.drive import Driven, drive
from camshaft.testing.processes import run_processes
from camshaft.testing.tiny import StopAt, TinyData, TinyModule, tiny_run

_STEPS, _STOP = 8, 4


def check_callback(factory: Callable[[], Callback], *, changes_training: bool = False) -> None:
    """Check what every callback promises; ``factory`` makes a new one each time.

    Its state is plain JSON and comes back whole; a run that stops in the middle of an epoch and is
    resumed ends with the same weights and the same state, bit for bit; and, unless
    ``changes_training``, the weights are those of a run without it.

    Raises:
        AssertionError: it does not; the message says which promise is broken.
    """
    with_it = _fit(callbacks := {"checked": factory()}, {})
    kept = callbacks["checked"].state_dict()
    text = json.dumps(kept)
    assert json.loads(text) == kept, f"state_dict changes when it is written as JSON: {kept!r}"
    again = factory()
    again.load_state_dict(json.loads(text))
    assert again.state_dict() == kept, f"load_state_dict gave {again.state_dict()!r} back, not {kept!r}"
    if not changes_training:
        _require_equal(with_it, _fit({}, {}), "a run without the callback has other weights")
    with tempfile.TemporaryDirectory() as place:
        settings = {"runs_dir": place, "checkpoint": {"every": None}}
        first = _run({"checked": factory(), "stop": StopAt(_STOP)}, settings)
        resumed = {"checked": factory()}
        weights = _fit(resumed, {**settings, "resume": str(first.run_dir)})
    _require_equal(with_it, weights, "a resumed run ends with other weights")
    found = resumed["checked"].state_dict()
    assert found == kept, f"a resumed run ends with state {found!r}, an uninterrupted one with {kept!r}"


def _run(callbacks: dict[str, Callback], settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    module = TinyModule(dropout=0.1)
    data = TinyData(samples=22)
    return tiny_run(module, data, callbacks=callbacks, **({"max_steps": _STEPS, "log_every": 2} | settings))


def _fit(callbacks: dict[str, Callback], settings: dict[str, Any]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = _run(callbacks, settings).module.state_dict()
    return weights


def _require_equal(left: dict[str, Tensor], right: dict[str, Tensor], what: str) -> None:
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"{what}: {', '.join(different)}"


def check_strategy(
    factory: Callable[[], Strategy],
    n: int = 1,
    *,
    precision: str = "fp32",
    tolerance: float = 1e-5,
    timeout_s: float = 120,
) -> None:
    """Check what every strategy promises, on ``n`` processes that start by themselves.

    Against ``single`` on the joined batch: losses, gradient norms before clipping, weights after
    updates with accumulation and clipping, within ``tolerance`` (the norm of the difference of a tensor
    over its norm). By itself: collectives and agreement give every rank the same; another set of
    weights is swapped in and out again exactly; a checkpoint restores weights and optimizer, so that
    the next updates repeat bit for bit; a rank whose step gave no loss holds nobody up.

    ``factory`` is importable where n > 1. A strategy with a device of its own should be made with
    ``device="cpu"``, or have one for each process.

    Raises:
        AssertionError: it does not; the message says which promise is broken.
    """
    check_strategies({"the strategy": factory}, n, precision=precision, tolerance=tolerance, timeout_s=timeout_s)


def check_strategies(
    factories: Mapping[str, Callable[[], Strategy]],
    n: int = 1,
    *,
    precision: str = "fp32",
    tolerance: float = 1e-5,
    timeout_s: float = 120,
) -> None:
    """Do as ``check_strategy`` with several, one after another in the same processes.

    Each therefore has to leave them as it found them.

    Raises:
        AssertionError: one of them breaks a promise; the message names it.
    """
    expected = drive(Single, None, precision)
    with tempfile.TemporaryDirectory() as place:
        # A strategy of several processes leaves traces in the process: it always gets its own.
        ranks: list[list[Driven]] = run_processes(n, _drive_all, factories, place, precision, timeout_s=timeout_s)
    for rank, outcomes in enumerate(ranks):
        for name, outcome in zip(factories, outcomes, strict=True):
            _compare(outcome, expected, f"{name}, rank {rank}", tolerance)


def _drive_all(factories: Mapping[str, Callable[[], Strategy]], place: str, precision: str) -> list[Driven]:
    outcomes = []
    for number, (name, factory) in enumerate(factories.items()):
        try:
            outcomes.append(drive(factory, str(Path(place) / str(number)), precision))
        except Exception as error:
            error.add_note(f"This was {name}.")
            raise
    return outcomes


def _compare(found: Driven, expected: Driven, who: str, tolerance: float) -> None:
    for name in ("losses", "norms"):
        for step, (left, right) in enumerate(zip(getattr(found, name), getattr(expected, name), strict=True)):
            close = abs(left - right) <= tolerance * max(abs(right), 1e-12)
            assert close, f"{who}, step {step}: {name} {left!r}, and single has {right!r}"
    assert found.weights.keys() == expected.weights.keys(), f"{who} has other names: {sorted(found.weights)}"
    for name, weight in expected.weights.items():
        distance = float((found.weights[name] - weight).norm() / weight.norm().clamp_min(1e-12))
        assert distance <= tolerance, f"{who}: {name} is {distance:.2e} away from single's"
