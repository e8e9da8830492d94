"""What is read from source equals what Python finds by importing."""

import ast
import contextlib
import importlib
import inspect

import pytest

from camshaft.recipe.modules import Definition, find
from camshaft.recipe.registry import OPTIMIZERS, SCHEDULERS, SLOTS
from camshaft.recipe.signatures import signature

TORCH = [
    "torch.nn.Linear", "torch.nn.Conv2d", "torch.nn.TransformerEncoderLayer",
    "torch.nn.LSTM", "torch.nn.CrossEntropyLoss",
    "torch.nn.Sequential", "torch.optim.AdamW", "torch.utils.data.DataLoader",
    "torchmetrics.classification.MulticlassAccuracy",
]  # fmt: skip


@pytest.mark.parametrize("path", [*OPTIMIZERS.values(), *SCHEDULERS.values(), *TORCH])
def test_the_source_says_what_the_import_says(path):
    module, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    expected = {
        key: parameter.default
        for key, parameter in inspect.signature(cls.__init__).parameters.items()
        if key != "self" and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    definition = find(path, None)
    assert isinstance(definition, Definition)
    found = signature(definition, None)
    assert set(expected) <= set(found.parameters)
    for key, default in expected.items():
        parameter = found.parameters[key]
        assert parameter.is_required == (default is inspect.Parameter.empty)
        with contextlib.suppress(ValueError, TypeError, SyntaxError):
            assert ast.literal_eval(parameter.default) == default


def test_every_built_in_exists_takes_plain_arguments_and_fits_its_slot():
    for slot in SLOTS.values():
        for name, path in slot.builtins.items():
            definition = find(path, None)
            assert isinstance(definition, Definition), f"{name}: {path} is not there"
            found = signature(definition, None)
            assert found.all_bases_known, path
            assert slot.base in found.bases, path


def test_a_generic_base_and_an_alias_are_followed(project):
    (project / "more.py").write_text(
        "import net as n\nfrom net import Net as Renamed\nclass A(n.Net): pass\nclass B(Renamed): pass\n"
        "from dataclasses import dataclass, field\n@dataclass\nclass C:\n"
        "    x: int\n    y: list[int] = field(default_factory=list)\n"
    )
    for name in ("A", "B"):
        found = signature(find(f"more.{name}", str(project)), str(project))
        assert list(found.parameters) == ["hidden", "dropout", "names", "head"]
        assert "camshaft.module.Module" in found.bases
    found = signature(find("more.C", str(project)), str(project))
    assert {name: p.is_required for name, p in found.parameters.items()} == {"x": True, "y": False}
