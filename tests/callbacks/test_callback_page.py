"""What docs/callbacks.md says that a callback keeps and costs is what its class says."""

import importlib
import re
from pathlib import Path

import pytest

from camshaft.callback import Callback
from camshaft.callbacks.finite import FiniteLoss
from camshaft.recipe.registry import CALLBACKS

PAGE = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text()
SECTION = PAGE.partition("## What each keeps")[2].partition("\n## ")[0]
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", SECTION, re.MULTILINE))


def cls_of(name):
    module, _, attribute = CALLBACKS[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_callback_is_there_in_the_order_it_is_registered():
    assert list(ROWS) == list(CALLBACKS)


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_that_has_state_says_what_it_keeps(name):
    cls, (kept, _) = cls_of(name), ROWS[name].split(" | ")
    has_state = cls.state_dict is not Callback.state_dict
    # What these add to a checkpoint stands in place of weights.
    has_state |= name in ("lora", "quantize")
    assert has_state == (not kept.startswith("nothing"))


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_that_reads_the_device_says_that_it_waits(name):
    waits = cls_of(name).needs_host_sync or (name == "finite" and FiniteLoss("skip").needs_host_sync)
    assert waits == ("waits for the device" in ROWS[name])
