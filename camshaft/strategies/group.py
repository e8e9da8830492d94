"""Join the processes of a run and exchange host values between them."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from camshaft.errors import StrategyError

_BITS = 8
_LENGTH, _SMALL = 8, 2040


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher told this process through its environment."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def read(cls) -> Launched | None:
        """Return it, or None when no launcher started this process."""
        env = os.environ
        if "RANK" not in env or "WORLD_SIZE" not in env:
            return None
        rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        return cls(rank, int(env.get("LOCAL_RANK", rank)), world, int(env.get("LOCAL_WORLD_SIZE", world)))


@dataclass(slots=True)
class _Rendezvous:
    """The store that this process met the others in, kept for as long as it lives."""

    store: Any = None
    generation: int = 0
    joined: list[Any] = field(default_factory=list)


class Group:
    """The processes of a run, as one of them sees them.

    Values on the host travel through a gloo group of their own, so that they wait for no device and
    no device waits for them. Every rank calls every method, in the same order.
    """

    _met: ClassVar[_Rendezvous] = _Rendezvous()

    def __init__(self, launched: Launched, device: torch.device, *, timeout_s: float) -> None:
        self.launched = launched
        self.device = device
        _join(self._met, launched, device, timeout_s)
        self.host = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._pending = 0
        self._flying: tuple[dist.Work, Tensor] | None = None

    def leave(self) -> None:
        """Leave the other processes."""
        self._flying = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def any(self, flag: bool) -> bool:
        """Say whether any rank's flag is set."""
        flags = torch.tensor([int(flag)], dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.host)
        return bool(flags.item())

    def agree(self, requests: int, *, due: bool) -> int:
        """Collect requests; at a due boundary, send them and return what the last exchange brought.

        One integer reduction is in the air at a time. It was sent a whole interval ago, so waiting
        for it at the next due boundary costs nothing, and every rank sees it at the same one.
        """
        self._pending |= requests
        if not due:
            return 0
        brought = 0
        if self._flying is not None:
            work, bits = self._flying
            work.wait()
            brought = sum(1 << i for i, bit in enumerate(bits.tolist()) if bit)
        # What all ranks act on now is not asked for again.
        sent = self._pending & ~brought
        self._pending = 0
        bits = torch.tensor([sent >> i & 1 for i in range(_BITS)], dtype=torch.int32)
        work = dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.host, async_op=True)
        self._flying = (work, bits)
        return brought

    def reduce(self, value: Tensor, op: str) -> Tensor:
        """Return ``value`` reduced over all ranks: on the host for a host tensor, else on its device."""
        group = self.host if value.device.type == "cpu" else dist.group.WORLD
        kinds = {
            "sum": dist.ReduceOp.SUM,
            "mean": dist.ReduceOp.SUM,
            "min": dist.ReduceOp.MIN,
            "max": dist.ReduceOp.MAX,
        }
        result = value.detach().clone()
        dist.all_reduce(result, kinds[op], group=group)
        return result / self.launched.world_size if op == "mean" else result

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks.

        Small values take one collective, where ``all_gather_object`` takes two: lengths, then bytes.
        """
        own = pickle.dumps(value)
        heads = self._gather_bytes(len(own).to_bytes(_LENGTH, "little") + own[:_SMALL], _LENGTH + _SMALL)
        lengths = [int.from_bytes(head[:_LENGTH], "little") for head in heads]
        parts = [head[_LENGTH:] for head in heads]
        if max(lengths) > _SMALL:
            rests = self._gather_bytes(own[_SMALL:], max(lengths) - _SMALL)
            parts = [part + rest for part, rest in zip(parts, rests, strict=True)]
        return [pickle.loads(part[:n]) for part, n in zip(parts, lengths, strict=True)]  # noqa: S301 - from our own ranks

    def _gather_bytes(self, own: bytes, size: int) -> list[bytes]:
        sent = torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.launched.world_size)]
        dist.all_gather(received, sent, group=self.host)
        return [part.numpy().tobytes() for part in received]

    def broadcast_object(self, value: Any) -> Any:
        """Return the value of rank 0."""
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self.host)
        return held[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.barrier(group=self.host)


def _join(met: _Rendezvous, launched: Launched, device: torch.device, timeout_s: float) -> None:
    """Make the default process group, with our time-out, before any library makes it with its own."""
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        if met.store is None:
            met.store, _, _ = next(rendezvous("env://", launched.rank, launched.world_size, timeout=timeout))
            met.store.set_timeout(timeout)
        # Processes that leave and join again must not read the addresses of the group they left.
        met.generation += 1
        hook = sys.excepthook
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"camshaft-{restart}-{met.generation}", met.store)
        dist.init_process_group(
            backend, store=store, rank=launched.rank, world_size=launched.world_size, timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        sys.excepthook = hook  # torch puts the rank before every line, once more each time
    except (dist.DistError, OSError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise StrategyError(
            f"rank {launched.rank} could not meet the other {launched.world_size - 1} process(es) at {where}: {error}",
            fix="Check that the port is free on that host, that every machine reaches it, and that all were started. "
            "Where a host has several networks, set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the right one.",
        ) from error
