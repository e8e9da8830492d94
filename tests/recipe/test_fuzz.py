"""Malformed recipes give a clean error or a valid recipe, never a traceback."""

import contextlib
import string
from pathlib import Path

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from camshaft.errors import RecipeError
from camshaft.recipe import Recipe, load
from camshaft.recipe.settings import Settings, fields
from camshaft.recipe.source import parse

SLOW = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
WORDS = ["module", "_target_", "net.Net", "torch.nn.Linear", "name",
"adamw", "every", "1 epoch", "${name}", "${", "???", "checkpoint",
         "ema", "at", "after", "null", "os.system", "", "1e3", "on",
         "a.b", "extends", "base.yaml", "${oc.env:HOME}"]  # fmt: skip
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
recipes = st.dictionaries(st.sampled_from([*fields(Settings), "extends", "unknown"]), values, max_size=8)


def attempt(text, overrides=()):
    Path("fuzz.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        recipe = load("fuzz.yaml", overrides, inspect=True)
    except RecipeError as error:
        message = str(error)
        if not message or len(message) > 100_000:
            raise
        return None
    assert isinstance(recipe, Recipe)
    assert isinstance(recipe.settings, Settings)
    return recipe


@SLOW
@given(recipes)
def test_any_mapping_of_known_keys(project, data):
    attempt(yaml.safe_dump(data, allow_unicode=True))


@SLOW
@given(recipes)
def test_any_value_on_top_of_a_right_recipe(project, data):
    good = {"module": {"_target_": "net.Net"}, "max_epochs": 3, "optimizer": {"name": "adamw"}}
    recipe = attempt(yaml.safe_dump(good | data, allow_unicode=True))
    if recipe is not None:
        Path("again.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        again = load("again.yaml", inspect=True)
        assert again.to_yaml() == recipe.to_yaml()


@SLOW
@given(st.text(max_size=200))
def test_any_text(project, text):
    attempt(text)


@SLOW
@given(st.text(alphabet="{}[]:-,&*!|>'\"%@`#?\n\t ab1.~$<=", max_size=80))
def test_any_yaml_punctuation(project, text):
    attempt(text)
    with contextlib.suppress(RecipeError):
        parse(text, "x")


@SLOW
@given(st.lists(st.text(alphabet=string.ascii_letters + ".=+~[]{}:,${}\"' 0123456789\n\0", max_size=30), max_size=4))
def test_any_override(project, overrides):
    attempt("module: {_target_: net.Net}\nmax_epochs: 1\n", overrides)


@SLOW
@given(st.binary(max_size=200))
def test_any_bytes(project, data):
    Path("fuzz.yaml").write_bytes(data)
    with contextlib.suppress(RecipeError):
        load("fuzz.yaml", inspect=True)
