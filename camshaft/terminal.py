"""Share one terminal, so that printed lines appear above a live progress bar."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@cache
def console() -> Console:
    """Return the console that everything of camshaft prints to."""
    from rich.console import Console

    return Console()


def say(line: str) -> None:
    """Print a line as it is, without markup or colours."""
    console().print(line, highlight=False, markup=False, soft_wrap=True)
