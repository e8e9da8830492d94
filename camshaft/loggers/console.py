"""Print results, one line a record, above a live progress bar where there is one."""

from __future__ import annotations

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
        values = "  ".join(f"{name} {value:.4g}" for name, value in record.values.items())
        terminal.say(f"{record.kind:<10} step {record.step}  epoch {record.epoch}  {values}")

    def log_text(self, name: str, text: str, step: int) -> None:
        """Print a text, indented below its name."""
        body = "\n".join(f"  {line}" for line in text.splitlines())
        terminal.say(f"{name} at step {step}:\n{body}")
