"""Check a recipe without starting anything: ``python -m camshaft.check recipe.yaml``."""

from __future__ import annotations

import sys
from collections.abc import Sequence, Sized

from camshaft.cli import guard, read_recipe, recipe_parser, say


def main(argv: Sequence[str] | None = None) -> int:
    """Print that the recipe is right, or raise the error that lists all its mistakes."""
    parser = recipe_parser("check", "Find every mistake in a recipe. Nothing that it names is imported.")
    recipe = read_recipe(parser.parse_args(argv), inspect=True)
    from camshaft.recipe.trust import is_trusted

    layers = f"{_count(recipe.texts, 'file')}, {_count(recipe.overrides, 'override')}"
    say(f"{' + '.join(recipe.paths)}: no mistakes ({layers}).")
    code = recipe.config.get("code")
    if code is not None and not is_trusted(code):
        say(f"It runs Python from {code}, which is not trusted yet: fit asks, or takes --trust.")
    return 0


def _count(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'s' if len(things) != 1 else ''}"


if __name__ == "__main__":
    sys.exit(guard(main))
