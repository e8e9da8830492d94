import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from helpers import read, write

from camshaft.recipe.modules import Definition, find
from camshaft.recipe.registry import CALLBACKS
from camshaft.recipe.schema import schema
from camshaft.recipe.settings import Settings, fields
from camshaft.recipe.source import read_file

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
SCHEMA = schema()
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def wrong(text):
    return [error.message for error in VALIDATOR.iter_errors(yaml.safe_load(text))]


def test_the_schema_is_one():
    jsonschema.Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_recipe_fits_the_schema(path):
    data = read_file(path, str(path)).data
    assert [error.message for error in VALIDATOR.iter_errors(data)] == []


def test_every_setting_is_in_the_schema_with_its_documentation():
    for name, field in fields(Settings).items():
        assert SCHEMA["properties"][name]["description"] == field.metadata["doc"]


def test_every_built_in_callback_is_completed():
    known = SCHEMA["properties"]["callbacks"]["properties"]
    there = {name for name, path in CALLBACKS.items() if isinstance(find(path, None), Definition)}
    assert there <= set(known)


@pytest.mark.parametrize(
    "text",
    [
        "max_epoch: 3", "max_epochs: many", "callbacks: {checkpoint: {kep_last: 3}}", "callbacks: {unknown: {x: 1}}",
        "strategy: dpp", "optimizer: {name: adamw, lrr: 1}", "optimizer: {name: adammw}", "optimizer: {lrr: 0.1}",
        "validate: {evry: 1 epoch}", "launch: {processes: 3}", "test: maybe", "checkpoint: {mode: mni}",
        "callbacks: {checkpoint: {on_error: ignore}}", "callbacks: [ema]",
    ],
)  # fmt: skip
def test_a_mistake_does_not_fit(text):
    assert wrong(text)


@pytest.mark.parametrize(
    "text",
    [
        "max_epochs: ${max_steps}", "module: {_target_: a.B, x: 1}",
        "callbacks: {mine: {_target_: a.B, every: 3 steps}}",
        "callbacks: {checkpoint: null}", "optimizer: {_target_: a.B, x: 1}",
        "optimizer: {name: sgd, lr: 0.1}", "strategy: ddp",
        "validate: {every: 10 steps, at_start: true}", "validate: null",
        "checkpoint: false", "optimizer: {lr: 0.1}", "module: {hidden: 3}", "extends: [a.yaml]", "seed: ???",
        "scheduler: {name: step, step_size: 3, interval: epoch}", "choices: {optimizer.lr: [1.0, 2.0]}",
    ],
)  # fmt: skip
def test_what_is_right_fits(text):
    assert wrong(text) == []


def test_a_resolved_recipe_fits_too(project):
    recipe = read(
        "module: {_target_: net.Net}\nmax_epochs: 1\nloggers: {console: null, jsonl: null, tensorboard: null}\n"
    )
    data = yaml.safe_load(recipe.to_yaml())
    data["callbacks"] = {
        key: value for key, value in data["callbacks"].items() if isinstance(find(CALLBACKS[key], None), Definition)
    }
    assert [error.message for error in VALIDATOR.iter_errors(data)] == []


def test_the_command_prints_it(project, capsys):
    from camshaft.schema import main

    assert main([]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(SCHEMA))


def test_a_recipe_may_name_its_schema(project):
    write("# yaml-language-server: $schema=recipe.schema.json\nmodule: {_target_: net.Net}\nmax_epochs: 1\n")
