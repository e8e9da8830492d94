"""Write a recipe and read its errors."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from camshaft.errors import RecipeError
from camshaft.recipe import Recipe, load


def write(text: str, name: str = "r.yaml") -> str:
    Path(name).write_text(text)
    return name


def read(text: str, overrides: Sequence[str] = (), **options: object) -> Recipe:
    return load(write(text), overrides, inspect=True, **options)


def errors(text: str, overrides: Sequence[str] = (), **options: object) -> str:
    with pytest.raises(RecipeError) as caught:
        read(text, overrides, **options)
    return str(caught.value)
