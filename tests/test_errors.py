"""Every error says what, why and how to fix it, also after it crossed a process boundary."""

import pickle

import pytest

from camshaft import errors
from camshaft.errors import CamshaftError, RecipeError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CamshaftError)]


def test_the_first_line_is_what_happened_and_the_rest_is_indented():
    error = RecipeError("lr is -1.", why="It would climb.", fix="Make it positive.")
    assert str(error) == "lr is -1.\n  It would climb. Make it positive."


def test_without_reason_and_fix_there_is_one_line():
    assert str(RecipeError("lr is -1.")) == "lr is -1."


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling_whole(kind):
    copied = pickle.loads(pickle.dumps(kind("a", why="b", fix="c")))
    assert (type(copied), copied.what, copied.why, copied.fix, str(copied)) == (kind, "a", "b", "c", "a\n  b c")


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_caught_as_a_camshaft_error(kind):
    with pytest.raises(CamshaftError):
        raise kind("a")
