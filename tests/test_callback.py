"""A wrong hook fails when its class is defined."""

import pytest

from camshaft.callback import EVENTS, Callback, inside_main_only, is_main_only, main_process_only
from camshaft.errors import CallbackError


def define(**hooks):
    return type("Own", (Callback,), hooks)


def test_a_misspelled_event_names_the_nearest():
    with pytest.raises(CallbackError, match="'on_step_start'"):
        define(on_step_strat=lambda self, state, window: None)


def test_a_hook_of_the_wrong_shape_shows_the_right_one():
    with pytest.raises(CallbackError, match=r"def on_step\(self, state\)"):
        define(on_step=lambda self: None)
    with pytest.raises(CallbackError, match="does not take"):
        define(on_step=lambda self, state, *, why: None)


@pytest.mark.parametrize(
    "hook", [lambda self, state: None, lambda self, *args: None, lambda self, state, more=1: None, lambda *a, **k: None]
)
def test_whatever_takes_the_arguments_is_a_hook(hook):
    assert define(on_step=hook)


def test_hooks_that_calling_would_not_run_are_refused():
    async def coroutine(self, state):
        pass

    def generator(self, state):
        yield

    for hook in (coroutine, generator):
        with pytest.raises(CallbackError, match="coroutine or a generator"):
            define(on_step=hook)


def test_an_error_policy_is_no_event():
    assert define(on_error="disable").on_error == "disable"
    assert "on_error" not in EVENTS


def test_other_methods_and_inherited_hooks_are_left_alone():
    class Base(Callback):
        def on_step(self, state):
            pass

        def once(self):
            pass

    assert type("Derived", (Base,), {}).on_step is Base.on_step


def test_a_static_hook_with_self_missing_is_refused():
    with pytest.raises(CallbackError):
        define(on_step=staticmethod(lambda state: None))


def test_every_event_documents_itself():
    assert all(getattr(Callback, event).__doc__ for event in EVENTS)
    assert len(EVENTS) == 18


def test_main_process_hooks_keep_their_shape_and_are_seen_while_they_run():
    seen = []

    class Own(Callback):
        @main_process_only
        def on_step(self, state):
            seen.append(inside_main_only())

    assert is_main_only(Own.on_step)
    Own().on_step(None)
    assert (seen, inside_main_only()) == ([True], False)


def test_a_main_process_hook_that_raises_leaves_no_trace():
    class Own(Callback):
        @main_process_only
        def on_step(self, state):
            raise ValueError

    with pytest.raises(ValueError):
        Own().on_step(None)
    assert not inside_main_only()
