"""Run a trainer: attach, prepare, train and evaluate, in Lightning's order, on the engine's loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from camshaft import loop
from camshaft.callback import Callback as EngineCallback
from camshaft.hooks import Hooks
from camshaft.lightning import loading
from camshaft.lightning.evaluating import Evaluator
from camshaft.lightning.flags import ENGINE_PRECISION
from camshaft.lightning.loaders import Loaders, request
from camshaft.lightning.preflight import require_fit, require_step
from camshaft.lightning.scheduling import configure
from camshaft.metrics import Metrics
from camshaft.signals import heeding
from camshaft.state import Limits, State

if TYPE_CHECKING:
    from camshaft.lightning.trainer import Trainer

_NEVER = 1 << 40


class Bridge(EngineCallback):
    """Turn the engine's events of an epoch and of an exception into Lightning's."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_epoch_start(self, state: State) -> None:
        """Fire ``on_train_epoch_start``."""
        self._trainer.caller.both("on_train_epoch_start")

    def on_epoch_end(self, state: State) -> None:
        """Fire ``on_train_epoch_end``, monitoring callbacks last."""
        close_epoch(self._trainer)

    def on_exception(self, state: State, error: BaseException) -> None:
        """Fire ``on_exception``, and tell the loggers."""
        trainer = self._trainer
        trainer.caller.callbacks("on_exception", error)
        trainer.caller.data("on_exception", error)
        for logger in trainer.loggers:
            logger.finalize("failed")


def close_epoch(trainer: Trainer) -> None:
    """End an epoch: reduce, fire ``on_train_epoch_end``, step what waits for metrics, and log."""
    caller, journal = trainer.caller, trainer.journal
    trainer.is_closing = True
    journal.end_epoch()
    caller.callbacks("on_train_epoch_end", monitoring=False)
    caller.module("on_train_epoch_end")
    journal.end_epoch()
    if trainer.loop_state.at_epoch_end:
        # Before the callbacks that save, so that a checkpoint holds the rates that its metric led to.
        trainer.advance_schedulers("epoch", plateau=True)
    caller.callbacks("on_train_epoch_end", monitoring=True)
    journal.end_epoch()
    trainer.log_metrics(journal.to_log())
    journal.training.reset()
    trainer.is_closing = False


def make_state(trainer: Trainer, stage: Any) -> State:
    """Return the engine's state of a run of one stage."""
    state = State(
        trainer.lightning_module, trainer.engine, metrics=Metrics(), stage=stage, seed=trainer.data_seed,
        limits=Limits(
            max_epochs=None if trainer.max_epochs == -1 else trainer.max_epochs, max_secs=trainer.max_secs,
            log_every=_NEVER, sanity_batches=0,
        ),
    )  # fmt: skip
    state.metrics.logs_loss = True
    state.precision = ENGINE_PRECISION.get(trainer.precision, "fp32")
    state.accumulate = trainer.accumulate_grad_batches
    return state


def fit(trainer: Trainer, ckpt_path: Any) -> None:
    """Train from the first hook to the last."""
    require_fit(trainer)
    checkpoint = loading.read_for_run(trainer, ckpt_path)
    _set_up(trainer, "fit")
    trainer.loop_state = state = trainer.kept_state("fit")
    if checkpoint is not None:
        loading.load_weights(trainer, checkpoint)
    trainer.optimizers, trainer.lr_scheduler_configs = configure(trainer)
    trainer.optimizers = state.optimizers = trainer.engine.prepare(trainer.lightning_module, trainer.optimizers)
    trainer.wrap_optimizers()
    hooks = Hooks({"lightning": Bridge(trainer)}, is_main=trainer.engine.is_main)
    state.evaluation = lambda *_args, **_options: validate_now(trainer)
    with heeding(state), loop.session(state, hooks):
        trainer.caller.both("on_fit_start")
        trainer.log_hparams()
        if checkpoint is not None:
            loading.restore(trainer, checkpoint)
        _train(trainer, state, hooks)
        _raise_if_signalled(state)
        trainer.caller.both("on_fit_end")
        _tear_down(trainer, "fit")
        for logger in trainer.loggers:
            logger.finalize("success")


def _train(trainer: Trainer, state: State, hooks: Hooks) -> None:
    state.status, state.control.stopping = "running", None
    trainer.should_stop = False
    if not state.restored:
        _sanity_check(trainer)
    if trainer.limit_train_batches == 0 or loop.is_done(state) or trainer.has_reached_max_steps:
        return
    trainer.open_train()
    trainer.open_validation()
    trainer.stepper.begin()
    trainer.caller.both("on_train_start")
    if state.streams is not None:
        state.streams()
    if state.validation_pending:
        loop.validate(state, hooks)
    while not loop.is_done(state):
        trainer.reload_if_due()
        loop.train_epoch(state, hooks, trainer.stepper)
    _raise_if_signalled(state)
    if state.progress.epoch_batches:
        # The run ended inside an epoch: what waits for its end is done, and the position stays where it is.
        close_epoch(trainer)
        trainer.has_open_epoch = True
    trainer.caller.both("on_train_end")
    state.status = "finished"


def _sanity_check(trainer: Trainer) -> None:
    if not trainer.num_sanity_val_steps or not trainer.validates:
        return
    loaders = trainer.open_validation(always=True)
    if loaders is not None:
        trainer.sanity_checking = True
        with trainer.running("sanity_check"):
            Evaluator(trainer).sanity_check(loaders)


def validate_now(trainer: Trainer) -> dict[str, float] | None:
    """Validate inside a fit; None when a signal cut it short."""
    trainer.validation_due = False
    loaders = trainer.open_validation(always=True)
    if loaders is None or not trainer.validates:
        return {}
    if not trainer.optimizer_has_gradients:
        trainer.caller.module("on_validation_model_zero_grad")
    with trainer.running("validate"):
        evaluator = Evaluator(trainer)
        evaluator.run("validate", loaders)
    trainer.last_validation = trainer.clock()
    if trainer.must_abandon(0):
        return None
    trainer.advance_schedulers("step", plateau=True)
    return {}


def evaluate(trainer: Trainer, stage: str, given: Any, ckpt_path: Any) -> tuple[list[dict[str, float]], list[list[Any]]]:
    """Validate, test or predict by itself; return the metrics and the predictions of each loader."""
    require_step(trainer, stage)
    checkpoint = loading.read_for_run(trainer, ckpt_path)
    _set_up(trainer, stage)
    trainer.loop_state = state = trainer.kept_state(stage)
    if checkpoint is not None:
        loading.load_weights(trainer, checkpoint)
    trainer.prepare_for_evaluation()
    loaders = request(trainer, stage, given)
    if loaders is None:
        raise loading.no_data(stage)
    trainer.note_loaders(stage, loaders)
    with _failing(trainer, state):
        with trainer.running(stage):
            evaluator = Evaluator(trainer)
            results = evaluator.run(stage, loaders)
        _tear_down(trainer, stage)
        for logger in trainer.loggers:
            logger.finalize("success")
    return results, evaluator.predictions


@contextmanager
def _failing(trainer: Trainer, state: State) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        Bridge(trainer).on_exception(state, error)
        raise


def _set_up(trainer: Trainer, stage: str) -> None:
    """Launch, attach, and prepare the data: up to where optimizers are configured."""
    trainer.launch()
    _prepare_data(trainer)
    trainer.caller.data("setup", stage)
    for callback in trainer.callbacks:
        trainer.caller.call("setup", callback.setup, trainer, trainer.lightning_module, stage)
    trainer.caller.module("setup", stage)
    trainer.caller.module("configure_model")
    trainer.to_precision()


def _prepare_data(trainer: Trainer) -> None:
    """Run ``prepare_data`` once on each machine, and let an error end every rank instead of hanging the others."""
    engine = trainer.engine
    error: Exception | None = None
    for owner in (trainer.datamodule, trainer.lightning_module):
        first = engine.local_rank == 0 if getattr(owner, "prepare_data_per_node", True) else engine.rank == 0
        if owner is not None and first and error is None:
            try:
                trainer.caller.call("prepare_data", owner.prepare_data)
            except Exception as caught:  # noqa: BLE001 - raised below, on every rank
                error = caught
    if engine.any(error is not None):
        raise error or RuntimeError("prepare_data failed on another rank; its traceback is above.")


def _tear_down(trainer: Trainer, stage: str) -> None:
    trainer.caller.data("teardown", stage)
    for callback in trainer.callbacks:
        trainer.caller.call("teardown", callback.teardown, trainer, trainer.lightning_module, stage)
    trainer.caller.module("teardown", stage)


def _raise_if_signalled(state: State) -> None:
    """Turn a signal that ended the loop into the exception that Lightning raises."""
    from camshaft.lightning.errors import SIGTERMException

    if state.signal == "interrupted":
        raise KeyboardInterrupt
    if state.signal == "terminated":
        raise SIGTERMException


def open_loaders(trainer: Trainer, stage: str, given: Any) -> Loaders | None:
    """Ask for the loaders of a stage."""
    return request(trainer, stage, given)
