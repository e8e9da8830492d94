"""Drive a strategy through its whole contract on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from camshaft.checkpoint import Entries, Reader, Shard, Store
from camshaft.module import Module
from camshaft.strategies.base import Strategy

_WIDTH, _BATCH, _STEPS = 16, 24, 6
_NONE = 1000


@dataclass(slots=True)
class Driven:
    """What driving a strategy gave: the same on every rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class _Layers(Module):
    """Layers that a strategy may wrap one by one; everything gets a gradient, and there is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, _WIDTH)
        self.middle = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))
        self.leave = nn.Linear(_WIDTH, 1)
        self.register_buffer("offset", torch.tensor([0.5]))
        self.none_on = -1

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        """Return the mean squared error, or no loss for the batch that was asked for."""
        hidden = self.enter(batch[0]).tanh()
        for layer in self.middle:
            hidden = hidden + layer(hidden).tanh()
        loss = mse_loss(self.leave(hidden) + self.offset, batch[1])
        return None if batch_idx == self.none_on else loss

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Say how layers may be split: some by their outputs, one by its inputs."""
        return {"enter": "colwise_gather", "middle.0": "colwise_gather", "middle.1": "rowwise_scatter"}


def drive(factory: Callable[[], Strategy], store: str | None, precision: str) -> Driven:
    """Run the contract and return what can be compared between strategies."""
    strategy = factory()
    strategy.recipe = {"batch_size": 2 * _BATCH, "accumulate": 2, "max_norm": 0.5}
    strategy.launch()
    try:
        _check_collectives(strategy)
        _check_agreement(strategy)
        torch.manual_seed(0)
        module = _Layers()
        strategy.prepare(module, [torch.optim.AdamW(module.parameters(), lr=1e-2)])
        outcome = Driven()
        for step in range(_STEPS):
            _update(strategy, outcome, step, precision)
        outcome.weights = gathered(strategy, strategy.named_state())
        _check_swap(strategy)
        if store is not None:
            _check_restore(strategy, store, precision)
            module.none_on = _NONE if strategy.data_rank == 0 and strategy.data_world_size > 1 else -1
            _check_none(strategy, precision)
        return outcome
    finally:
        strategy.teardown()


def _update(strategy: Strategy, outcome: Driven, step: int, precision: str) -> None:
    rank, world = strategy.data_rank, strategy.data_world_size
    strategy.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for micro in range(2):
        generator = torch.Generator().manual_seed(2 * step + micro)
        inputs = torch.randn(_BATCH, 4, generator=generator)
        share = slice(rank * _BATCH // world, (rank + 1) * _BATCH // world)
        batch = (inputs[share], inputs.sum(1, keepdim=True)[share])
        strategy.micro_step(sync=micro == 1, precision=precision)
        loss = strategy.run("training_step", strategy.to_device(batch), micro)
        strategy.backward(loss / 2)
        total += loss.detach().cpu().double() / 2
    assert strategy.unscale(), "the gradients are not finite"
    outcome.norms.append(float(strategy.clip_grad_norm(0.5)))
    assert strategy.step(), "step() did not update"
    outcome.losses.append(float(strategy.reduce(total.to(strategy.device), "mean")))


def gathered(strategy: Strategy, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Put whole tensors together, on every rank, from what each rank would save; blocks."""
    own = {name: _portable(strategy.shard(name, tensor)) for name, tensor in named}
    whole: dict[str, Tensor] = {}
    seen: dict[str, int] = {}
    for part in strategy.gather_objects(own):
        for name, entry in part.items():
            if entry is None:
                continue
            tensor, shape, offsets, flat = entry
            target = whole.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))
            seen[name] = seen.get(name, 0) + tensor.numel()
            if offsets is not None:
                target[tuple(slice(o, o + s) for o, s in zip(offsets, tensor.shape, strict=True))] = tensor
            else:
                target.view(-1)[flat : flat + tensor.numel()] = tensor.reshape(-1)
    for name, tensor in whole.items():
        assert seen[name] == tensor.numel(), f"the shards of {name} hold {seen[name]} of {tensor.numel()} numbers"
    return whole


def _portable(entry: Any) -> tuple[Tensor, tuple[int, ...], tuple[int, ...] | None, int] | None:
    if entry is None:
        return None
    if isinstance(entry, Shard):
        return entry.tensor.detach().cpu().clone(), entry.shape, entry.offsets, entry.flat_start or 0
    return entry.detach().cpu().clone(), tuple(entry.shape), None, 0


def _check_collectives(strategy: Strategy) -> None:
    rank, world = strategy.rank, strategy.world_size
    assert strategy.any(rank == world - 1), "any() missed the flag of the last rank"
    assert not strategy.any(False), "any() found a flag that nobody raised"
    value = torch.tensor(float(rank + 1), device=strategy.device)
    expected = {"sum": world * (world + 1) / 2, "mean": (world + 1) / 2, "min": 1.0, "max": float(world)}
    for op, result in expected.items():
        found = float(strategy.reduce(value.clone(), op))  # type: ignore[arg-type]
        assert found == result, f"reduce({op!r}) of 1 to {world} is {found}, not {result}"
    assert strategy.gather_objects({"rank": rank}) == [{"rank": r} for r in range(world)], "gather_objects"
    assert strategy.broadcast_object(rank) == 0, "broadcast_object did not give the main process's object"
    strategy.barrier()


def _check_agreement(strategy: Strategy) -> None:
    """One rank asks between two exchanges; all must learn of it at the same boundary, two exchanges later at most."""
    learned = None
    for boundary in range(1, 25):
        asks = boundary >= 3 and strategy.rank == strategy.world_size - 1
        if strategy.agree(1 if asks else 0, due=boundary % 4 == 0) & 1 and learned is None:
            learned = boundary
    everywhere = strategy.gather_objects(learned)
    assert len(set(everywhere)) == 1, f"the ranks agreed on a request at boundaries {everywhere}"
    assert learned is not None, "a request was never agreed on"
    assert learned <= 12, f"a request made at boundary 3 took effect at {learned}"


def _check_swap(strategy: Strategy) -> None:
    before = gathered(strategy, strategy.named_state())
    other = {name: torch.full_like(value.detach().float(), 0.25) for name, value in strategy.named_local()}
    with strategy.swapped(other):
        for name, value in strategy.named_local():
            assert bool((value == 0.25).all()), f"swapped() left {name} as it was"
    _require_same(gathered(strategy, strategy.named_state()), before, "after swapped()")


def _check_restore(strategy: Strategy, place: str, precision: str) -> None:
    """Save, go on, restore, go on again: both must do the same."""
    with Store(place, peers=strategy, strategy=strategy.name) as store:
        tensors = {f"model/{n}": strategy.shard(n, t) for n, t in strategy.named_state()}
        for index, name, key, tensor in strategy.optimizer_tensors():
            tensors[f"optimizer/{index}/{name}/{key}"] = strategy.shard(name, tensor)
        plain: Any = strategy.optimizer_data()
        path = store.save(Entries({k: v for k, v in tensors.items() if v is not None}, {"optimizers": plain}), step=1)
    saved = gathered(strategy, strategy.named_state())
    continued = _continue(strategy, precision)
    with Reader(path) as reader:
        with torch.no_grad():
            for name, tensor in strategy.named_state():
                strategy.load(name, tensor, reader, f"model/{name}")
        strategy.parameters_changed()
        _require_same(gathered(strategy, strategy.named_state()), saved, "after load()")
        data: Any = reader.data("optimizers")
        strategy.load_optimizers(data, reader)
    _require_same(_continue(strategy, precision), continued, "two updates after a restore")


def _continue(strategy: Strategy, precision: str) -> dict[str, Tensor]:
    for step in (100, 101):
        _update(strategy, Driven(), step, precision)
    return gathered(strategy, strategy.named_state())


def _check_none(strategy: Strategy, precision: str) -> None:
    """Leave the main process without a loss for one micro-batch: the others must not wait for it."""
    strategy.zero_grad()
    strategy.micro_step(sync=True, precision=precision)
    inputs = torch.randn(4, 4)
    loss = strategy.run("training_step", strategy.to_device((inputs, inputs[:, :1])), _NONE)
    strategy.backward(strategy.zero_loss() if loss is None else loss)
    strategy.unscale()
    strategy.step()
    strategy.barrier()


def _require_same(found: dict[str, Tensor], expected: dict[str, Tensor], when: str) -> None:
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different, f"{when}, these differ: {', '.join(different)}"
