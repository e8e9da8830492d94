"""Clipping equals torch's own, on what an optimizer step uses."""

import pytest
import torch

from camshaft.callback import Callback
from camshaft.callbacks.clip import ClipGradients
from camshaft.errors import RecipeError
from camshaft.testing import TinyModule, tiny_run


class Gradients(Callback):
    """Keep the gradients as the optimizer sees them, and before."""

    def __init__(self):
        self.kept = []

    def on_gradients(self, state):
        self.kept.append([p.grad.clone() for p in state.module.parameters()])


def clipped(**options):
    before, after = Gradients(), Gradients()
    torch.manual_seed(0)
    result = tiny_run(
        TinyModule(), callbacks={"before": before, "clip": ClipGradients(**options), "after": after}, log_every=1
    )
    return before.kept, after.kept, result


def test_the_joint_norm_is_bounded_and_logged():
    before, after, result = clipped(max_norm=0.5)
    for raw, cut in zip(before, after, strict=True):
        parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in raw]
        for parameter, gradient in zip(parameters, raw, strict=True):
            parameter.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        assert all(torch.equal(p.grad, g) for p, g in zip(parameters, cut, strict=True))
    assert result.metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-6)


def test_values_are_clamped():
    before, after, _ = clipped(max_value=0.01)
    for raw, cut in zip(before, after, strict=True):
        assert all(torch.equal(r.clamp(-0.01, 0.01), c) for r, c in zip(raw, cut, strict=True))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "ClipGradients has max_norm=None and max_value=None."),
        ({"max_norm": 1.0, "max_value": 1.0}, "ClipGradients has max_norm=1.0 and max_value=1.0."),
        ({"max_norm": 0.0}, "ClipGradients.max_norm is 0.0; it must be positive, or every update would be zero."),
        ({"max_norm": float("nan")}, "ClipGradients.max_norm is nan; it must be positive"),
    ],
)
def test_a_bound_that_makes_no_sense_is_refused(options, line):
    with pytest.raises(RecipeError) as error:
        ClipGradients(**options)
    assert str(error.value).splitlines()[0].startswith(line)
