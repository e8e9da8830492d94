"""A schedule is due when it says so, refuses what can never be, and knows whether a run is long enough for it."""

from types import SimpleNamespace

import pytest

from camshaft import schedule as clockwork
from camshaft.errors import RecipeError
from camshaft.schedule import Schedule, seconds


def due_steps(schedule, until=12, epoch_every=4):
    """Return the steps of a run at which a schedule is due, with epochs of four steps."""
    found = []
    for step in range(1, until + 1):
        clock = SimpleNamespace(step=step, epoch=(step - 1) // epoch_every)
        if schedule.due(clock, epoch_end=step % epoch_every == 0):
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500 steps", Schedule(every_steps=500)),
        ("1 step", Schedule(every_steps=1)),
        (" 3  Steps ", Schedule(every_steps=3)),
        ("2 epochs", Schedule(every_epochs=2)),
        ("10 minutes", Schedule(every_secs=600.0)),
        ("1.5h", Schedule(every_secs=5400.0)),
        ("90 s", Schedule(every_secs=90.0)),
        (7, Schedule(every_steps=7)),
        ({"every": "3 steps", "after": 10}, Schedule(every_steps=3, after=10)),
        ({"at": 5}, Schedule(at=frozenset({5}))),
        ({"at": [5, 9], "every": "1 epoch"}, Schedule(at=frozenset({5, 9}), every_epochs=1)),
        ({"at": {5, 9}}, Schedule(at=frozenset({5, 9}))),
        ({"after": "10 steps"}, Schedule(every_steps=1, after=10)),
    ],
)
def test_intervals_are_read_as_people_write_them(text, expected):
    assert Schedule.parse(text) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        "", "often", "5", "5.5 steps", "-5 steps", "0 steps", 0, -3, True, None, 2.5, "0 s", {}, {"evry": 3},
        {"at": []},
        {"at": [0]}, {"at": [-1]}, {"at": "5"}, {"at": [1.5]}, {"at": True}, {"after": -1}, {"after": "2 epochs"},
        {"after": 0}, {"every": "never"},
    ],
)  # fmt: skip
def test_what_can_never_be_due_is_refused(wrong):
    with pytest.raises(RecipeError):
        Schedule.parse(wrong)


def test_steps_are_counted_over_epochs():
    assert due_steps(Schedule(every_steps=3)) == [3, 6, 9, 12]


def test_epochs_are_due_at_their_last_step():
    assert due_steps(Schedule(every_epochs=1)) == [4, 8, 12]
    assert due_steps(Schedule(every_epochs=2)) == [8]


def test_listed_steps_add_to_an_interval():
    assert due_steps(Schedule.parse({"every": "5 steps", "at": [1, 7]})) == [1, 5, 7, 10]


def test_after_holds_everything_back_and_counts_its_own_step():
    assert due_steps(Schedule.parse({"every": "2 steps", "after": 7, "at": [3, 9]})) == [8, 9, 10, 12]
    assert due_steps(Schedule.parse({"after": 10})) == [10, 11, 12]


def test_nothing_is_due_before_the_first_step():
    assert not Schedule(every_steps=1).due(SimpleNamespace(step=0, epoch=0))


def test_asking_again_does_not_change_the_answer():
    schedule, clock = Schedule(every_steps=2), SimpleNamespace(step=2, epoch=0)
    assert [schedule.due(clock) for _ in range(3)] == [True] * 3


def test_seconds_start_again_once_they_were_due(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clockwork.time, "monotonic", lambda: now[0])
    schedule, clock, answers = Schedule.parse("10 s"), SimpleNamespace(step=1, epoch=0), []
    for moment in (105, 110, 111, 119, 121):
        now[0] = float(moment)
        answers.append(schedule.due(clock))
    assert answers == [False, True, False, False, True]


def test_only_seconds_differ_between_ranks():
    assert Schedule.parse("5 steps").is_same_on_all_ranks
    assert not Schedule.parse("5 s").is_same_on_all_ranks


@pytest.mark.parametrize(
    ("spec", "steps", "epochs", "expected"),
    [
        ("10 steps", 10, None, True), ("10 steps", 9, None, False), ("10 steps", None, 3, True),
        ("3 epochs", 100, 3, True), ("3 epochs", 100, 2, False), ("3 epochs", 100, None, True),
        ({"at": [50]}, 49, None, False), ({"at": [50]}, 50, None, True),
        ({"at": [50], "after": 60}, 100, None, False), ({"at": [50, 70], "after": 60}, 100, None, True),
        ({"every": "10 steps", "after": 95}, 99, None, False), ({"every": "10 steps", "after": 95}, 100, None, True),
        ({"every": "1 epoch", "after": 200}, 100, 5, False), ({"every": "5 s", "after": 200}, 100, None, False),
        ("5 s", 1, 1, True), ({"after": 100}, 100, None, True), ({"after": 101}, 100, None, False),
    ],
)  # fmt: skip
def test_a_schedule_knows_whether_a_run_is_long_enough(spec, steps, epochs, expected):
    assert Schedule.parse(spec).can_fire(max_steps=steps, max_epochs=epochs) is expected


@pytest.mark.parametrize("spec", ["3 steps", {"every": "3 steps", "after": 5}, {"at": [2, 11]}, {"after": 6}])
def test_can_fire_agrees_with_what_is_due(spec):
    for length in range(1, 13):
        assert Schedule.parse(spec).can_fire(max_steps=length, max_epochs=None) == bool(
            due_steps(Schedule.parse(spec), until=length)
        )


def test_a_schedule_that_is_extended_is_copied():
    shared = Schedule(every_steps=5)
    assert Schedule.parse({"every": shared, "after": 3}).after == 3
    assert shared == Schedule(every_steps=5)


def test_a_schedule_is_written_as_a_recipe_would():
    schedule = Schedule.parse({"every": "1 epoch", "at": [9, 2], "after": 2})
    assert str(schedule) == "every 1 epoch, at 2, 9, after 2 steps"


@pytest.mark.parametrize(
    ("value", "expected"), [(None, None), (5, 5.0), (0.5, 0.5), ("2 h", 7200.0), ("90 min", 5400.0)]
)
def test_lengths_of_time_are_read_in_seconds(value, expected):
    assert seconds(value) == expected


@pytest.mark.parametrize("wrong", ["soon", "5 steps", "2 epochs", "90", 0, -1, True, "0 s", float("nan")])
def test_what_is_no_length_of_time_is_refused(wrong):
    with pytest.raises(RecipeError, match="length of time"):
        seconds(wrong)
