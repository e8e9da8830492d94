"""Continue a run: find its checkpoint, compare the recipes, and put everything back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from camshaft.assembly import Assembled
from camshaft.checkpoint.capture import restore
from camshaft.checkpoint.reader import Reader
from camshaft.errors import CheckpointError
from camshaft.recipe.writing import read_plain
from camshaft.rundir import RunDirectory
from camshaft.terminal import say
from camshaft.worker import was_restarted

# A change below these makes "the same run, continued" untrue: other weights, other samples, another order.
_BINDING = ("module", "data", "batch_size", "seed", "callbacks.seed")
# These may change freely: they say how long, where to and how a run goes on, not what it is.
_FREE = (
    "resume", "allow_changes", "max_epochs", "max_steps", "max_time", "runs_dir", "name", "launch", "plan", "choices",
)  # fmt: skip


def resume(assembled: Assembled, directory: RunDirectory | None) -> None:
    """Restore the newest whole checkpoint of the run, or the one that ``resume`` names. Every rank calls this.

    Raises:
        CheckpointError: the recipe changed in a way that would make it another run; the changes are listed.
    """
    settings, state = assembled.parts.settings, assembled.state
    if directory is None or state.store is None or (settings.resume == "never" and not was_restarted()):
        return
    wanted = Path(settings.resume)
    is_run = settings.resume in ("auto", "never") or (wanted / "checkpoints").is_dir()
    found = state.store.latest() if is_run else state.store.resolve(settings.resume)
    if found is None:
        return
    is_main = state.strategy.is_main
    for passed in found.passed_over:
        if is_main:
            say(f"Passed over {passed.path}: {passed.why}")
    changes = _changes(directory, assembled.parts.recipe)
    _require_same(changes, settings.allow_changes, found.path)
    with Reader(found.path) as reader:
        restore(state, assembled.hooks, reader)
        saved = reader.data("data")
        if assembled.data is not None and isinstance(saved, dict) and saved:
            assembled.data.load_state_dict(dict(saved))
    if is_main:
        for path, (before, after) in changes.items():
            say(f"  changed: {path}: {before!r} -> {after!r}")
        if changes:
            directory.write(f"recipe.until-step-{state.progress.step}.yaml", directory.recipe())
            directory.write("recipe.yaml", assembled.parts.recipe)
        if assembled.parts.provenance is not None:
            # The code, the packages and the machine may be others than those that began the run.
            record = json.dumps(assembled.parts.provenance(str(found.path)), indent=2)
            directory.write(f"provenance.from-step-{state.progress.step}.json", f"{record}\n")
        say(f"Resumed from {found.path} at step {state.progress.step}.")


def _require_same(changes: Mapping[str, Any], allowed: list[str], where: object) -> None:
    binding = [path for path in changes if _is_below(path, _BINDING) and not _is_below(path, tuple(allowed))]
    if binding:
        listed = "; ".join(f"{path}: {changes[path][0]!r} -> {changes[path][1]!r}" for path in binding)
        raise CheckpointError(
            f"{where} belongs to another recipe: {listed}.",
            why="The run would go on with other weights, other data or another order than it began with.",
            fix=f"Undo the change, start anew with resume=never, or accept it with +allow_changes=[{binding[0]}].",
        )


def _changes(directory: RunDirectory, recipe: str) -> dict[str, tuple[Any, Any]]:
    """Return what differs between the run's recipe and this one: path to (before, after)."""
    earlier = directory.recipe()
    if not earlier or not recipe or earlier == recipe:
        return {}
    before, after = dict(_flat(read_plain(earlier))), dict(_flat(read_plain(recipe)))
    return {
        path: (before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path) and not _is_below(path, _FREE)
    }


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _is_below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}.") for root in roots)
