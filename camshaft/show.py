"""Print a resolved recipe: ``python -m camshaft.show recipe.yaml [overrides]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from camshaft.cli import guard, read_recipe, recipe_parser, say


def main(argv: Sequence[str] | None = None) -> int:
    """Print every value with the file and line, or the override, that set it."""
    parser = recipe_parser("show", "Print the resolved recipe and where each value came from.")
    parser.add_argument("--plain", action="store_true", help="print the YAML alone")
    parser.add_argument("--explain", action="store_true", help="print every event with its listeners, in order")
    arguments = parser.parse_args(argv)
    recipe = read_recipe(arguments, inspect=not arguments.explain)
    if arguments.explain:
        from camshaft import session
        from camshaft.fit import recipe_parts

        say(session.explain(recipe_parts(recipe)))
    elif arguments.plain:
        say(recipe.to_yaml().rstrip())
    else:
        from camshaft.recipe.display import annotate

        say(annotate(recipe))
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
