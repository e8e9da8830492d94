"""Check on a GPU what a CPU only emulates or has no use for."""

import importlib.util

import pytest
import torch
from parts import different, distance, fit, weights

from camshaft.callbacks.offload import Offload
from camshaft.callbacks.precision import Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("library", ["torchao", "transformer_engine"])
def test_float8_products_learn_as_bf16_does(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    run = fit(callbacks={"p": Precision({"fp8": {"library": library}})}, device="cuda", batch_size=16, max_steps=32)
    reference = fit(callbacks={"p": Precision("bf16")}, device="cuda", batch_size=16, max_steps=32)
    assert different(weights(run), weights(reference))
    assert run.metrics["train/loss"] < 2 * reference.metrics["train/loss"] + 0.1


def test_what_is_offloaded_leaves_the_device_and_changes_nothing():
    held = {}

    class Look(Offload):
        def on_step(self, state):
            held["devices"] = {
                value.device.type
                for entry in state.optimizers[0].state.values()
                for key, value in entry.items()
                if key != "step"
            }

    run = fit(callbacks={"offload": Look(activations=True, optimizer=True)}, device="cuda")
    assert held["devices"] == {"cpu"}
    assert distance(weights(run), weights(fit(device="cuda"))) < 1e-6
