"""camshaft.run takes a strategy as a recipe has it: a short name, or a name with options."""

import pytest

from camshaft.errors import RecipeError
from camshaft.testing import tiny_run


def test_a_mapping_is_a_name_with_options():
    assert tiny_run(strategy={"name": "single"}, max_steps=1).status == "finished"


@pytest.mark.parametrize(
    ("strategy", "lines"),
    [
        (
            "dpp",
            [
                "strategy 'dpp' is unknown.",
                "  Did you mean 'ddp'? The strategies are single, ddp, fsdp, deepspeed, tensor_parallel, megatron",
            ],
        ),
        (
            {"name": "ddp", "wrapping": ["Block"]},
            ["strategy 'ddp' has no option 'wrapping'.", "  It would be ignored.", "  Its options are "],
        ),
        ({"wrap": ["Block"]}, ["strategy None is unknown."]),
    ],
    ids=str,
)
def test_what_is_none_is_told(strategy, lines):
    with pytest.raises(RecipeError) as error:
        tiny_run(strategy=strategy)
    for said, expected in zip(str(error.value).splitlines(), lines, strict=False):
        assert said.startswith(expected)
