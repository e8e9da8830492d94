"""Train every bundled recipe through its command, and reach what each promises."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from camshaft.recipe import load

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def command(entry: str, recipe: Path, *arguments: str, timeout: int = 120) -> None:
    """Run ``python -m camshaft.<entry>`` on a recipe; it has to succeed."""
    done = subprocess.run(
        [sys.executable, "-m", f"camshaft.{entry}", str(recipe), *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def values(events: Path, name: str) -> list[float]:
    """Read a scalar from the TensorBoard files under a folder, in the order of its steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, float] = {}
    for folder in sorted({file.parent for file in events.rglob("events.out.tfevents.*")}):
        accumulator = EventAccumulator(str(folder))
        accumulator.Reload()
        if name in accumulator.Tags()["scalars"]:
            found |= {event.step: event.value for event in accumulator.Scalars(name)}
    return [found[step] for step in sorted(found)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_short_and_opens_with_what_it_shows(recipe):
    lines = recipe.read_text().splitlines()
    assert len(lines) < 40
    assert lines[0].startswith("# ")


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Train the recipes that were chosen, two at a time, and return what each gives: most of it is starting up."""
    chosen = [item.callspec.params["recipe"] for item in request.session.items if "three_steps" in item.name]
    with ThreadPoolExecutor(2) as pool:
        yield {recipe: pool.submit(three_steps, recipe, tmp_path_factory.mktemp(recipe.stem)) for recipe in chosen}


def three_steps(recipe: Path, folder: Path) -> Path:
    # A warm-up has to be shorter than the run, and validation has to come within it.
    scheduler = load(str(recipe), inspect=True).config.get("scheduler") or {}
    short = ["max_steps=3", "validate=3 steps", "limit_validation_batches=1", "limit_test_batches=1"]
    short += ["scheduler.warmup_steps=1"] if "warmup_steps" in scheduler else []
    command("fit", recipe, f"runs_dir={folder}", *short)
    return folder


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_trains_three_steps(recipe, runs):
    folder = runs[recipe].result()
    (status,) = folder.rglob("status.json")
    report = json.loads(status.read_text())
    assert (report["state"], report["step"]) == ("finished", 3)
    assert any(name.startswith("val") for name in report["metrics"])
    # Whatever decides on its best checkpoint was measured.
    assert report["best"] is not None
    assert list(folder.rglob("events.out.tfevents.*"))


def test_digits_are_recognised(tmp_path):
    command("fit", ROOT / "recipes" / "digits.yaml", f"runs_dir={tmp_path}")
    assert values(tmp_path, "test/acc")[-1] >= 0.96


@pytest.mark.long
@pytest.mark.parametrize(("name", "metric", "bar"), [("mnist", "test/acc", 0.97), ("diamonds", "test/r2", 0.98)])
def test_a_recipe_reaches_its_bar_on_the_test_split(name, metric, bar, tmp_path):
    command("fit", ROOT / "recipes" / f"{name}.yaml", f"runs_dir={tmp_path}", timeout=500)
    assert values(tmp_path, metric)[-1] >= bar


@pytest.mark.long
def test_chargpt_learns_to_write_below_two_nats(tmp_path):
    command("fit", ROOT / "recipes" / "chargpt.yaml", f"runs_dir={tmp_path}", timeout=580)
    assert values(tmp_path, "val/loss")[-1] <= 2.0


@pytest.mark.long
def test_a_classifier_of_real_digits_recognises_all_ten_drawn_classes(tmp_path):
    command("fit", ROOT / "recipes" / "gan.yaml", f"runs_dir={tmp_path}", timeout=500)
    assert values(tmp_path, "val/recognised_worst")[-1] >= 0.8
