"""Record where a run comes from: command, revision, versions, hardware, seeds, parent checkpoint.

Everything is redacted before it is returned, so that it can be written anywhere.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import MetadataPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camshaft.redact import is_secret_variable, redact

if TYPE_CHECKING:
    from camshaft.recipe.recipe import Recipe

_MAX_DIFF = 1 << 20
_GIT_TIMEOUT_S = 10
_OWN_SCOPES = ("local", "worktree")
_VARIABLES = ("CUDA_", "NCCL_", "OMP_", "MKL_", "TORCH_", "PYTORCH_", "SLURM_", "XLA_", "ACCELERATE_", "CAMSHAFT_")


def collect(
    recipe: Recipe | None = None,
    *,
    code: str | Path | None = None,
    seed: int | None = None,
    parent: str | Path | None = None,
) -> dict[str, Any]:
    """Return plain data that says how to repeat this run.

    ``code`` is the folder of the user's Python, by default the recipe's: the revision of its repository
    and uncommitted changes are recorded. ``parent`` is the checkpoint that the run starts from. Call it
    on the main process.
    """
    if recipe is not None:
        code = code if code is not None else recipe.config.get("code") or recipe.directory
        seed = seed if seed is not None else recipe.settings.seed
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [redact(word) for word in sys.orig_argv],
        "directory": str(Path.cwd()),
        "host": platform.node(),
        "git": git(Path(code) if code is not None else Path.cwd()),
        "python": platform.python_version(),
        "packages": packages(),
        "hardware": hardware(),
        "environment": environment(),
        "recipes": list(recipe.paths) if recipe is not None else [],
        "overrides": [redact(text) for text in recipe.overrides] if recipe is not None else [],
        "seed": seed,
        "parent_checkpoint": str(parent) if parent is not None else None,
    }


def git(folder: Path) -> dict[str, Any] | None:
    """Return revision, branch, remote and uncommitted changes of the repository around a folder; None outside one."""
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        return None
    options = ("--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
    diff = redact(_git(folder, "diff", "HEAD", *options, without=_filters(folder)) or "")
    untracked = (_git(folder, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    return {
        "revision": revision.strip(),
        "branch": (_git(folder, "rev-parse", "--abbrev-ref", "HEAD") or "").strip(),
        "remote": redact((_git(folder, "config", "--get", "remote.origin.url") or "").strip()),
        "is_clean": not diff and not untracked,
        "diff": diff if len(diff) <= _MAX_DIFF else f"{diff[:_MAX_DIFF]}\n[cut: the diff has {len(diff):,} characters]",
        "untracked": untracked[:1000],
    }


def _filters(folder: Path) -> list[str]:
    """Return the names of programs, in the repository's own configuration, that a diff would run files through."""
    names = _git(folder, "config", "--includes", "--show-scope", "--name-only", "--get-regexp", r"^filter\.") or ""
    return [name for scope, _, name in (line.partition("\t") for line in names.splitlines()) if scope in _OWN_SCOPES]


def _git(folder: Path, *arguments: str, without: Sequence[str] = ()) -> str | None:
    # A repository's own configuration can name programs to run: none of them is wanted here.
    unset = [part for name in ("core.fsmonitor", *without) for part in ("-c", f"{name}=")]
    command = ["git", *unset, "-c", "core.hooksPath=/dev/null", "-C", str(folder), *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(  # noqa: S603 - git, with arguments of our own
            command, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def packages() -> dict[str, str]:
    """Return the versions of all installed packages, by name."""
    found: dict[str, str] = {}
    for folder in dict.fromkeys(sys.path):
        try:
            names = [entry.name for entry in os.scandir(folder or ".") if entry.name.endswith(".dist-info")]
        except OSError:
            continue
        for name in names:
            # Read from the directory's name: opening every METADATA file takes a second.
            project, _, version = name.removesuffix(".dist-info").partition("-")
            found.setdefault(project.replace("_", "-").lower(), version)
    if not found:
        found = {item.name: item.version for item in MetadataPathFinder.find_distributions()}
    return dict(sorted(found.items()))


def hardware() -> dict[str, Any]:
    """Return the machine: processor, cores, memory, and GPUs when torch is loaded and sees some."""
    result: dict[str, Any] = {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory(),
        "gpus": [],
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        result["cuda"] = torch.version.cuda
        result["gpus"] = [
            {"name": item.name, "memory_bytes": item.total_memory}
            for item in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ]
    return result


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def environment() -> dict[str, str]:
    """Return the variables that change how a run behaves; none that holds a secret."""
    return {
        name: redact(value)
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and not is_secret_variable(name)
    }
