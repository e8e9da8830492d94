"""Seeding makes a run repeatable, and hands torch's settings back."""

import random

import numpy as np
import pytest
import torch

from camshaft.callback import Callback
from camshaft.callbacks.seed import Seed
from camshaft.errors import RecipeError
from camshaft.testing import tiny_run


class Draws(Callback):
    """Draw from every stream at the first step."""

    def __init__(self):
        self.drawn = []

    def on_step(self, state):
        self.drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))  # noqa: NPY002 - the global one


def draws(seed):
    callback = Draws()
    tiny_run(callbacks={"seed": Seed(seed), "draws": callback}, max_steps=3)
    return callback.drawn


def test_the_same_seed_draws_alike_and_another_otherwise():
    first = draws(1)
    assert draws(1) == first
    assert all(a != b for a, b in zip(draws(2), first, strict=True))


def test_streams_are_those_of_a_script_with_the_same_seed():
    callback = Draws()
    tiny_run(callbacks={"seed": Seed(5), "draws": callback}, max_steps=1, validate=None, data=None)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    assert callback.drawn[0][:2] == (random.random(), np.random.rand())  # noqa: NPY002


@pytest.mark.parametrize("seed", [-1, 1 << 63, 10**30])
def test_a_seed_that_torch_does_not_take_is_refused(seed):
    with pytest.raises(RecipeError) as error:
        Seed(seed)
    assert str(error.value).splitlines()[0] == f"Seed.seed is {seed}."


@pytest.mark.parametrize("seed", [1 << 32, (1 << 63) - 1])
def test_a_large_seed_is_taken_by_every_stream(seed):
    assert draws(seed) == draws(seed)


class Nondeterministic(Callback):
    """Run an operation that torch has no deterministic implementation of."""

    def on_step(self, state):
        assert torch.are_deterministic_algorithms_enabled()
        torch.empty(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_deterministic_algorithms_are_asked_for_and_given_back():
    with pytest.raises(RuntimeError, match="deterministic"):
        tiny_run(callbacks={"seed": Seed(0, deterministic=True), "bad": Nondeterministic()}, max_steps=1)
    assert not torch.are_deterministic_algorithms_enabled()
