"""Find the source of a dotted path and read its top level, without importing it."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from camshaft.recipe.quick import imports, quick

Bound: TypeAlias = "ast.stmt | tuple[str, str]"


class Source:
    """What each top-level name of a module is bound to: a statement, or (module, name) when it is imported.

    A module beside the recipe is parsed whole. Of an installed one only what is asked for is: parsing
    all of torch.optim takes longer than everything else that a check does.
    """

    def __init__(self, name: str, file: Path, local: str | None, text: str) -> None:
        self.name = name
        self.file = file
        self.local = local
        self.stars: list[str] = []
        self._text = text
        self._names: dict[str, Bound | None] = {}
        self._sought: set[str] = set()
        self._read(ast.parse(text).body if local is not None else imports(text))

    def get(self, name: str) -> Bound | None:
        """Return what a name is bound to."""
        if self.local is None and name not in self._sought:
            self._sought.add(name)
            found = quick(self._text, name)
            if found is not None:
                self._names[name] = found
        return self._names.get(name)

    def names(self) -> list[str]:
        """Return the public classes and imports."""
        if self.local is None:
            for name in re.findall(r"^class\s+(\w+)", self._text, re.MULTILINE):
                self.get(name)
        kinds = (ast.ClassDef, tuple)
        return [name for name, bound in self._names.items() if not name.startswith("_") and isinstance(bound, kinds)]

    def _read(self, statements: list[ast.stmt]) -> None:
        for statement in _flat(statements):
            self._bind(statement)

    def _bind(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            self._names[statement.name] = statement
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                bound = alias.asname or alias.name.partition(".")[0]
                self._names[bound] = (alias.name if alias.asname else bound, "")
        elif isinstance(statement, ast.ImportFrom):
            origin = _origin(self.name, statement, self.file.name == "__init__.py")
            for alias in statement.names:
                if alias.name == "*":
                    self.stars.append(origin)
                else:
                    self._names[alias.asname or alias.name] = (origin, alias.name)
        elif isinstance(statement, ast.AnnAssign | ast.Assign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    self._names[target.id] = statement


@dataclass(frozen=True, slots=True)
class Definition:
    """A class or function, and the module that defines it."""

    source: Source
    node: ast.ClassDef | ast.FunctionDef

    @property
    def path(self) -> str:
        """The dotted path under which the object is defined."""
        return f"{self.source.name}.{self.node.name}"


def find_module(name: str, local: str | None) -> Path | None:
    """Return the file of a module: beside the recipe (``local``) first, then on the import path."""
    top, *rest = name.split(".")
    if local is not None:
        found = _below(Path(local), [top, *rest])
        if found is not None:
            return found
    if top in sys.builtin_module_names:
        return None
    places = _top(top)
    for folder in places:
        found = _below(Path(folder), rest) if rest else _init(Path(folder))
        if found is not None:
            return found
    return _single(top) if not rest else None


@lru_cache(maxsize=256)
def _spec(top: str) -> importlib.machinery.ModuleSpec | None:
    # Only the top-level name is looked up: finding a submodule would import its package.
    try:
        return importlib.machinery.PathFinder.find_spec(top) or importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None


def _top(top: str) -> list[str]:
    spec = _spec(top)
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def _single(top: str) -> Path | None:
    spec = _spec(top)
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _init(folder: Path) -> Path | None:
    file = folder / "__init__.py"
    return file if file.is_file() else None


def _below(folder: Path, parts: list[str]) -> Path | None:
    base = folder.joinpath(*parts)
    file = base.with_name(f"{base.name}.py")
    if file.is_file():
        return file
    return _init(base)


def read_module(name: str, local: str | None) -> Source | None:
    """Return the top level of a module; None when it has no source in Python or cannot be parsed."""
    file = find_module(name, local)
    if file is None:
        return None
    is_local = local is not None and file.is_relative_to(local)
    return _read(name, file, local if is_local else None, file.stat().st_mtime_ns)


@lru_cache(maxsize=512)
def _read(name: str, file: Path, local: str | None, changed: int) -> Source | None:
    del changed
    try:
        return Source(name, file, local, file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _flat(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        if isinstance(statement, ast.If):
            yield from _flat(statement.orelse)
            yield from _flat(statement.body)
        elif isinstance(statement, ast.Try):
            yield from _flat(statement.body)
        else:
            yield statement


def _origin(name: str, statement: ast.ImportFrom, is_package: bool) -> str:
    if not statement.level:
        return statement.module or ""
    parts = name.split(".")
    keep = len(parts) - statement.level + (1 if is_package else 0)
    return ".".join([*parts[: max(keep, 0)], *([statement.module] if statement.module else [])])


def find(path: str, local: str | None, *, depth: int = 0) -> Definition | str | None:
    """Follow a dotted path through re-exports to the class or function that it names.

    Returns None when the source does not tell (an extension module, a computed name), and the part
    of the path that does not exist as text.
    """
    if depth > 20:
        return None
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        source = read_module(module, local)
        if source is None:
            if find_module(module, local) is not None:
                return None
            continue
        if cut < len(parts) - 1:
            return _inside(source, parts[cut:], local, depth)
        return _lookup(source, parts[-1], local, depth)
    return parts[0]


def _inside(source: Source, rest: list[str], local: str | None, depth: int) -> Definition | str | None:
    """Resolve ``rest`` below a module when the next part is no file: an imported module or a class."""
    bound = source.get(rest[0])
    if isinstance(bound, tuple):
        origin = ".".join(part for part in bound if part)
        return find(".".join([origin, *rest[1:]]), local, depth=depth + 1)
    if bound is not None:
        return None
    return f"{source.name}.{rest[0]}"


def _lookup(source: Source, name: str, local: str | None, depth: int) -> Definition | str | None:
    bound = source.get(name)
    if isinstance(bound, ast.ClassDef | ast.FunctionDef):
        return Definition(source, bound)
    if isinstance(bound, tuple):
        module, attribute = bound
        return find(f"{module}.{attribute}", local, depth=depth + 1) if attribute else None
    if isinstance(bound, ast.Assign | ast.AnnAssign):
        return None
    for star in source.stars:
        found = find(f"{star}.{name}", local, depth=depth + 1)
        if found is None or isinstance(found, Definition):
            return found
    if source.get("__getattr__") is not None:
        return None
    return f"{source.name}.{name}"


def exported(path: str, local: str | None) -> list[str]:
    """Return the classes that a module defines or re-exports, to suggest one of them."""
    source = read_module(path, local)
    if source is None:
        return []
    return source.names() + [name for star in source.stars for name in exported(star, local)]
