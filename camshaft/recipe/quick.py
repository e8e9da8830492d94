"""Parse one definition out of a long source file, instead of the whole file."""

from __future__ import annotations

import ast
import re
import textwrap

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+[\w.]+[ \t]+import[ \t]+(?:\([^)]*\)|[^\n\\]*(?:\\\n[^\n\\]*)*)|import[ \t]+[\w., ]+)",
    re.MULTILINE,
)
_TOP = re.compile(r"^(?=[^\s)\]}#])", re.MULTILINE)
_METHOD = re.compile(r"^(?=    (?:def |async def |@))", re.MULTILINE)
_TRIES = 20


def imports(text: str) -> list[ast.stmt]:
    """Return the import statements of a file, those of the top level last, so that they win."""
    found: list[tuple[bool, ast.stmt]] = []
    for match in _IMPORT.finditer(text):
        statement = match.group(0)
        try:
            parsed = ast.parse(textwrap.dedent(statement)).body
        except SyntaxError:
            # Prose in a docstring may begin like an import.
            continue
        found += [(not statement[0].isspace(), item) for item in parsed]
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]


def quick(text: str, name: str) -> ast.stmt | None:
    """Return the top-level class, function or assignment of that name; of a class, its fields and constructor."""
    escaped = re.escape(name)
    match = re.search(rf"^(?:class|def|async def)\s+{escaped}\b", text, re.MULTILINE)
    if match is None:
        match = re.search(rf"^{escaped}[ \t]*(?::[^=\n]+)?=(?!=)", text, re.MULTILINE)
    if match is None:
        return None
    start = _decorated(text, match.start())
    ends = _TOP.finditer(text, match.end())
    for _ in range(_TRIES):
        end = next(ends, None)
        chunk = text[start : end.start() if end is not None else len(text)]
        found = _parse(_constructor_only(chunk)) or _parse(chunk)
        if found is not None or end is None:
            return found
    return None


def _decorated(text: str, start: int) -> int:
    """Move to the first of the decorators above a definition."""
    while start:
        above = text.rfind("\n", 0, start - 1) + 1
        if not text.startswith("@", above):
            return start
        start = above
    return start


def _constructor_only(chunk: str) -> str:
    if not re.match(r"(?:@[^\n]*\n)*class\b", chunk):
        return chunk
    head, *methods = _METHOD.split(chunk)
    kept = [method for method in methods if method.startswith(("    def __init__", "    def __new__"))]
    body = head + "".join(kept)
    return body if kept or body.rstrip().endswith(('"""', "...", "pass")) else f"{body}\n    pass\n"


def _parse(chunk: str) -> ast.stmt | None:
    try:
        body = ast.parse(chunk).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return body[-1] if len(body) == 1 else None
