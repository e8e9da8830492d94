"""Stopped anywhere and continued, a run of one process is the run that was never stopped, bit for bit."""

import json
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from camshaft import DataModule
from camshaft.callback import Callback
from camshaft.callbacks.digest import Digest
from camshaft.callbacks.ema import EMA
from camshaft.testing import ManualTiny, StopAt, TinyData, TinyIterable, TinyModule, tiny_run
from camshaft.testing.tiny import tiny_set

STEPS = 11


class Augmented(Dataset):
    """Samples that draw from all three global streams when they are read."""

    def __init__(self):
        self.samples = tiny_set(22)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        inputs, target = self.samples[index]
        return inputs + 0.1 * torch.randn(4) + 0.1 * random.random() + 0.1 * np.random.rand(), target  # noqa: NPY002


class Data(DataModule):
    def __init__(self, workers=0):
        self.workers = workers

    def train_dataloader(self):
        return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=self.workers)


class Counting(Data):
    """Data with a state of its own, which decides what comes next."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def train_dataloader(self):
        outer = self

        class Scaled(Augmented):
            def __getitem__(self, index):
                outer.seen += 1
                inputs, target = super().__getitem__(index)
                return inputs * (1 + 0.01 * outer.seen), target

        return DataLoader(Scaled(), batch_size=4, shuffle=True)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Drawing:
    """A stream without a length that draws its order and its noise from the global streams."""

    def __iter__(self):
        order = torch.randperm(22)
        for start in range(0, 22, 4):
            inputs, targets = tiny_set(22)[order[start : start + 4]]
            yield inputs + random.random() + torch.randn(4), targets


class Samples(IterableDataset):
    """Samples of a stream, shared among the workers that read it, each with noise of its own."""

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, 22, step):
            inputs, target = tiny_set(22)[index]
            yield inputs + torch.randn(4) + random.random(), target


class Streamed(DataModule):
    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=4, num_workers=2)


class DrawsAtStart(Callback):
    """Draw from every stream when the run starts, as an import or a logger may."""

    def on_fit_start(self, state):
        random.random()
        np.random.rand()  # noqa: NPY002
        torch.rand(1)


def adamw(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def plateau(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}


def logging(**more):
    """Return a module whose metrics of an epoch are halfway when the run stops."""

    class Logging(TinyModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train/loss", loss, on_step=True, on_epoch=True)
            self.log("train/worst", loss, on_step=False, on_epoch=True, reduce="max")
            return loss

    return Logging(dropout=0.3, **more)


CASES = {
    "augmentation and dropout": (Data, {}),
    "workers": (lambda: Data(2), {}),
    "accumulation": (Data, {"accumulate": 2}),
    "fp16 with overflows": (Data, {"precision": "fp16"}),
    "bf16": (Data, {"precision": "bf16"}),
    "data with a state": (Counting, {}),
    "a stream without a length": (TinyIterable, {}),
    "a stream that draws": (Drawing, {}),
    "a stream read by workers": (Streamed, {}),
    "a scheduler that waits for a metric": (
        lambda: TinyData(22),
        {"validate": "2 steps", "module": lambda: logging(configure=plateau)},
    ),
    "two optimizers by hand": (Data, {"module": ManualTiny}),
    "draws at the start": (Data, {"callbacks": {"draws": DrawsAtStart()}}),
}


def train(place, make_data, settings, **more):
    """Train on; return the digest's lines by step, and the weights and averages."""
    settings = dict(settings)
    callbacks = {"ema": EMA(0.9), "digest": Digest(str(place / "digest")), **settings.pop("callbacks", {})}
    callbacks |= more.pop("callbacks", {})
    torch.manual_seed(0)
    module = settings.pop("module", lambda: logging(configure=adamw))()
    result = tiny_run(
        module, make_data(), callbacks=callbacks, max_steps=STEPS, runs_dir=place, checkpoint={"every": None},
        log_every=3, **settings, **more,
    )  # fmt: skip
    lines = [json.loads(line) for line in (place / "digest").read_text().splitlines()]
    return {line["step"]: line for line in lines}, result, callbacks["ema"].averages


@pytest.mark.parametrize("stop", [4, 6], ids=["inside an epoch", "at its end"])
@pytest.mark.parametrize("name", CASES)
def test_two_parts_equal_the_whole(tmp_path, name, stop):
    make_data, settings = CASES[name]
    for part in ("whole", "parts"):
        (tmp_path / part).mkdir()
    whole, result, averages = train(tmp_path / "whole", make_data, settings)
    _, first, _ = train(tmp_path / "parts", make_data, settings, callbacks={"stop": StopAt(stop)})
    assert first.step == stop
    parts, second, again = train(tmp_path / "parts", make_data, settings, resume=str(first.run_dir))
    assert parts == whole
    assert second.metrics == result.metrics
    assert all(torch.equal(v, second.module.state_dict()[n]) for n, v in result.module.state_dict().items())
    assert all(torch.equal(v, again[n]) for n, v in averages.items())
