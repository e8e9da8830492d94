"""List run directories, and compare two: ``python -m camshaft.runs [diff A B]``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camshaft.cli import guard, say
from camshaft.errors import RecipeError


@dataclass(frozen=True, slots=True)
class Run:
    """What a run directory says of itself."""

    path: Path
    status: dict[str, Any]
    provenance: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a run directory; what is missing or damaged reads as empty."""
        return cls(path, _json(path / "status.json"), _json(path / "provenance.json"))

    @property
    def state(self) -> str:
        """How the run stands; ``died`` when its process is gone without having said so."""
        state = str(self.status.get("state", "unknown"))
        if (
            state == "running"
            and self.provenance.get("host") == platform.node()
            and not _is_alive(self.status.get("pid"))
        ):
            return "died"
        return state

    @property
    def best(self) -> str:
        """The best metric, its value and step."""
        best = self.status.get("best")
        if not isinstance(best, dict) or not isinstance(best.get("value"), int | float):
            return "-"
        return f"{best.get('name')} {best['value']:.4g} @ {best.get('step')}"

    @property
    def can_resume(self) -> bool:
        """Whether it did not finish and left a checkpoint."""
        return self.state not in ("finished", "running") and any(self.path.glob("checkpoints/step_*"))

    @property
    def resume(self) -> str:
        """The command that goes on with it, or the call, where it was started from Python."""
        recipe = self.path / "recipe.yaml"
        if recipe.is_file() and recipe.stat().st_size:
            return f"camshaft fit {recipe} resume={self.path}"
        return f"camshaft.run(..., resume={str(self.path)!r})"


def main(argv: Sequence[str] | None = None) -> int:
    """List runs, or compare two of them."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["diff"]:
        return _compare(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="camshaft runs",
        description="List runs, newest last. 'camshaft runs diff A B' compares two.",
        epilog="A run that did not finish is followed by the command that resumes it.",
    )
    parser.add_argument("name", nargs="?", help="show the runs of this name alone")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where the runs are (default: runs)")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    options = parser.parse_args(arguments)
    runs = find_runs(options.runs_dir, options.name)
    if options.json:
        say(
            json.dumps(
                [{"path": str(run.path), "state": run.state, **run.status, "resume": run.resume} for run in runs]
            )
        )
        return 0
    if not runs:
        raise RecipeError(
            f"there are no runs of {options.name} in {options.runs_dir}."
            if options.name
            else f"there are no runs in {options.runs_dir}.",
            fix="Give the directory with --runs-dir.",
        )
    say(table(runs))
    return 0


def find_runs(folder: Path, name: str | None = None) -> list[Run]:
    """Return the runs in a directory, oldest first."""
    found = [path.parent for path in folder.glob(f"{name or '*'}/*/status.json")]
    return [Run.read(path) for path in sorted(found, key=lambda path: (path.stat().st_mtime, path.name))]


def table(runs: Sequence[Run]) -> str:
    """Return one line for each run, and how to resume those that can be."""
    rows = [("run", "state", "step", "epoch", "best", "age")]
    rows += [
        (
            str(run.path),
            run.state,
            str(run.status.get("step", "-")),
            str(run.status.get("epoch", "-")),
            run.best,
            _age(run),
        )
        for run in runs
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for index, row in enumerate(rows):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        run = runs[index - 1] if index else None
        if run is not None and run.status.get("error") and run.state != "finished":
            lines.append(f"    {str(run.status['error']).splitlines()[0][:110]}")
        if run is not None and run.can_resume:
            lines.append(f"    resume: {run.resume}")
    return "\n".join(lines)


def _compare(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="camshaft runs diff", description="Compare the recipes, code, packages and results of two runs."
    )
    parser.add_argument("runs", nargs=2, type=Path, help="two run directories")
    first, second = (Run.read(path) for path in parser.parse_args(argv).runs)
    for run in (first, second):
        if not run.path.is_dir():
            raise RecipeError(f"{run.path} is no run directory.", fix="'camshaft runs' lists them.")
    say(compare(first, second))
    return 0


def compare(first: Run, second: Run) -> str:
    """Return what differs between two runs, by section; a section that is equal is left out."""
    sections = {
        "recipe": (_recipe(first.path), _recipe(second.path)),
        "code": (_code(first), _code(second)),
        "packages": (first.provenance.get("packages", {}), second.provenance.get("packages", {})),
        "hardware": (first.provenance.get("hardware", {}), second.provenance.get("hardware", {})),
        "result": (_result(first), _result(second)),
    }
    from camshaft.recipe.display import diff

    lines = [f"- {first.path}", f"+ {second.path}"]
    for title, (old, new) in sections.items():
        changes = diff(old, new)
        if changes:
            lines += ["", title]
            lines += [
                f"  {path}: {before if before is not None else '-'} -> {after if after is not None else '-'}"
                for path, before, after in changes
            ]
    return "\n".join(lines if len(lines) > 2 else [*lines, "", "no difference"])


def _recipe(path: Path) -> dict[str, Any]:
    from camshaft.recipe.source import read_file

    file = path / "recipe.yaml"
    if not file.is_file():
        return {}
    data = read_file(file, str(file)).data
    return data if isinstance(data, dict) else {}


def _code(run: Run) -> dict[str, Any]:
    git = run.provenance.get("git") or {}
    return {"revision": git.get("revision"), "diff": f"{len(git.get('diff', '').splitlines())} lines"}


def _result(run: Run) -> dict[str, Any]:
    keys = ("state", "step", "epoch", "best", "metrics")
    return {key: run.status[key] for key in keys if key in run.status}


def _age(run: Run) -> str:
    seconds = time.time() - float(run.status.get("time") or run.path.stat().st_mtime)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _is_alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (TypeError, ValueError, ProcessLookupError):
        return False
    except OSError:
        return True
    return True


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


if __name__ == "__main__":
    sys.exit(guard(main))
