"""The documentation says what the code does."""

import re
from pathlib import Path

from camshaft.recipe.interpolate import HARMLESS
from camshaft.recipe.registry import CALLBACKS, LOGGERS, OPTIMIZERS, SCHEDULERS, STRATEGIES
from camshaft.recipe.settings import RECORDS, Settings, fields
from camshaft.recipe.source import parse

TEXT = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()


def test_every_setting_is_documented_with_its_own_words():
    for name, field in fields(Settings).items():
        assert re.search(rf"^\| `{name}` \| .* \| {re.escape(field.metadata['doc'])} \|$", TEXT, re.MULTILINE), name
        record = RECORDS.get(str(field.type).partition(" ")[0])
        for inner in fields(record) if record else ():
            assert f"| `{name}.{inner}` |" in TEXT


def test_every_short_name_is_documented():
    for table in (CALLBACKS, LOGGERS, OPTIMIZERS, SCHEDULERS, STRATEGIES):
        for name in table:
            assert re.search(rf"\b{name}\b", TEXT), name
    assert all(name in TEXT for name in HARMLESS)


def test_every_example_is_yaml():
    for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL):
        assert isinstance(parse(re.sub(r"^(optimizer: \{_t)", r"o\1", block, flags=re.MULTILINE), "docs").data, dict)
