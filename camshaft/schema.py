"""Print the JSON schema of recipes: ``python -m camshaft.schema > recipe.schema.json``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from camshaft.cli import guard, say


def main(argv: Sequence[str] | None = None) -> int:
    """Print the schema that an editor needs to complete and check recipes."""
    parser = argparse.ArgumentParser(
        prog="camshaft schema",
        description="Print the JSON schema of recipes.",
        epilog="Start a recipe with '# yaml-language-server: $schema=recipe.schema.json'.",
    )
    parser.add_argument("--table", action="store_true", help="print the table of docs/recipes.md instead")
    parser.add_argument("--names", action="store_true", help="print the short names of built-ins instead")
    arguments = parser.parse_args(argv)
    from camshaft.recipe.schema import names, schema, table

    say(table() if arguments.table else names() if arguments.names else json.dumps(schema(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
