"""Train what a recipe describes: ``python -m camshaft.fit recipe.yaml optimizer.lr=1e-3``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from camshaft.cli import guard, read_recipe, recipe_parser, say
from camshaft.worker import end

if TYPE_CHECKING:
    from camshaft.assembly import Parts
    from camshaft.recipe import Recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Check the recipe, then train it; return the exit code."""
    parser = recipe_parser("fit", "Train what a recipe describes.")
    parser.add_argument("--explain", action="store_true", help="print every event with its listeners, and stop")
    arguments = parser.parse_args(argv)
    recipe = read_recipe(arguments)
    from camshaft import launch, session

    if arguments.explain:
        say(session.explain(recipe_parts(recipe)))
        return 0
    words = sys.argv[1:] if argv is None else argv
    code = launch.started("camshaft.fit", words, recipe.settings, recipe.config.get("strategy", "single"))
    code = session.execute(recipe_parts(recipe)).exit_code if code is None else code
    launch.requeue(code, recipe.settings.launch)
    return code


def recipe_parts(recipe: Recipe) -> Parts:
    """Compose a run from a checked recipe; modules and data are built later, when the processes are up."""
    from camshaft import recipe as recipes
    from camshaft.assembly import Parts
    from camshaft.recipe.provenance import collect

    return Parts(
        settings=recipe.settings,
        strategy=recipes.build_strategy(recipe),
        build_module=lambda: recipes.build_module(recipe),
        build_data=lambda: recipes.build_data(recipe),
        callbacks=recipes.build_callbacks(recipe),
        loggers=recipes.build_loggers(recipe),
        build_optimizer=recipes.build_optimizer(recipe),
        build_scheduler=recipes.build_scheduler(recipe),
        name=recipe.name,
        recipe=recipe.to_yaml(),
        source=recipe.text,
        provenance=lambda parent: collect(recipe, parent=parent),
    )


if __name__ == "__main__":
    end(guard(main))
