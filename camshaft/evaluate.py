"""Share what ``validate``, ``test`` and ``predict`` do: evaluate a checkpoint of a recipe's run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from camshaft.cli import read_recipe, recipe_parser

if TYPE_CHECKING:
    from camshaft.state import Stage


def evaluate(stage: Stage, description: str, argv: Sequence[str] | None) -> int:
    """Read the command line and evaluate once; return the exit code."""
    parser = recipe_parser(stage, description)
    parser.add_argument(
        "--checkpoint",
        default="best",
        metavar="WHICH",
        help="a checkpoint, a run directory, or last or best: of the run that the recipe lies in, else of the newest "
        "of its name (default: best, else last)",
    )
    arguments = parser.parse_args(argv)
    recipe = read_recipe(arguments)
    from camshaft import launch, session
    from camshaft.callbacks.predictions import PredictionWriter
    from camshaft.fit import recipe_parts

    words = sys.argv[1:] if argv is None else argv
    code = launch.started(f"camshaft.{stage}", words, recipe.settings, recipe.config.get("strategy", "single"))
    if code is not None:
        return code
    parts = recipe_parts(recipe)
    keep = {name: callback for name, callback in parts.callbacks.items() if name != "summary"}
    if stage == "predict" and not any(isinstance(callback, PredictionWriter) for callback in keep.values()):
        keep["predictions"] = PredictionWriter()
    parts.callbacks = keep
    folder = Path(recipe.paths[-1]).parent
    parts.run_dir = folder if (folder / "status.json").is_file() else None
    return session.execute(parts, stage, arguments.checkpoint).exit_code
