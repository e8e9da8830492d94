"""One recipe gives one result: every strategy trains the losses, weights and averages of one process."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import parity

pytestmark = pytest.mark.distributed

CELLS = [*((2, name) for name in parity.TWO), *((4, name) for name in parity.FOUR)]
SHARDED = ("fsdp x2", "zero-3 x2")
FLOAT = 4
# Two such distances are the same when two digits of them are.
MEASURE = 1.01


@pytest.fixture(scope="module")
def launches() -> dict[int, Any]:
    """Train everything in two launches: of 2 and of 4 processes."""
    return {world: parity.launch(world) for world in (2, 4)}


@pytest.mark.parametrize(("world", "name"), CELLS, ids=str)
def test_a_strategy_trains_what_one_process_trains_in_fp32(launches, world, name):
    found = launches[world][0]
    losses, weights, average = parity.compare(found, name, parity.SINGLE)[:3]
    assert losses <= 1e-5
    assert weights <= 1e-5
    assert average <= 1e-5


@pytest.mark.parametrize(("world", "name"), CELLS, ids=str)
def test_in_bf16_a_strategy_differs_no_more_than_two_hand_written_runs(launches, world, name):
    found = launches[world][0]
    _, weights, average = parity.compare(found, name, parity.SINGLE)[3:]
    _, by_hand, by_hand_average = parity.compare(found, "hand ddp", "hand single")[3:]
    assert weights <= MEASURE * by_hand
    assert average <= MEASURE * by_hand_average


@pytest.mark.parametrize("world", [2, 4])
def test_one_process_trains_bit_for_bit_what_the_hand_written_loop_trains(launches, world):
    assert parity.compare(launches[world][0], parity.SINGLE, "hand single")[1:3] == [0.0, 0.0]


def test_every_step_and_the_validation_were_compared(launches):
    for ranks in launches.values():
        for (name, _), cell in ranks[0].items():
            if not name.startswith("hand"):
                assert len(cell.losses) == parity.STEPS
                assert len(cell.validation) == 1


@pytest.mark.parametrize("name", SHARDED)
def test_each_rank_holds_its_part_of_the_parameters_only(launches, name):
    whole = launches[2][0][parity.SINGLE, "fp32"].parameter_bytes
    held = [rank[name, "fp32"].parameter_bytes for rank in launches[2]]
    assert max(held) < 0.55 * whole
    assert sum(held) == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize("name", ["zero-1 x2", "zero-2 x2", *SHARDED])
def test_each_rank_holds_its_part_of_optimizer_state_and_average_only(launches, name):
    single = launches[2][0][parity.SINGLE, "fp32"]
    ranks = [rank[name, "fp32"] for rank in launches[2]]
    assert max(cell.state_bytes for cell in ranks) < 0.55 * single.state_bytes
    assert sum(cell.state_bytes for cell in ranks) == pytest.approx(single.state_bytes, rel=0.02)
    assert sum(cell.average_bytes for cell in ranks) == pytest.approx(single.average_bytes, rel=0.02)


def test_hsdp_holds_two_copies_of_two_parts(launches):
    whole = launches[4][0][parity.SINGLE, "fp32"].parameter_bytes
    held = [rank["hsdp 2x2", "fp32"].parameter_bytes for rank in launches[4]]
    assert max(held) < 0.55 * whole
    assert sum(held) == pytest.approx(2 * whole, rel=0.02)


@pytest.mark.parametrize("name", ["ddp x2", "zero-0 x2"])
def test_copies_are_whole(launches, name):
    single = launches[2][0][parity.SINGLE, "fp32"]
    for rank in launches[2]:
        assert rank[name, "fp32"].parameter_bytes == single.parameter_bytes
        assert rank[name, "fp32"].state_bytes == single.state_bytes


def test_tensor_parallelism_splits_the_layers_of_its_plan(launches):
    single = launches[2][0][parity.SINGLE, "fp32"]
    # Of each block the two feed-forward matrices, of 4 times the square of the width.
    split = 2 * 2 * (4 * 64 * 64) * FLOAT
    for rank in launches[2]:
        assert rank["tp x2", "fp32"].parameter_bytes == single.parameter_bytes - split // 2
