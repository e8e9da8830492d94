"""Choose, for all ranks, where a run lies: a new directory, the one to continue, or a checkpoint that was named."""

from __future__ import annotations

import json
from pathlib import Path

from camshaft.assembly import Parts
from camshaft.checkpoint.store import Store
from camshaft.errors import CamshaftError, CheckpointError
from camshaft.rundir import RunDirectory, continuable_run, newest_run
from camshaft.state import Stage
from camshaft.strategies.base import Strategy
from camshaft.worker import was_restarted


def choose_directory(parts: Parts, stage: Stage) -> tuple[RunDirectory | None, str]:
    """Choose, on the main process and for all, the directory of the run: a new one, or the one to continue."""
    strategy = parts.strategy
    chosen: tuple[str | None, str, CamshaftError | None] = (None, "", None)
    if strategy.is_main:
        try:
            path, message = _directory(parts, stage)
            chosen = (None if path is None else str(path), message, None)
        except CamshaftError as error:
            chosen = (None, "", error)
    path_text, message, problem = strategy.broadcast_object(chosen)
    if problem is not None:
        raise problem
    return (None if path_text is None else RunDirectory.open(Path(path_text))), message


def find_for_all(wanted: str, directory: RunDirectory | None, strategy: Strategy) -> Path:
    """Find the checkpoint on the main process, which alone may hold the lock of the directory, for all."""
    found: Path | CamshaftError | None = None
    if strategy.is_main:
        try:
            found = find_checkpoint(wanted, directory)
        except CamshaftError as error:
            found = error
    found = strategy.broadcast_object(found)
    if isinstance(found, CamshaftError):
        raise found
    assert found is not None
    return found


def find_checkpoint(wanted: str, directory: RunDirectory | None) -> Path:
    """Return the directory of a checkpoint: a path to it, to its run, or "last" or "best" of ``directory``.

    "best" falls back on "last" where the run monitored nothing.
    """
    path = Path(wanted)
    if (path / "manifest.json").is_file():
        return path
    store_dir = path / "checkpoints" if (path / "checkpoints").is_dir() else None
    if store_dir is None:
        if wanted not in ("last", "best") or directory is None:
            raise CheckpointError(
                f"there is no checkpoint {wanted!r}.",
                fix="Give the path of a checkpoint or a run directory, or 'last' or 'best' of a run that saved one.",
            )
        store_dir = directory.checkpoints
    store = Store(store_dir, read_only=True)
    names = [wanted, "last"] if wanted == "best" else [wanted if wanted == "last" else "last"]
    for name in names:
        try:
            found = store.resolve(name)
        except CheckpointError:
            if name == names[-1]:
                raise
            continue
        if found is not None:
            return Path(str(found.path))
    raise CheckpointError(f"{store_dir} holds no checkpoint.", fix="Train first.")


def _directory(parts: Parts, stage: Stage) -> tuple[Path | None, str]:
    settings, name = parts.settings, parts.name
    runs_dir, message = Path(settings.runs_dir), ""
    if stage != "fit":
        if parts.run_dir is not None:
            return parts.run_dir, ""
        return newest_run(runs_dir, name), ""
    # A group that its launcher started again after a failure is the same run.
    if settings.resume == "auto" or (settings.resume == "never" and was_restarted()):
        path, message = continuable_run(runs_dir, name, parts.recipe)
        if path is not None:
            return path, message
    elif settings.resume != "never":
        return _run_of(Path(settings.resume)), ""
    created = RunDirectory.create(runs_dir, name)
    created.write("recipe.yaml", parts.recipe)
    created.write("recipe.source.yaml", parts.source)
    if parts.provenance is not None:
        created.write("provenance.json", json.dumps(parts.provenance(None), indent=2) + "\n")
    return created.path, message


def _run_of(path: Path) -> Path:
    """Return the run directory that a path to it, or to one of its checkpoints, means."""
    if (path / "checkpoints").is_dir():
        return path
    if path.parent.name == "checkpoints" and path.is_dir():
        return path.parent.parent
    raise CheckpointError(
        f"resume is {str(path)!r}, and there is no run or checkpoint.",
        fix="Give a run directory (runs/NAME/TIME), one of its checkpoints, auto or never.",
    )
