"""Share one terminal, so that printed lines appear above a live progress bar."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@cache
def console() -> Console:
    """Return the console that everything of camshaft prints to."""
    # Importing rich draws from python's global stream, and must not do so in the middle of a run.
    drawn = random.getstate()
    from rich.console import Console

    random.setstate(drawn)
    return Console()


def say(line: str) -> None:
    """Print a line as it is, without markup or colours."""
    console().print(line, highlight=False, markup=False, soft_wrap=True)
