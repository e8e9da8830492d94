"""Evaluate in Lightning's order: validation inside a fit, and validate, test and predict by themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from camshaft.evaluation import _unchanged_metrics, isolated_streams
from camshaft.lightning.hooks import is_overridden

if TYPE_CHECKING:
    from camshaft.lightning.loaders import Loaders
    from camshaft.lightning.trainer import Trainer

_STAGES = {"validate": "validation", "test": "test", "predict": "predict"}


class Evaluator:
    """Run one evaluation loop of a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.predictions: list[list[Any]] = []

    def sanity_check(self, loaders: Loaders) -> None:
        """Run a few validation batches before training; results and random draws are taken back."""
        trainer = self._trainer
        trainer.sanity_checking = True
        with isolated_streams():
            trainer.caller.callbacks("on_sanity_check_start")
            self.run("validate", loaders, limit=trainer.num_sanity_val_steps)
            trainer.caller.callbacks("on_sanity_check_end")
        trainer.journal.clear()
        trainer.sanity_checking = False

    def run(self, stage: str, loaders: Loaders, *, limit: int | None = None) -> list[dict[str, float]]:
        """Evaluate on all loaders with every hook; return the metrics of each. Every rank calls this."""
        trainer, name = self._trainer, _STAGES[stage]
        with self._mode(name), self._gradients(stage), _book(trainer):
            trainer.caller.both(f"on_{name}_start")
            trainer.caller.both(f"on_{name}_epoch_start")
            self.predictions = [[] for _ in loaders.sources]
            finished = self._batches(stage, name, loaders, limit)
            trainer.journal.end_epoch()
            trainer.caller.both(f"on_{name}_epoch_end")
            trainer.journal.end_epoch()
            results = _results(trainer, len(loaders.sources))
            if finished:
                trainer.log_evaluation(stage)
                # What is saved from here on has been validated.
                trainer.loop_state.validation_pending = False
            trainer.caller.both(f"on_{name}_end")
        return results

    def _batches(self, stage: str, name: str, loaders: Loaders, limit: int | None) -> bool:
        trainer = self._trainer
        state = trainer.loop_state
        state.strategy.micro_step(sync=True, precision=state.precision)
        several = len(loaders.sources) > 1
        for number, source in enumerate(loaders.sources):
            for index, micro in enumerate(itertools.islice(source.iterate(0), loaders.rounds(number, limit))):
                where = (number,) if several else ()
                batch = trainer.caller.transfer(trainer.converted(micro.data), number)
                trainer.journal.begin_batch(batch, number if several else None)
                trainer.journal.muted = not micro.samples
                if micro.samples:
                    trainer.caller.both(f"on_{name}_batch_start", batch, index, *where)
                with _unchanged_metrics(trainer.lightning_module, active=trainer.journal.muted):
                    output = trainer.caller.call(
                        f"{name}_step", state.strategy.run, f"{name}_step", batch, index, *loaders.indices(number)
                    )
                if micro.samples:
                    self._end_batch(stage, name, output, batch, index, number, where)
                trainer.journal.muted = False
                if stage == "validate" and trainer.must_abandon(index):
                    return False
        return True

    def _end_batch(
        self, stage: str, name: str, output: Any, batch: Any, index: int, number: int, where: tuple[int, ...]
    ) -> None:
        trainer = self._trainer
        if stage == "predict" and trainer.returns_predictions:
            self.predictions[number].append(output)
        trainer.caller.both(f"on_{name}_batch_end", output, batch, index, *where)
        trainer.journal.end_batch()

    @contextmanager
    def _mode(self, name: str) -> Iterator[None]:
        """Put the module in eval mode through its hook, and give every submodule its own flag back."""
        trainer = self._trainer
        module = trainer.lightning_module
        flags = [(submodule, submodule.training) for submodule in module.modules()]
        trainer.caller.module(f"on_{name}_model_eval")
        try:
            yield
        finally:
            back = f"on_{name}_model_train"
            if hasattr(module, back) and is_overridden(back, module):
                trainer.caller.module(back)
            else:
                for submodule, training in flags:
                    submodule.training = training

    def _gradients(self, stage: str) -> AbstractContextManager[Any]:
        """Switch gradients off; inside a fit without inference mode, since a step may switch them on again."""
        if self._trainer.inference_mode and not self._trainer.is_fitting:
            return torch.inference_mode()
        return torch.no_grad()


@contextmanager
def _book(trainer: Trainer) -> Iterator[None]:
    yield from trainer.journal.evaluating()


def _results(trainer: Trainer, count: int) -> list[dict[str, float]]:
    """Return the values of the epoch, for each loader those with its suffix or with none."""
    logged = trainer.journal.active.values(on_step=False, training=False)["callback"]
    numbers = {name: float(value) for name, value in logged.items() if value is not None}
    results: list[dict[str, float]] = []
    for number in range(count):
        suffix = f"/dataloader_idx_{number}"
        own = {
            name: value for name, value in numbers.items() if "/dataloader_idx_" not in name or name.endswith(suffix)
        }
        results.append(own)
    return results
