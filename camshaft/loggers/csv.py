"""Write records as a table: what spreadsheets read best."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from camshaft.loggers.base import Logger, Record, Run, file_name

_FIRST = ["kind", "step", "epoch", "samples", "tokens", "seconds"]


class CSV(Logger):
    """Append to ``metrics.csv`` in the run directory: one row a record, one column a name.

    A name that comes up later gets a new column, for which the file is rewritten whole. A resumed run
    drops the rows beyond the step it continues from.
    """

    def __init__(self, filename: str = "metrics.csv") -> None:
        self.filename = file_name(filename, "CSV")
        self._path: Path | None = None
        self._file: TextIO | None = None
        self._columns = list(_FIRST)

    def open(self, run: Run) -> None:
        """Open the file, without what the resumed run will write again."""
        if run.directory is None:
            return
        self._path = run.directory / self.filename
        rows: list[dict[str, str]] = []
        if self._path.exists() and run.resumed_step:
            self._columns, rows = _read(self._path)
        self._rewrite(row for row in rows if int(row["step"]) <= run.resumed_step)

    def log_metrics(self, record: Record) -> None:
        """Write a row."""
        if self._file is None or self._path is None:
            return
        new = [name for name in record.values if name not in self._columns]
        if new:
            self._file.close()
            self._columns += new
            self._rewrite(_read(self._path)[1])
        own = {
            "kind": record.kind, "step": record.step, "epoch": record.epoch, "samples": record.samples,
            "tokens": record.tokens, "seconds": round(record.seconds, 3),
        }  # fmt: skip
        csv.DictWriter(self._file, self._columns, restval="").writerow({**record.values, **own})
        self._file.flush()

    def close(self, status: str) -> None:
        """Close the file."""
        del status
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rewrite(self, rows: Iterable[dict[str, str]]) -> None:
        assert self._path is not None
        temporary = self._path.with_name(f".{self._path.name}.part")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8", newline="")


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and the whole rows of a table; a last row that was cut off is left out."""
    with path.open(encoding="utf-8", newline="") as file:
        text = file.read()
    lines = text[: text.rfind("\n") + 1].splitlines(keepends=True)
    reader = csv.DictReader(lines)
    rows = [row for row in reader if row["step"].isdigit() and None not in row.values()]
    return list(reader.fieldnames or _FIRST), rows
