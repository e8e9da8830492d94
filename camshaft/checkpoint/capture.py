"""Turn the state of a run into a checkpoint at a step boundary, and a checkpoint back into the state."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from camshaft.checkpoint.entries import Entries
from camshaft.checkpoint.reader import Reader
from camshaft.checkpoint.reference import left_out
from camshaft.checkpoint.values import encode
from camshaft.errors import CheckpointError
from camshaft.loader import Position
from camshaft.state import Checkpoint, Progress
from camshaft.strategies.optimizers import plain_value, revive_value

if TYPE_CHECKING:
    from camshaft.hooks import Hooks
    from camshaft.state import State

_NOT_PLAIN = object()
_NAMED = 8


def save(state: State, hooks: Hooks, tag: str, *, exact: bool = True, last: bool = False) -> None:
    """Write everything that decides the future of the run. Every rank calls this, between two steps.

    With ``state.save_in_background`` it is copied now and written while training goes on, one at a
    time; ``last`` waits, since nothing trains on.
    """
    if state.store is None:
        return
    land(state, hooks)
    record = collect(state, tag, exact=exact)
    hooks.on_checkpoint(state, record)
    entries = Entries(record.tensors, record.data, record.rank_data, record.rank_tensors)
    metrics = {name: {"value": value, "step": step} for name, (value, step) in record.metrics.items()}
    meta = {"tag": tag, "exact": exact, "epoch": state.progress.epoch, "metrics": metrics}
    state.saved_step = record.step
    record.tensors, record.rank_tensors = {}, {}
    if state.save_in_background and not last:
        state.store.save_async(entries, step=record.step, tag=tag, meta=meta)
        state.flight = record
        state.control.landed = 0
        return
    path = state.store.save(entries, step=record.step, tag=tag, meta=meta)
    _announce(state, hooks, record, path)


def land(state: State, hooks: Hooks) -> None:
    """Wait for the checkpoint in flight, if there is one, and announce it. Every rank calls this.

    Raises:
        CheckpointError: it could not be written.
    """
    if state.flight is not None:
        record, state.flight = state.flight, None
        _announce(state, hooks, record, state.store.wait())


def _announce(state: State, hooks: Hooks, record: Checkpoint, path: Any) -> None:
    state.saved = record
    hooks.on_checkpoint_saved(state, Path(str(path)))


def save_after(state: State, hooks: Hooks, error: BaseException) -> None:
    """Save what is safe to save after an exception, on a run of one process; never hide the exception."""
    if not state.save_on_exception or state.strategy.world_size > 1 or state.in_update:
        return
    if isinstance(error, KeyboardInterrupt):
        # Whoever presses Ctrl-C twice does not want to wait for the disk.
        return
    if state.progress.step in {state.saved_step, 0}:
        return
    try:
        save(state, hooks, "exception", exact=False)
    except Exception as second:  # noqa: BLE001 - the first exception is what the user must see
        warnings.warn(f"nothing could be saved after {type(error).__name__}: {second}", stacklevel=2)


def collect(state: State, tag: str, *, exact: bool = True) -> Checkpoint:
    """Gather the entries of this rank; callbacks add theirs in ``on_checkpoint``."""
    strategy, step = state.strategy, state.progress.step
    record = Checkpoint(step, tag, exact=exact)
    record.metrics = {name: pair for name, pair in state.values.items() if pair[1] == step}
    for name, tensor in strategy.named_state():
        _add(record, f"model/{name}", strategy.shard(name, tensor))
    for index, name, key, tensor in strategy.optimizer_tensors():
        _add(record, f"optimizer/{index}/{name}/{key}", strategy.shard(name, tensor))
    record.data = {
        "progress": dataclasses.asdict(state.progress),
        "optimizers": strategy.optimizer_data(),
        "schedulers": [_scheduler_state(plan.scheduler) for plan in state.plans],
        "callbacks": {name: callback.state_dict() for name, callback in state.callbacks.items()},
        "scaler": strategy.scaler.state_dict() if strategy.scaler is not None else None,
        "values": {name: list(pair) for name, pair in state.values.items()},
        "validation_pending": state.validation_pending,
        "precision": state.precision,
        "hparams": dict(state.module.hparams),
        "data": state.data_state() if state.data_state is not None else {},
        "stream": _stream_state(state),
        "metrics": strategy.gather_data(state.metrics.state_dict()),
        "module": type(state.module).__qualname__,
        "world_size": strategy.data_world_size,
    }
    record.rank_data["streams"] = capture_streams()
    record.rank_tensors.update(stream_tensors())
    return record


def restore(state: State, hooks: Hooks, reader: Reader) -> None:
    """Put a checkpoint of any strategy and world size into a prepared state. Every rank calls this."""
    strategy = state.strategy
    load_weights(state, reader)
    data: dict[str, Any] = {name: reader.data(name) for name in reader.data_names()}
    strategy.load_optimizers(data["optimizers"], reader)
    _restore_schedulers(state, data["schedulers"])
    state.progress = Progress(**data["progress"])
    state.values = {name: (pair[0], pair[1]) for name, pair in data["values"].items()}
    state.validation_pending = bool(data["validation_pending"])
    _restore_metrics(state, data["metrics"])
    strategy.micro_step(sync=True, precision=data["precision"])
    if data["scaler"] is not None and strategy.scaler is not None:
        strategy.scaler.load_state_dict(data["scaler"])
    for name, callback in state.callbacks.items():
        if name in data["callbacks"]:
            callback.load_state_dict(data["callbacks"][name])
    _move_position(state, data["world_size"])
    if state.train_data is not None:
        state.train_data.load(data.get("stream"))
    state.restored = True
    state.saved_step = state.progress.step
    record = Checkpoint(state.progress.step, "restored", data=data, reader=reader)
    hooks.on_restore(state, record)
    state.streams = read_streams(state, reader)


def restore_for_evaluation(state: State, hooks: Hooks, reader: Reader) -> None:
    """Put weights, counters and the callbacks' own state back, without optimizers: all that evaluation needs."""
    load_weights(state, reader)
    data: dict[str, Any] = {name: reader.data(name) for name in reader.data_names()}
    state.progress = Progress(**data["progress"])
    state.precision = data["precision"]
    for name, callback in state.callbacks.items():
        if name in data["callbacks"]:
            callback.load_state_dict(data["callbacks"][name])
    state.restored = True
    hooks.on_restore(state, Checkpoint(state.progress.step, "restored", data=data, reader=reader))


def load_weights(state: State, reader: Reader) -> None:
    """Fill the module's parameters and buffers from a checkpoint of any strategy.

    Frozen weights that the checkpoint only refers to stay as they were built.

    Raises:
        CheckpointError: the module has other weights than the checkpoint; all differences are named.
    """
    strategy = state.strategy
    own = dict(strategy.named_state())
    saved = {name.removeprefix("model/") for name in reader.names("model")}
    absent = set(left_out(reader)) - saved
    own = {name: tensor for name, tensor in own.items() if name not in absent}
    differing = sorted(set(own) ^ saved)
    if differing:
        missing = [name for name in differing if name in own]
        raise CheckpointError(
            f"the module and the checkpoint have different weights: {', '.join(differing[:_NAMED])}"
            f"{' and more' if len(differing) > _NAMED else ''}.",
            why=f"{len(missing)} are only in the module, {len(differing) - len(missing)} only in the checkpoint.",
            fix="Build the module as it was saved.",
        )
    with torch.no_grad():
        for name, tensor in own.items():
            key = f"model/{name}"
            shape = tuple(reader.spec(key).shape)
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{name} has shape {tuple(tensor.shape)} in the module and {shape} in the checkpoint.",
                    fix="Build the module as it was saved.",
                )
            strategy.load(name, tensor, reader, key)
    strategy.parameters_changed()


def capture_streams() -> dict[str, Any]:
    """Return the state of python's and numpy's global streams as JSON."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 - the stream user code draws from
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
    }


def stream_tensors() -> dict[str, Tensor]:
    """Return the state of torch's global streams, of the CPU and of this rank's device, as byte tensors."""
    tensors = {"torch_cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors["torch_cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        tensors["torch_mps"] = torch.mps.get_rng_state()
    return tensors


def read_streams(state: State, reader: Reader) -> Callable[[], None]:
    """Read every random stream of this rank, and return what gives them back.

    That is called last, when nothing but the loop is left to run: whatever else starts a run (loggers,
    callbacks, imports that draw) then finds them as it did in the run that was saved. A rank that the saved
    run did not have starts streams of its own, from (seed, rank, step).

    Raises:
        CheckpointError: a stream that exists here was not saved.
    """
    from camshaft.sampler import derive_seed
    from camshaft.streams import seed_streams

    # Ranks that share their data must draw alike, in dropout for one.
    rank = state.strategy.data_rank
    saved: Any = reader.rank_data("streams", rank)
    if saved is None:
        seed = derive_seed(state.seed, "resumed", rank, state.progress.step)
        return lambda: seed_streams(seed)
    tensors = reader.rank_tensors(rank)
    for name in stream_tensors():
        if name not in tensors:
            raise CheckpointError(
                f"the checkpoint has no random stream {name!r} of rank {rank}.",
                why="Dropout and sampling would differ from the uninterrupted run.",
                fix="Resume on the kind of device that saved it.",
            )
    return lambda: _write_streams(saved, tensors)


def _write_streams(saved: Any, tensors: Mapping[str, Tensor]) -> None:
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(tensors["torch_cpu"])
    if "torch_cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["torch_cuda"])
    if "torch_mps" in tensors and torch.backends.mps.is_available():
        torch.mps.set_rng_state(tensors["torch_mps"])


def _move_position(state: State, world_size: int) -> None:
    """Count the batches of the running epoch as this many ranks do."""
    progress = state.progress
    progress.epoch_batches = progress.epoch_batches * world_size // state.strategy.data_world_size


def _stream_state(state: State) -> Any:
    """Return where the training data stands; data whose own state is no JSON is read again on resume."""
    if state.train_data is None:
        return None
    progress = state.progress
    batches = progress.epoch_batches * state.strategy.data_world_size
    saved = state.train_data.save(Position(progress.epoch_samples, batches))
    try:
        encode({"stream": saved}, where="stream")
    except CheckpointError:
        return {**(saved or {}), "data": None, "streams": None}
    return saved


def _add(record: Checkpoint, name: str, entry: Any) -> None:
    if entry is not None:
        record.tensors[name] = entry


def _restore_metrics(state: State, saved: list[dict[str, Any]]) -> None:
    """Give every rank its sums back; in another number of ranks the first takes those of all."""
    strategy = state.strategy
    if len(saved) == strategy.data_world_size:
        state.metrics.load_state_dict(saved[strategy.data_rank])
    elif strategy.data_rank == 0:
        for sums in saved:
            state.metrics.load_state_dict(sums)


def _scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's plain state; what is no plain data is rebuilt by the recipe, not saved."""
    return dict(_plain_part(scheduler.state_dict()))


def _plain_part(value: Any) -> Any:
    """Return the plain data in a value; a dict loses its other entries, so that nested schedulers keep theirs."""
    if isinstance(value, dict):
        entries = {k: _plain_part(v) for k, v in value.items() if isinstance(k, str)}
        return {k: v for k, v in entries.items() if v is not _NOT_PLAIN}
    if isinstance(value, (list, tuple)):
        items = [_plain_part(item) for item in value]
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in items) else items
    if isinstance(value, Tensor) and value.numel() == 1:
        return plain_value("scheduler", value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else _NOT_PLAIN


def _overlay(own: Any, saved: Any) -> Any:
    """Return a fresh scheduler's state with what was saved in it."""
    if isinstance(own, dict) and isinstance(saved, dict):
        # A dict of other keys, such as the milestones of a MultiStepLR, was not saved.
        return {**own, **{k: _overlay(own.get(k), v) for k, v in saved.items()}}
    if isinstance(own, (list, tuple)) and isinstance(saved, (list, tuple)) and len(own) == len(saved):
        return type(own)(_overlay(a, b) for a, b in zip(own, saved, strict=True))
    return revive_value(saved)


def _restore_schedulers(state: State, saved: list[dict[str, Any]]) -> None:
    if len(saved) != len(state.plans):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} learning-rate schedulers and this run {len(state.plans)}.",
            fix="Give the same schedulers, or start from the weights alone.",
        )
    for plan, values in zip(state.plans, saved, strict=True):
        plan.scheduler.load_state_dict(_overlay(plan.scheduler.state_dict(), values))
