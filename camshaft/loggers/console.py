"""Print results, one line a record, above a live progress bar where there is one."""

from __future__ import annotations

import sys

from camshaft import terminal
from camshaft.loggers.base import Logger, Record


class Console(Logger):
    """Print a line for every validation, test and epoch; for training steps too with ``steps``.

    Training steps are the progress bar's: it shows them live, or prints them where the output is no
    terminal.
    """

    def __init__(self, *, steps: bool = False) -> None:
        self.steps = steps

    def log_metrics(self, record: Record) -> None:
        """Print a record."""
        if record.kind == "step" and not self.steps:
            return
        values = [f"{name} {value:.4g}" for name, value in record.values.items()]
        # Counted from 1, as the progress bar counts; a test comes after the last epoch and belongs to none.
        epoch = "" if record.kind == "test" else f"  epoch {record.epoch + 1}"
        terminal.say(_filled([f"{record.kind:<10} step {record.step}{epoch}", *values]))

    def log_text(self, name: str, text: str, step: int) -> None:
        """Print a text, indented below its name."""
        body = "\n".join(f"  {line}" for line in text.splitlines())
        terminal.say(f"{name} at step {step}:\n{body}")


def _filled(parts: list[str]) -> str:
    """Join with two spaces; on a terminal break lines between the parts, not inside them."""
    console = terminal.console()
    width = console.width if console.is_terminal else sys.maxsize
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"{'':<11}{part}")
    return "\n".join(lines)
