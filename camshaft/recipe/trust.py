"""Decide what a recipe may name, and make sure that it gets exactly that.

A recipe is text from anywhere. Its dotted paths reach camshaft, torch's layers, optimizers and data,
torchmetrics, and what its reader allowed: packages by name, and the Python beside the recipe once its
folder is trusted. Nothing is imported before its path has passed, and what the import gave is checked
by identity, so that no alias inside an allowed module leads out of it.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from camshaft.errors import RecipeError
from camshaft.recipe.modules import find_module

BUILT_IN = ("camshaft", "torch.nn", "torch.optim", "torch.utils.data", "torchmetrics")
_PATH = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z][A-Za-z0-9_]*)+$")
_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")
_NESTED_BASES = (
    "torch.nn.modules.module.Module",
    "torch.optim.optimizer.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler",
    "torch.utils.data.dataset.Dataset",
    "torch.utils.data.sampler.Sampler",
    "torchmetrics.metric.Metric",
    "camshaft.callback.Callback",
    "camshaft.data.DataModule",
    "camshaft.loggers.base.Logger",
    "camshaft.strategies.base.Strategy",
)


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the reader of a recipe allows: package prefixes, environment variables, and the recipe's folder."""

    prefixes: tuple[str, ...] = BUILT_IN
    variables: frozenset[str] = frozenset()
    local: str | None = None
    added: tuple[str, ...] = field(default=())

    def covers(self, module: str) -> bool:
        """Say whether a module, or a path below one, starts with an allowed prefix that ends at a dot."""
        return any(module == prefix or module.startswith(f"{prefix}.") for prefix in self.prefixes)

    def is_local(self, path: str) -> bool:
        """Say whether a path leads to Python beside the recipe."""
        return self.local is not None and not self.covers(path) and is_beside(path.partition(".")[0], self.local)


def is_beside(top: str, folder: str) -> bool:
    """Say whether a folder holds a module of that name."""
    return Path(folder, f"{top}.py").is_file() or Path(folder, top, "__init__.py").is_file()


def allowed(allow: Iterable[str], folder: str | None) -> Allowed:
    """Join what is built in, the reader's file, ``CAMSHAFT_ALLOW`` and the command line.

    Raises:
        RecipeError: an entry is neither a package nor ``env:NAME``.
    """
    given = [*read_lines("allow"), *filter(None, os.environ.get("CAMSHAFT_ALLOW", "").split(",")), *allow]
    prefixes, variables = [], set()
    for entry in given:
        name = entry.strip().rstrip(".")
        if name.startswith("env:") and name[4:].isidentifier():
            variables.add(name[4:])
        elif _PREFIX.match(name):
            prefixes.append(name)
        else:
            raise RecipeError(
                f"--allow {entry[:60]!r} is neither a package nor env:NAME.",
                fix="Name a package or module, such as my_project, or a variable, such as env:WANDB_API_KEY.",
            )
    return Allowed((*BUILT_IN, *prefixes), frozenset(variables), folder, tuple(prefixes))


def refusal(path: str, allow: Allowed) -> tuple[str, str] | None:
    """Return why a dotted path may not be imported and how to allow it; None when it may."""
    if not _PATH.match(path) or len(path) > 200:
        return (
            "A class is named by a dotted path whose parts are public names.",
            "Write for example my_project.models.Net.",
        )
    if allow.covers(path) or allow.is_local(path):
        return None
    top = path.partition(".")[0]
    if top in sys.stdlib_module_names:
        return (
            "Python's own library can run programs and change files.",
            "Name a class of camshaft, torch.nn, torch.optim, torchmetrics or your own project.",
        )
    is_known = find_module(top, allow.local) is not None
    where = "" if is_known else f" There is no {top} beside the recipe, and none is installed."
    return (
        f"A recipe could run anything if it could name any class.{where}",
        f"If you trust {top}, pass --allow {top}.",
    )


def config_folder() -> Path:
    """Return the folder of the reader's own settings."""
    explicit = os.environ.get("CAMSHAFT_HOME")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "camshaft"


def read_lines(name: str) -> list[str]:
    """Return the lines of one of the reader's files; none when there is no such file."""
    try:
        lines = (config_folder() / name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError, RuntimeError):
        return []
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def is_trusted(folder: str) -> bool:
    """Say whether the Python in a folder may run: it was trusted before, or came with camshaft."""
    here = Path(folder).resolve()
    listed = [*read_lines("trust"), *filter(None, os.environ.get("CAMSHAFT_TRUST", "").split(os.pathsep))]
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        # A checkout: its recipes came with the code that is running already.
        listed.append(str(root / "recipes"))
    return any(here.is_relative_to(Path(entry).expanduser().resolve()) for entry in listed)


def trust(folder: str) -> None:
    """Remember that the Python in a folder may run.

    Raises:
        RecipeError: the reader's file cannot be written.
    """
    if is_trusted(folder):
        return
    file = config_folder() / "trust"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(f"{Path(folder).resolve()}\n")
    except OSError as error:
        raise RecipeError(
            f"{file} cannot be written: {error.strerror}.",
            fix="Set CAMSHAFT_TRUST to the folder of the recipe instead.",
        ) from None


def require_trust(folder: str, names: Iterable[str]) -> None:
    """Ask once, at a terminal, whether the Python beside a recipe may run.

    Raises:
        RecipeError: it may not, or nobody is there to ask.
    """
    if is_trusted(folder):
        return
    shown = ", ".join(sorted(set(names))[:5])
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        sys.stderr.write(f"The recipe runs Python from {folder} ({shown}). Trust this folder from now on? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            trust(folder)
            return
    raise RecipeError(
        f"{shown} is Python in {folder}, a folder that you have not trusted.",
        why="Running it can do anything that you can.",
        fix="Read it, then pass --trust once, or set CAMSHAFT_TRUST to the folder.",
    )


def resolve(path: str, allow: Allowed, bases: tuple[str, ...] = _NESTED_BASES) -> type[Any]:
    """Import the class that a dotted path names, and nothing else.

    Raises:
        RecipeError: the path, the module it leads to, or the object found is not allowed.
    """
    refused = refusal(path, allow)
    if refused is not None:
        raise RecipeError(f"{path[:80]!r} is refused.", why=refused[0], fix=refused[1])
    if allow.is_local(path) and allow.local is not None:
        if not is_trusted(allow.local):
            require_trust(allow.local, [path])
        if allow.local not in sys.path:
            sys.path.insert(0, allow.local)
    found = _import(path, allow)
    if not isinstance(found, type):
        raise RecipeError(f"{path} is a {type(found).__name__}, not a class.", fix="Name a class.")
    _check_identity(path, found, allow)
    _check_base(path, found, bases)
    return found


def _import(path: str, allow: Allowed) -> Any:
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        if name not in sys.modules and find_module(name, allow.local) is None and cut > 1:
            continue
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            raise RecipeError(
                f"{path} cannot be imported: it needs {error.name}, which is not installed.",
                fix=f"Install {error.name}.",
            ) from error
        except ImportError as error:
            raise RecipeError(f"{path} cannot be imported: {error}.") from error
        for part in parts[cut:]:
            if not hasattr(found, part):
                raise RecipeError(f"{name} has no {'.'.join(parts[cut:])}.", fix="Check the spelling.")
            found = getattr(found, part)
        return found
    raise RecipeError(f"{path} names no module.", fix="Check the spelling, and that its package is installed.")


def _check_identity(path: str, found: type[Any], allow: Allowed) -> None:
    home = sys.modules.get(found.__module__)
    inside = allow.covers(found.__module__) or _lies_beside(home, allow.local)
    defined: Any = home
    for part in found.__qualname__.split("."):
        defined = getattr(defined, part, None)
    if not inside or defined is not found:
        raise RecipeError(
            f"{path} is another name for {found.__module__}.{found.__qualname__}, which is not allowed.",
            why="An alias could lead anywhere.",
            fix=f"Name it by its own path, and pass --allow {found.__module__.partition('.')[0]} if you trust it.",
        )


def _lies_beside(module: Any, folder: str | None) -> bool:
    file = getattr(module, "__file__", None)
    return folder is not None and file is not None and Path(file).resolve().is_relative_to(Path(folder).resolve())


def _check_base(path: str, found: type[Any], bases: tuple[str, ...]) -> None:
    ancestors = {f"{base.__module__}.{base.__qualname__}" for base in found.__mro__}
    if not ancestors.isdisjoint(bases):
        return
    if bases is not _NESTED_BASES:
        raise RecipeError(f"{path} is not a subclass of {bases[0]}.", fix="Name a class that fits this place.")
    # Inside arguments the reader's own classes may be anything; of the open packages only building blocks.
    if Allowed().covers(found.__module__):
        raise RecipeError(
            f"{path} is no layer, metric, dataset, optimizer or other building block.",
            why="Open packages hold classes that do more than they seem.",
            fix="Wrap it in a class of your own.",
        )
