"""Write predictions to files while they are made."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from camshaft import terminal
from camshaft.callback import Callback
from camshaft.errors import CallbackError, RecipeError

if TYPE_CHECKING:
    from camshaft.state import State

_FILE = re.compile(r"^rank(\d+)-\d+\.(npz|jsonl)$")


class PredictionWriter(Callback):
    """Stream what ``predict_step`` returns to ``predictions/`` in the run directory; ``dir`` may be any other.

    Every rank writes a file for each ``batches_per_file`` of its batches and keeps no more in memory. A file
    appears whole. ``npz`` holds one array a name: ``output`` for a lone tensor, the keys of a dict, or the
    positions of a tuple; all with one row a sample. ``jsonl`` holds one line a sample, and takes lists of
    plain data too. ``index.json`` comes last: the files of every loader and, for each, its rank and the
    rows of each of its batches. Batch by batch over the ranks, rows are in the order of the data.
    """

    def __init__(
        self,
        dir: str = "predictions",  # noqa: A002 - the recipe's words
        *,
        format: Literal["npz", "jsonl"] = "npz",  # noqa: A002
        batches_per_file: int = 64,
    ) -> None:
        if format not in ("npz", "jsonl") or batches_per_file < 1:
            raise RecipeError(
                f"PredictionWriter has format={format!r} and batches_per_file={batches_per_file}.",
                fix="Use npz or jsonl, and at least one batch a file.",
            )
        self.dir = dir
        self.format = format
        self.batches_per_file = batches_per_file
        self._directory = Path(dir)
        self._batches: list[dict[str, Any]] = []
        self._files: list[dict[str, Any]] = []
        self._loader = 0

    def on_validation_start(self, state: State) -> None:
        """Make the directory, and remove what this rank wrote into it before."""
        if state.stage != "predict":
            return
        self._directory = (state.run_dir or Path()) / self.dir
        self._directory.mkdir(parents=True, exist_ok=True)
        self._batches, self._files, self._loader = [], [], 0
        index = self._directory / "index.json"
        if state.strategy.is_main and index.exists():
            if not _is_own(index):
                raise CallbackError(
                    f"{index} is no index of predictions.",
                    why="It would be replaced.",
                    fix=f"Give callbacks.{self.name}.dir another directory.",
                )
            index.unlink()
        for path in self._directory.iterdir():
            match = _FILE.match(path.name)
            if match and int(match[1]) == state.strategy.rank:
                path.unlink()

    def on_validation_batch(self, state: State, output: Any) -> None:
        """Take a batch, and write a file when there are enough."""
        if state.stage != "predict":
            return
        loader = int(state.metrics.suffix.rpartition("_")[2] or 0)
        if loader != self._loader:
            self._write(state)
            self._loader = loader
        self._batches.append(_columns(output))
        if len(self._batches) >= self.batches_per_file:
            self._write(state)

    def on_validation_end(self, state: State, metrics: dict[str, float] | None) -> None:
        """Write the rest, and the index of all ranks' files."""
        del metrics
        if state.stage != "predict":
            return
        self._write(state)
        ranks = state.strategy.gather_objects(self._files)
        if state.strategy.is_main:
            files = sorted((f for own in ranks for f in own), key=lambda f: (f["loader"], f["rank"], f["file"]))
            total = sum(sum(file["rows"]) for file in files)
            index = {"step": state.progress.step, "samples": total, "format": self.format, "files": files}
            _put(self._directory / "index.json", (json.dumps(index, indent=1) + "\n").encode())
            terminal.say(f"{total} predictions in {self._directory}")

    def _write(self, state: State) -> None:
        rank = state.strategy.rank
        if not state.strategy.is_first_of_data:
            self._batches = []
        if not self._batches:
            return
        name = f"rank{rank:05}-{len(self._files):06}.{self.format}"
        rows = [_rows(batch) for batch in self._batches]
        path = self._directory / name
        if self.format == "jsonl":
            lines = (json.dumps(row) + "\n" for batch in self._batches for row in _samples(batch))
            _put(path, "".join(lines).encode())
        else:
            _put_arrays(path, self._batches)
        self._files.append({"file": name, "loader": self._loader, "rank": rank, "rows": rows})
        self._batches = []


def _is_own(index: Path) -> bool:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.keys() == {"step", "samples", "format", "files"}


def _columns(output: Any) -> dict[str, Any]:
    """Return an output as named columns on the host.

    Raises:
        CallbackError: there are no rows to be told apart, or columns differ in length.
    """
    if isinstance(output, Mapping):
        named = {str(key): value for key, value in output.items()}
    elif isinstance(output, tuple):
        named = {str(index): value for index, value in enumerate(output)}
    else:
        named = {"output": output}
    columns = {name: _host(value) for name, value in named.items()}
    lengths = {len(v) if isinstance(v, list) or bool(getattr(v, "ndim", None)) else -1 for v in columns.values()}
    if len(lengths) != 1 or -1 in lengths:
        kinds = {name: type(value).__name__ for name, value in named.items()}
        raise CallbackError(
            f"predict_step returned {kinds or 'nothing'}, which are not columns of one row a sample.",
            why="A prediction could not be told to belong to a sample.",
            fix="Return a tensor of shape (batch, ...), or a dict or tuple of such tensors.",
        )
    return columns


def _host(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        # numpy has no bfloat16.
        return (value.float() if value.dtype.itemsize < 4 and value.is_floating_point() else value).numpy()
    return value


def _rows(columns: dict[str, Any]) -> int:
    return len(next(iter(columns.values())))


def _samples(columns: dict[str, Any]) -> list[Any]:
    lists = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in columns.items()}
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _put(path: Path, content: bytes) -> None:
    """Write a file that appears whole."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def _put_arrays(path: Path, batches: list[dict[str, Any]]) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name in batches[0]:
        columns = [np.asarray(batch[name]) for batch in batches]
        if any(column.dtype == object for column in columns):
            raise CallbackError(
                f"predict_step returned {name!r}, which no array can hold.", fix="Return tensors, or set format: jsonl."
            )
        arrays[name] = np.concatenate(columns)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # its stub takes a keyword for its own options
    part.replace(path)
