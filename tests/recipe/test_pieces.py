"""The pieces under recipes/ compose with the recipes that share them."""

from pathlib import Path

import pytest

from camshaft.recipe import load

ROOT = Path(__file__).parents[2] / "recipes"
MACHINES = ["launch.machine_rank=1", "launch.main_process_ip=10.0.0.1"]


@pytest.mark.parametrize("piece", sorted((ROOT / "hardware").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["mnist", "chargpt"])
def test_hardware_goes_with_any_recipe(name, piece):
    overrides = MACHINES if piece.stem.startswith("2x") else []
    recipe = load([ROOT / f"{name}.yaml", piece], overrides, inspect=True)
    assert recipe.name == name
    assert recipe.config["code"] == str(ROOT)


def test_every_base_is_shared_by_at_least_two_recipes():
    texts = [path.read_text() for path in ROOT.glob("*.yaml")]
    for piece in (ROOT / "base").glob("*.yaml"):
        assert sum(f"base/{piece.name}" in text for text in texts) >= 2, piece.name


def test_a_shared_piece_says_what_the_recipes_leave_out():
    assert load(ROOT / "mnist.yaml", inspect=True).config["optimizer"] == {"name": "adamw", "lr": 2e-3}
    assert load(ROOT / "diamonds.yaml", inspect=True).config["scheduler"] == {
        "name": "cosine",
        "warmup_steps": 50,
        "min_ratio": 0.05,
    }
