"""Write the weights of a checkpoint for use elsewhere: ``python -m camshaft.export CHECKPOINT --to FILE``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camshaft.cli import guard, say
from camshaft.errors import CamshaftError, CheckpointError

if TYPE_CHECKING:
    import torch

    from camshaft.assembly import Parts
    from camshaft.checkpoint import Reader

FORMATS = ("safetensors", "hf", "onnx", "torch_export")
_BY_SUFFIX = {".safetensors": "safetensors", ".onnx": "onnx", ".pt2": "torch_export"}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and export; return the exit code."""
    arguments = _parse(argv)
    import torch

    from camshaft.checkpoint import Reader
    from camshaft.choosing import find_checkpoint

    target = Path(arguments.to)
    kind = arguments.format or _BY_SUFFIX.get(target.suffix, "hf" if not target.suffix else "safetensors")
    if target.exists() and not arguments.force:
        raise CamshaftError(
            f"{target} exists.", why="It would be overwritten.", fix="Choose another --to, or add --force."
        )
    dtype = None if arguments.dtype is None else getattr(torch, _DTYPES[arguments.dtype])
    path = find_checkpoint(arguments.checkpoint, None)
    with Reader(path, check="full") as reader:
        _Export(reader, path, target, ema=arguments.ema, dtype=dtype, allow=arguments.allow)(kind)
    return 0


class _Export:
    """One checkpoint on its way into a file."""

    def __init__(
        self, reader: Reader, path: Path, target: Path, *, ema: bool, dtype: torch.dtype | None, allow: list[str]
    ) -> None:
        self.reader, self.path, self.target = reader, path, target
        self.ema, self.dtype, self.allow = ema, dtype, allow

    def __call__(self, kind: str) -> None:
        """Write in the format that is asked for, and say what was written."""
        from camshaft.checkpoint.reference import left_out

        if kind == "safetensors":
            count = self._merged() if left_out(self.reader) else self._plain()
            what = f"{count} tensors"
        else:
            what = {"hf": self._hf, "onnx": self._onnx, "torch_export": self._torch_export}[kind]()
        weights = "averaged weights" if self.ema else "weights"
        say(f"{self.target}: {what}, {weights} of {self.path} (step {self.reader.manifest.step})")

    def _plain(self) -> int:
        from camshaft.exporting import write_safetensors

        return write_safetensors(self.reader, self.target, ema=self.ema, dtype=self.dtype)

    def _merged(self) -> int:
        from camshaft.adapters import merged_weights
        from camshaft.exporting import rebuild, write_tensors

        module = rebuild(self._parts(), self.reader, ema=self.ema)
        return write_tensors(merged_weights(module), self.target, dtype=self.dtype)

    def _hf(self) -> str:
        from camshaft.exporting import rebuild

        module = rebuild(self._parts(), self.reader, ema=self.ema, dtype=self.dtype)
        models: list[Any] = [child for child in module.children() if hasattr(child, "save_pretrained")]
        if len(models) != 1:
            raise CheckpointError(
                f"{type(module).__name__} holds {len(models)} models of Transformers.",
                why="The hf format is a model's folder: its config beside its weights.",
                fix="Use --format safetensors, or a module such as camshaft.hf.HFModule that holds one.",
            )
        models[0].save_pretrained(self.target)
        return "a folder for from_pretrained"

    def _torch_export(self) -> str:
        import torch

        from camshaft.exporting import example_of, rebuild

        parts = self._parts()
        module = rebuild(parts, self.reader, ema=self.ema, dtype=self.dtype)
        batch = tuple(_as(tensor, self.dtype) for tensor in example_of(parts, module))
        shapes = tuple({0: torch.export.Dim.AUTO} for _ in batch)
        program = torch.export.export(module, batch, dynamic_shapes=(shapes[0],), strict=False)
        torch.export.save(program, self.target)
        return "a program for torch.export.load"

    def _onnx(self) -> str:
        missing = [name for name in ("onnx", "onnxscript") if not _is_installed(name)]
        if missing:
            raise CheckpointError(
                f"--format onnx needs {' and '.join(missing)}, which is not installed.",
                fix=f"pip install {' '.join(missing)}, or use --format torch_export.",
            )
        import torch

        from camshaft.exporting import example_of, rebuild

        parts = self._parts()
        module = rebuild(parts, self.reader, ema=self.ema, dtype=self.dtype)
        batch = tuple(_as(tensor, self.dtype) for tensor in example_of(parts, module))
        torch.onnx.export(module, batch, str(self.target), dynamo=True)
        return "an ONNX graph"

    def _parts(self) -> Parts:
        """Compose the run that the checkpoint is of, from the recipe in its directory, on one CPU."""
        from camshaft.fit import recipe_parts
        from camshaft.recipe import load

        recipe = self.path.parent.parent / "recipe.yaml"
        lines = recipe.read_text(encoding="utf-8").splitlines() if recipe.is_file() else []
        if not any(line.startswith("module:") for line in lines):
            raise CheckpointError(
                f"{self.path} is of no run that a recipe started.",
                why="This export builds the module, and the recipe says which one that is.",
                fix="Use --format safetensors, and load the file into the module yourself.",
            )
        return recipe_parts(load([recipe], ["strategy=single", "device=cpu"], allow=self.allow))


def _as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _is_installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="camshaft export", description="Write the weights of any strategy's checkpoint for use elsewhere."
    )
    parser.add_argument("checkpoint", help="a checkpoint, or the directory of a run, whose newest is taken")
    parser.add_argument("--to", required=True, metavar="PATH", help="the file to write, or the folder for hf")
    parser.add_argument("--ema", action="store_true", help="the averages in place of the weights")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), help="convert floating-point weights")
    parser.add_argument("--format", choices=FORMATS, help="by default what the ending of PATH says")
    parser.add_argument("--force", action="store_true", help="overwrite what is there")
    parser.add_argument("--allow", action="append", default=[], metavar="PACKAGE", help="code the recipe may name")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(guard(main))
