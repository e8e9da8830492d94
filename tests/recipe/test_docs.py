"""The documentation says what the code does."""

import re
from pathlib import Path

from camshaft.recipe.interpolate import HARMLESS
from camshaft.recipe.registry import FIRST_CALLBACKS, LAST_CALLBACKS, LOGGERS, OPTIMIZERS, SCHEDULERS
from camshaft.recipe.schema import table
from camshaft.recipe.source import parse

TEXT = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()


def test_the_table_of_keys_is_the_generated_one():
    assert table() in TEXT, "put what 'camshaft schema --table' prints into docs/recipes.md"


def test_short_names_are_documented():
    for names in (LOGGERS, OPTIMIZERS, SCHEDULERS, FIRST_CALLBACKS, LAST_CALLBACKS):
        for name in names:
            assert re.search(rf"\b{name}\b", TEXT), name
    assert all(name in TEXT for name in HARMLESS)


def test_every_example_is_yaml():
    for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL):
        assert isinstance(parse(re.sub(r"^(optimizer: \{_t)", r"o\1", block, flags=re.MULTILINE), "docs").data, dict)
