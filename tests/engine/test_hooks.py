"""Events reach their listeners in order, when they are due, and a failing listener does what it was told to."""

import warnings

import pytest
import torch

from camshaft.callback import EVENTS, Callback, main_process_only
from camshaft.errors import StrategyError
from camshaft.hooks import Hooks
from camshaft.schedule import Schedule
from camshaft.testing import Recorder, TinyData, tiny_run

RAISING = [event for event in EVENTS if event not in ("on_restore", "on_exception")]
STEP_EVENTS = ["on_step_start", "on_batch", "on_backward", "on_gradients", "on_step"]


def labelled(into, label, **options):
    return Recorder(into=into, label=label, **options)


def test_listeners_run_in_order_and_backwards_at_ends():
    heard = []
    tiny_run(data=TinyData(4), callbacks={"a": labelled(heard, "a"), "b": labelled(heard, "b")})
    by_event = {}
    for name, _ in heard:
        label, event = name.split(".")
        by_event.setdefault(event, []).append(label)
    assert by_event.keys() == set(EVENTS) - {"on_restore", "on_checkpoint", "on_checkpoint_saved", "on_exception"}
    for event, labels in by_event.items():
        assert labels == (["b", "a"] if event.endswith("_end") else ["a", "b"]), event


def test_only_overridden_events_have_listeners():
    class Two(Callback):
        def on_step(self, state):
            pass

        def on_fit_end(self, state):
            pass

    two = Two()
    hooks = Hooks({"two": two})
    assert [event for event in EVENTS if hooks.listeners(event)] == ["on_step", "on_fit_end"]
    assert hooks.on_step == two.on_step, "a single listener is called without anything in between"


def test_an_event_without_listeners_does_nothing_and_hands_the_batch_back():
    hooks, batch = Hooks({}), object()
    assert hooks.on_batch(None, batch) is batch
    assert hooks.on_step(None) is None


def test_replacements_of_a_batch_are_handed_on_and_none_leaves_it():
    class Add(Callback):
        def __init__(self, amount):
            self.amount = amount

        def on_batch(self, state, batch):
            return None if self.amount is None else batch + self.amount

    hooks = Hooks({"one": Add(1), "none": Add(None), "ten": Add(10)})
    assert hooks.on_batch(None, 5) == 16


def test_a_returned_value_counts_for_batches_alone():
    class Loud(Callback):
        def on_step_start(self, state, window):
            return "something"

        def on_gradients(self, state):
            return True

    assert tiny_run(callbacks={"loud": Loud()}).step == 6


@pytest.mark.parametrize(
    ("schedule", "due"),
    [("2 steps", [2, 4, 6]), ("1 epoch", [3, 6]), ({"at": [1, 5]}, [1, 5]), ({"every": "1 step", "after": 5}, [5, 6])],
)
def test_a_scheduled_listener_hears_all_of_a_step_that_is_due_and_every_other_event(schedule, due):
    recorder = Recorder()
    recorder.schedule = Schedule.parse(schedule)
    tiny_run(data=TinyData(12), callbacks={"record": recorder}, max_epochs=2)
    heard = [event for event in recorder.names if event in STEP_EVENTS]
    assert heard == STEP_EVENTS * len(due)
    assert [step for event, step in recorder.events if event == "on_step"] == due
    assert recorder.names.count("on_epoch_start") == recorder.names.count("on_validation_end") == 2


class Failing(Callback):
    def __init__(self, event, on_error="disable"):
        self.on_error = on_error
        self.calls = 0
        setattr(self, event, self.fail)

    def fail(self, *args):
        self.calls += 1
        raise ValueError("as asked")


def failing(event, **options):
    """Return a callback whose ``event`` raises, of a class that overrides that one event."""
    kind = type("Own", (Failing,), {event: getattr(Recorder, event)})
    return kind(event, **options)


@pytest.mark.parametrize("event", RAISING)
def test_a_disabled_callback_warns_once_and_the_run_goes_on_without_it(event):
    callback, recorder = failing(event), Recorder()
    with pytest.warns(
        UserWarning, match=f"^callback 'own' raised in {event} and is off from here on: ValueError: as"
    ) as w:
        result = tiny_run(callbacks={"own": callback, "record": recorder}, checkpoint={}, max_epochs=2)
    assert (result.status, result.step, callback.calls, len(w)) == ("finished", 12, 1, 1)
    assert recorder.names.count(event) == {"on_step": 12, "on_fit_end": 1}.get(event, recorder.names.count(event)) > 0


@pytest.mark.parametrize(
    "event", [e for e in EVENTS if e not in ("on_restore", "on_exception", "on_launch", "on_module")]
)
def test_a_callback_that_raises_ends_the_run_and_others_hear_of_it(event):
    recorder = Recorder(only=["on_exception", "on_fit_end"])
    callbacks = {"first": recorder, "own": failing(event, on_error="raise"), "last": recorder}
    with pytest.raises(ValueError, match="as asked"):
        tiny_run(callbacks=callbacks, checkpoint={"on_exception": False})
    expected = [] if event == "on_fit_end" else ["on_exception"] * 2
    assert recorder.names == [*expected, "on_fit_end", "on_fit_end"]


def test_a_failing_end_keeps_the_first_error_in_sight():
    class Noise(Callback):
        def on_exception(self, state, error):
            raise KeyError("second")

    recorder = Recorder(only=["on_exception", "on_fit_end"])
    with pytest.raises(KeyError, match="second") as caught:
        tiny_run(callbacks={"record": recorder, "noise": Noise(), "own": failing("on_step", on_error="raise")})
    assert recorder.names == ["on_exception", "on_fit_end"]
    assert isinstance(caught.value.__context__, ValueError), "the error that ended the run stays in the traceback"


def test_main_process_hooks_are_dropped_elsewhere():
    class Note(Callback):
        @main_process_only
        def on_step(self, state):
            pass

        def on_fit_end(self, state):
            pass

    assert len(Hooks({"note": Note()}).listeners("on_step")) == 1
    elsewhere = Hooks({"note": Note()}, is_main=False)
    assert [e for e in EVENTS if elsewhere.listeners(e)] == ["on_fit_end"]


@pytest.mark.parametrize(
    "collective",
    [
        lambda s: s.any(True), lambda s: s.reduce(torch.ones(1)), lambda s: s.gather_objects(1),
        lambda s: s.broadcast_object(1), lambda s: s.barrier(),
    ],
    ids=["any", "reduce", "gather_objects", "broadcast_object", "barrier"],
)  # fmt: skip
def test_a_collective_in_a_main_process_hook_raises_instead_of_hanging(collective):
    class Lonely(Callback):
        @main_process_only
        def on_step(self, state):
            collective(state.strategy)

    with pytest.raises(StrategyError, match="inside a hook that only the main process runs"):
        tiny_run(callbacks={"lonely": Lonely()})


def test_the_explanation_lists_every_event_with_its_listeners_in_the_order_they_run():
    class Start(Callback):
        def on_step_start(self, state, window):
            pass

        @main_process_only
        def on_epoch_end(self, state):
            pass

    class End(Callback):
        schedule = Schedule(every_steps=5)

        def on_step_start(self, state, window):
            pass

        def on_epoch_end(self, state):
            pass

    lines = Hooks({"start": Start(), "end": End()}).explain().splitlines()
    expected = {
        "on_step_start": "start, end (every 5 steps)",
        "on_epoch_end": "end, start (main process)",
    }
    assert lines == [f"{event:<20} {expected.get(event, '-')}" for event in EVENTS]


def test_no_warning_is_given_in_a_plain_run():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiny_run(checkpoint={}).status == "finished"
