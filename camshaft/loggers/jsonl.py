"""Write every record as one line of JSON: what programs read best."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from camshaft.loggers.base import Logger, Record, Run, file_name


class JSONL(Logger):
    """Append to ``metrics.jsonl`` in the run directory, flushed line by line.

    A line has ``kind`` (step, epoch, validation, test, text, hparams, resumed or status), ``step``, and for
    records of values epoch, samples, tokens, seconds and ``values``. Numbers that JSON lacks are the
    texts NaN, Infinity and -Infinity. A resumed run drops what lies beyond the step it continues from,
    so that no step is there twice, and says where it continued.
    """

    def __init__(self, filename: str = "metrics.jsonl") -> None:
        self.filename = file_name(filename, "JSONL")
        self._file: TextIO | None = None
        self._step = 0

    def open(self, run: Run) -> None:
        """Open the file, without what the resumed run will write again."""
        if run.directory is None:
            return
        path = run.directory / self.filename
        self._step = run.resumed_step
        if path.exists():
            _keep(path, run.resumed_step)
        self._file = path.open("a", encoding="utf-8")
        if run.resumed_step:
            self._write({"kind": "resumed", "step": run.resumed_step})

    def log_metrics(self, record: Record) -> None:
        """Write a record."""
        self._step = record.step
        self._write(
            {
                "kind": record.kind,
                "step": record.step,
                "epoch": record.epoch,
                "samples": record.samples,
                "tokens": record.tokens,
                "seconds": round(record.seconds, 3),
                "values": record.values,
            }
        )

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a text."""
        self._write({"kind": "text", "step": step, "name": name, "text": text})

    def log_hparams(self, hparams: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Write the hyper-parameters and the final metrics."""
        self._write({"kind": "hparams", "step": self._step, "hparams": dict(hparams), "metrics": dict(metrics)})

    def close(self, status: str) -> None:
        """Write how the run ended."""
        self._write({"kind": "status", "step": self._step, "status": status})
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(_plain(line), ensure_ascii=False) + "\n")
            self._file.flush()


def _plain(value: Any) -> Any:
    """Write numbers that JSON lacks as text, and what it cannot hold as its ``str``."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _keep(path: Path, step: int) -> None:
    """Drop lines of later steps, and a last line that was cut off, by replacing the file whole.

    At step 0 nothing was done yet, so everything goes.
    """
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(_lines(path, step) if step else ())
    temporary.replace(path)


def _lines(path: Path, step: int) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if (
                isinstance(entry, dict)
                and entry.get("step", 0) <= step
                and entry.get("kind") not in ("status", "hparams")
            ):
                # A kill may have come between a whole line and its end.
                yield line if line.endswith("\n") else f"{line}\n"
