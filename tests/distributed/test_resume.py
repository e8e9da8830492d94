"""A run in two parts equals a run in one: bit for bit under its own strategy, to rounding under any other."""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import resuming
from driving import furthest
from resuming import AT_END, INSIDE, LATER, SAMPLES, STEPS, TWO, WORKING

from camshaft.testing import run_processes

pytestmark = pytest.mark.distributed
NAMES = ["single", *TWO, "hsdp"]
FOUR = {"hsdp": resuming.HSDP}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def single(place):
    """Train on one process, whole and in parts."""
    found = {("single", "whole"): [resuming.train("single", place / "whole", **resuming.DROPPING)]}
    for stop in (INSIDE, AT_END):
        found["single", stop] = resuming.in_two_parts("single", place / f"{stop}", stop, **resuming.DROPPING)
    found["single", "whole with workers"] = [resuming.train("single", place / "worked", **WORKING)]
    found["single", LATER] = resuming.in_two_parts("single", place / f"{LATER}", LATER, **WORKING)
    return found


@pytest.fixture(scope="module")
def runs(place, single):
    """Return what every rank of every strategy noted: two launches, and one process that goes on from theirs."""
    left = single["single", LATER][0]["directory"]
    two = run_processes(2, resuming.on_ranks, TWO, str(place / "two"), left, timeout_s=300)
    four = run_processes(4, resuming.on_ranks, FOUR, str(place / "four"), left, timeout_s=120)
    found = {key: [value] for key, value in single.items()}
    for ranks in (two, four):
        found |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    checkpoint = resuming.checkpoint_of(two[0]["zero-3", LATER][0]["directory"], LATER)
    found["single", "moved"] = [[resuming.train("single", place / "moved", resume=checkpoint, **WORKING)]]
    return found


@pytest.mark.parametrize("stop", [INSIDE, AT_END, LATER])
@pytest.mark.parametrize("name", NAMES)
def test_two_parts_equal_the_whole_bit_for_bit(runs, name, stop):
    wholes = runs[name, "whole with workers" if stop == LATER else "whole"]
    for (whole,), (first, second) in zip(wholes, runs[name, stop], strict=True):
        assert list(second["lines"]) == list(range(1, STEPS + 1))
        assert second["lines"] == whole["lines"]
        assert first["seen"] + second["seen"] == whole["seen"]
        assert first["records"] + second["records"] == whole["records"]
        for part in ("weights", "averages"):
            assert all(second[part][key].equal(tensor) for key, tensor in whole[part].items())


@pytest.mark.parametrize("name", NAMES)
def test_the_checkpoint_of_another_strategy_and_world_goes_on_as_its_own(runs, name):
    whole = runs["single", "whole with workers"][0][0]
    (moved,) = runs[name, "moved"][0]
    for part in ("weights", "averages"):
        assert furthest(moved[part], whole[part]) <= 1e-5
    for record, expected in zip(moved["records"], whole["records"][-len(moved["records"]) :], strict=True):
        assert record[:-1] == expected[:-1]
        assert record[-1] == pytest.approx(expected[-1], rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_no_sample_is_lost_or_seen_twice(runs, name):
    first = resuming.counts([rank[0] for rank in runs["single", LATER]])
    rest = resuming.counts([rank[0] for rank in runs[name, "moved"]])
    seen = first + rest
    # Two whole epochs of 6 steps, and two more steps.
    assert set(seen) == set(range(SAMPLES))
    assert Counter(seen.values()) == Counter({3: 2 * resuming.BATCH, 2: SAMPLES - 2 * resuming.BATCH})
