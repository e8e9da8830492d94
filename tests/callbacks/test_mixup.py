"""Mixtures are convex, labels follow inputs, and a resumed run mixes alike."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from camshaft import DataModule, Module
from camshaft.callbacks.mixup import Mixup
from camshaft.errors import CallbackError, RecipeError
from camshaft.testing import StopAt, tiny_run

CLASSES = 3


class Classes(DataModule):
    """Samples whose input is the one-hot of their label, so that a mixture shows its weights."""

    def train_dataloader(self):
        labels = torch.arange(24) % CLASSES
        return DataLoader(TensorDataset(nn.functional.one_hot(labels).float(), labels), batch_size=6, shuffle=True)


class Sees(Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(CLASSES, CLASSES), []

    def training_step(self, batch):
        inputs, targets = batch
        self.seen.append((inputs.clone(), targets.clone()))
        return nn.functional.cross_entropy(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seen(**settings):
    module = Sees()
    callbacks = {"mixup": Mixup(CLASSES, alpha=1.0), **settings.pop("callbacks", {})}
    result = tiny_run(module, Classes(), callbacks=callbacks, max_epochs=2, **settings)
    return module.seen, result


def test_labels_are_mixed_as_inputs_are():
    for inputs, targets in seen()[0]:
        assert torch.equal(inputs, targets)
        assert torch.allclose(targets.sum(1), torch.ones(6))
    assert any(((targets > 0) & (targets < 1)).any() for _, targets in seen()[0])


def test_a_resumed_run_mixes_alike(tmp_path):
    whole, _ = seen()
    settings = {"runs_dir": tmp_path, "checkpoint": {"every": None}}
    first, stopped = seen(callbacks={"stop": StopAt(3)}, **settings)
    rest, _ = seen(resume=str(stopped.run_dir), **settings)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole, first + rest, strict=True))


def test_other_batches_are_refused():
    with pytest.raises(CallbackError, match="int64 labels"):
        tiny_run(callbacks={"mixup": Mixup(CLASSES)})


@pytest.mark.parametrize("options", [{"num_classes": 1}, {"num_classes": 3, "alpha": 0.0}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(RecipeError, match="Mixup has num_classes"):
        Mixup(**options)
