"""Hold what all strategies on a live ``Accelerator`` share: processes, wrapping, collectives, checks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from camshaft.errors import StrategyError
from camshaft.strategies.base import ReduceOp, Strategy
from camshaft.strategies.devices import choose_local_device
from camshaft.strategies.dispatch import Dispatch, split_nothing
from camshaft.strategies.group import Group, Launched
from camshaft.strategies.nothing import Stand
from camshaft.strategies.watch import Watchdog

if TYPE_CHECKING:
    from accelerate import Accelerator

    from camshaft.module import Module
    from camshaft.state import Batch

# What tells Accelerate which back end to use, and how the names of that back end's settings begin.
_FLAGS = {
    "ACCELERATE_USE_FSDP": ("fsdp", "FSDP_"),
    "ACCELERATE_USE_DEEPSPEED": ("deepspeed", "ACCELERATE_DEEPSPEED_"),
    "ACCELERATE_USE_MEGATRON_LM": ("megatron", "MEGATRON_LM_"),
}


class Accelerated(Strategy):
    """Several processes through Hugging Face Accelerate, of which it keeps process state, devices and plugins.

    Sampler, accumulation, autocast, loss scaling and schedulers are the engine's: Accelerate's own
    are left alone, since they count what this project counts otherwise.

    ``device`` is auto, cpu or cuda. ``timeout_s`` bounds every collective.
    """

    evaluates_wrapped: ClassVar[bool] = False
    least_processes: ClassVar[int] = 1
    takes_manual: ClassVar[bool] = True

    def __init__(self, *, device: str = "auto", timeout_s: float = 1800.0) -> None:
        super().__init__()
        self.timeout_s = timeout_s
        self.accelerator: Accelerator = None
        self._wanted = device
        self._group: Group | None = None
        self._dispatch: Dispatch | None = None
        self._wrapped: Any = None
        self._zero: Tensor | None = None
        self._stand: Stand | None = None
        self._environment: dict[str, str] = {}
        self._watchdog: Watchdog | None = None
        self._done = 0

    # -- set-up ----------------------------------------------------------------------------------

    def launch(self) -> None:
        """Join the other processes and make the Accelerator.

        Raises:
            StrategyError: no launcher started this process, there are too few processes or devices, the
                environment asks for another strategy, or the processes cannot meet.
        """
        launched = Launched.read()
        if launched is None:
            raise StrategyError(
                f"strategy {self.name} needs several processes, and no launcher started this one.",
                why="Alone it would train on one device, silently.",
                fix="Add launch.num_processes=2 to the command, or start it with torchrun or accelerate launch; "
                "for one device use strategy: single.",
            )
        if launched.world_size < self.least_processes:
            raise StrategyError(
                f"strategy {self.name} was started with {launched.world_size} process.",
                why="There is nobody to share the parameters with.",
                fix="Start at least two processes, or use strategy: single.",
            )
        self.rank, self.local_rank, self.world_size = launched.rank, launched.local_rank, launched.world_size
        self._check_environment()
        self.device = choose_local_device(self._wanted, launched)
        self._group = Group(launched, self.device, timeout_s=self.timeout_s)
        if self.hang_timeout_s is not None:
            self._watchdog = Watchdog(lambda: self._done, timeout_s=self.hang_timeout_s)
            self._watchdog.start()
        self._environment = dict(os.environ)
        if self.device.type == "cpu":
            # Accelerate imports DeepSpeed where it is installed, which then looks for a GPU and warns.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        self.accelerator = self._make_accelerator()
        self._check_accelerator()

    def prepare(self, module: Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Wrap the module, in place where the back end allows, and return the optimizers to step."""
        self._check_module(module, optimizers)
        self.module = module
        self._bind(module)
        self._dispatch = Dispatch(module, self._zero_inside)
        self.optimizers = self.active = self._wrap(self._dispatch, list(optimizers))
        self._verify()
        return self.optimizers

    def describe(self) -> str:
        """Say in one line what runs: dtypes of parameters, compute, reduction and optimizer, shards, world size."""
        compute = self._precision if self._precision != "fp32" else "fp32 unless precision says otherwise"
        facts = {"compute": compute, **self.dtypes()}
        described = ", ".join(f"{name} {value}" for name, value in facts.items())
        return f"{self.name} on {self.device}: world size {self.world_size}, {self._shards()}; {described}"

    def teardown(self) -> None:
        """Leave the other processes and forget Accelerate's process-wide state."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        if self._group is None:
            return
        from accelerate.state import AcceleratorState, GradientState

        if self.accelerator is not None:
            self.accelerator.free_memory()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = None
        self._wrapped = self._dispatch = None
        # Plugins leave settings in the environment that the next Accelerator would obey.
        for name in set(os.environ) - set(self._environment):
            if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
                del os.environ[name]
        # After a failure the peers may be gone, and leaving in good order would wait for them.
        if sys.exc_info()[0] is None:
            self._group.leave()
        self._group = None

    # -- a step ----------------------------------------------------------------------------------

    def run(self, method: str, batch: Batch, *indices: int) -> Any:
        """Call a step of the module through its wrapper; evaluation only where the wrapper holds the weights."""
        self._done += 1
        if method != "training_step" and not self.evaluates_wrapped:
            return super().run(method, batch, *indices)
        if self._stand is None or method != "training_step":
            output, self._zero = split_nothing(self._wrapped(method, batch, *indices))
            return output
        self._stand.begin()
        output, self._zero = split_nothing(self._wrapped(method, batch, *indices))
        if self._zero is None:
            self._stand.succeeded(batch, *indices)
        return output

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar; on the window's last micro-batch they are averaged over ranks."""
        super().backward(loss)
        self._done += 1

    def zero_loss(self) -> Tensor:
        """Return the zero that the step which returned None computed inside the wrapper."""
        if self._zero is None:
            return super().zero_loss()
        zero, self._zero = self._zero, None
        return zero

    def _set_precision(self, precision: str) -> None:
        super()._set_precision(precision)
        if self._dispatch is not None:
            self._dispatch.autocast = self._autocast if self._autocast is not None else nullcontext()

    # -- collectives -----------------------------------------------------------------------------

    def any(self, flag: bool) -> bool:
        """Say whether any rank's flag is set. Blocks until all ranks ask."""
        self._check_collective("any")
        return self._joined.any(flag)

    def agree(self, requests: int, *, due: bool) -> int:
        """Combine request bits: they come back at the due boundary after the one that sent them."""
        return self._joined.agree(requests, due=due)

    def reduce(self, value: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce a tensor over all ranks and return the result on every rank; blocks."""
        self._check_collective("reduce")
        return self._joined.reduce(value, op)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's small plain object, in the order of ranks, on every rank; blocks."""
        self._check_collective("gather_objects")
        return self._joined.gather_objects(value)

    def broadcast_object(self, value: Any) -> Any:
        """Return the main process's small plain object on every rank; blocks."""
        self._check_collective("broadcast_object")
        return self._joined.broadcast_object(value)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._check_collective("barrier")
        self._joined.barrier()

    # -- for subclasses --------------------------------------------------------------------------

    def _make_accelerator(self) -> Accelerator:
        """Return the live Accelerator, with the plugin that makes it this strategy's."""
        raise NotImplementedError

    def _wrap(self, dispatch: Dispatch, optimizers: list[Optimizer]) -> list[Optimizer]:
        """Set ``self._wrapped`` and return the optimizers that step."""
        raise NotImplementedError

    def _verify(self) -> None:
        """Raise unless the strategy really is what was asked."""

    def _zero_inside(self, again: Any) -> Tensor:
        """Return a zero with the gradients that the peers expect; called inside the wrapper's forward."""
        reached = self._stand.zero(again) if self._stand is not None else None
        start = torch.zeros((), device=self.device) if reached is None else reached
        return sum((p.sum() * 0.0 for p in self._reachable()), start)

    def _reachable(self) -> Iterator[Tensor]:
        """Yield the parameters that take part in a forward as they are, without a layer gathering them."""
        return self._trainable()

    def _shards(self) -> str:
        return f"{self.world_size} whole copies"

    def _trainable(self) -> Iterator[Tensor]:
        return (p for _, p in self._named_parameters() if p.requires_grad)

    @property
    def _joined(self) -> Group:
        if self._group is None:
            raise StrategyError(f"{self.name} has not joined the other processes.", fix="Call launch() first.")
        self._done += 1
        return self._group

    def _check_environment(self) -> None:
        """Refuse an environment in which Accelerate would build something else than this strategy."""
        for flag, (other, prefix) in _FLAGS.items():
            if os.environ.get(flag, "false").lower() not in ("1", "true"):
                continue
            if other != self.name:
                raise StrategyError(
                    f"the launcher asks for {other} ({flag} is set), and the recipe for strategy: {self.name}.",
                    why="Accelerate would follow the launcher.",
                    fix=f"Write strategy: {other} in the recipe, or launch without that setting.",
                )
            if self.rank == 0:
                settings = sorted(name for name in os.environ if name.startswith(prefix))
                print(  # noqa: T201 - what has no effect is never silent
                    f"{', '.join(settings)} of the launcher have no effect: the recipe's strategy has. "
                    "--accelerate-config FILE adopts a file of accelerate config.",
                    file=sys.stderr,
                )
        if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
            raise StrategyError(
                f"the launcher asks to compile with {os.environ['ACCELERATE_DYNAMO_BACKEND']}.",
                why="Accelerate would compile the wrapper, and names of parameters would change.",
                fix="Launch with --dynamo_backend no, and compile in the recipe.",
            )

    def _check_accelerator(self) -> None:
        found = self.accelerator.num_processes
        if found != self.world_size:
            raise StrategyError(
                f"the launcher started {self.world_size} processes, and Accelerate sees {found}.",
                why="Each would train on its own, silently.",
                fix="Start the run with torchrun, accelerate launch or launch.num_processes.",
            )

    def _check_module(self, module: Module, optimizers: Sequence[Optimizer]) -> None:
        if optimizers and not module.automatic_optimization and not self.takes_manual:
            raise StrategyError(
                f"{type(module).__name__} optimizes by hand, and {self.name} cannot reduce gradients inside a step.",
                fix="Use strategy: ddp or single, or automatic optimization.",
            )
