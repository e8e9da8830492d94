"""Keep the directory of a run: what was run, how it stands, and which earlier run to continue."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from camshaft.errors import RecipeError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(slots=True)
class RunDirectory:
    """``runs/<name>/<time>/``: recipe, provenance, status, metrics, logs and checkpoints of one run.

    Only the main process writes. Every file appears whole: it is written aside and renamed.
    """

    path: Path
    status: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def create(cls, runs_dir: Path, name: str) -> RunDirectory:
        """Make a new directory, named by the time and made unique.

        Raises:
            RecipeError: the name cannot be a directory's, or the place cannot be written to.
        """
        if not _NAME.fullmatch(name):
            raise RecipeError(
                f"the run's name is {name!r}.",
                why="It becomes a directory, and must not leave runs_dir.",
                fix="Use letters, digits, '.', '_' and '-'.",
            )
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
        for attempt in range(1000):
            path = runs_dir / name / (stamp if attempt == 0 else f"{stamp}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise RecipeError(
                    f"the run directory {path} cannot be made: {error.strerror}.",
                    why="Metrics and checkpoints would have nowhere to go.",
                    fix="Set runs_dir to a directory that you can write to.",
                ) from error
            return cls(path)
        raise RecipeError(
            f"{runs_dir / name} already holds a thousand runs of {stamp}.", fix="Give the run another name."
        )

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open the directory of an earlier run."""
        return cls(path, read_status(path))

    def write(self, name: str, text: str) -> None:
        """Write a text file whole."""
        write_whole(self.path / name, text)

    def report(self, **changes: Any) -> None:
        """Update ``status.json``: state, step, epoch, best, error and whatever else is known."""
        if "state" in changes:
            # A run that goes on has no error any more.
            self.status.pop("error", None)
        self.status.update(changes, time=time.time(), pid=os.getpid())
        self.write("status.json", json.dumps(_finite(self.status), indent=2, allow_nan=False) + "\n")

    def recipe(self) -> str:
        """Return the resolved recipe of the run, or nothing when it was not started from one."""
        try:
            return (self.path / "recipe.yaml").read_text(encoding="utf-8")
        except OSError:
            return ""

    @property
    def checkpoints(self) -> Path:
        """Where the run's checkpoints lie."""
        return self.path / "checkpoints"


def _finite(value: Any) -> Any:
    """Return a record with null for every number that JSON cannot write."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content in one step, so that no reader and no crash sees half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_status(path: Path) -> dict[str, Any]:
    """Return the status of a run directory; empty when it has none that can be read."""
    try:
        status = json.loads((path / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def newest_run(runs_dir: Path, name: str) -> Path | None:
    """Return the directory of the newest run of a name that has a checkpoint."""
    parent = runs_dir / name
    if not parent.is_dir():
        return None
    runs = [path for path in parent.iterdir() if any((path / "checkpoints").glob("step_*"))]
    return max(runs, key=lambda path: (path.stat().st_ctime, path.name), default=None)


def continuable_run(runs_dir: Path, name: str, recipe: str) -> tuple[Path | None, str]:
    """Return the newest run of a name if ``resume: auto`` may continue it, and a sentence when it may not.

    It may when that run did not finish and was made from the same recipe.
    """
    path = newest_run(runs_dir, name)
    if path is None or read_status(path).get("state") == "finished":
        return None, ""
    try:
        earlier = (path / "recipe.yaml").read_text(encoding="utf-8")
    except OSError:
        return None, f"{path} has no recipe.yaml, so it is not continued."
    if earlier != recipe:
        return None, f"{path} did not finish, but its recipe differs: this is a new run. resume={path} continues it."
    return path, ""
