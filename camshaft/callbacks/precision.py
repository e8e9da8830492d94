"""Choose what forward passes compute in, for the whole run or by step."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from camshaft import terminal
from camshaft.callback import Callback
from camshaft.dtypes import Observed, observe, require_expected
from camshaft.errors import RecipeError, StrategyError
from camshaft.float8 import require_float8, switch_float8, use_float8
from camshaft.layers import find_layers, wrap_forward

if TYPE_CHECKING:
    from camshaft.module import Module
    from camshaft.state import State
    from camshaft.strategies.base import Strategy

NAMES = ("fp32", "tf32", "bf16", "fp16", "bf16-true", "fp8")
_COMPUTE = {"tf32": "fp32", "fp8": "bf16"}
_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16-true": torch.bfloat16}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_KEY = re.compile(r"^\s*(last\s+)?(\d+(?:\.\d+)?)\s*(%|percent|steps?)?\s*$", re.IGNORECASE)


class Precision(Callback):
    """Compute in fp32, tf32, bf16, fp16, bf16-true or fp8, and print the dtypes that were found to be in use.

    ``fp32``, ``bf16`` and ``fp16`` keep weights and optimizer state in float32 and compute under autocast;
    fp16 scales the loss. ``tf32`` is fp32 with faster matrix products on devices that have them.
    ``bf16-true`` stores weights, gradients and optimizer state in bfloat16: half the memory, and updates
    below 1/256 of a weight are lost; batch norms stay in float32. ``fp8`` multiplies in float8 inside
    linear layers and computes the rest as bf16; ``{fp8: {emulate: true}}`` rounds alike on other devices.

    A mapping switches while training: ``{0: bf16, 900: fp32}`` computes in bf16 until 900 updates are done.
    A key may be a share of the planned steps, ``90%``, or count from the end: ``last 10%``, ``last 100 steps``.

    ``keep_fp32`` names layers, by class, name or pattern, that compute in float32 whatever the rest does.
    Source of mixed precision: Micikevicius et al. (2018).
    """

    def __init__(
        self,
        precision: str | Mapping[str | int, Any] = "fp32",
        *,
        keep_fp32: str | Sequence[str] = (),
        emulate: bool = False,
        library: Literal["auto", "torchao", "transformer_engine"] = "auto",
    ) -> None:
        read, options = _read(precision)
        self.emulate = bool(options.get("emulate", emulate))
        self.library = options.get("library", library)
        self.keep_fp32 = [keep_fp32] if isinstance(keep_fp32, str) else list(keep_fp32)
        self._written = read
        # Steps are known once the run's length is; until then only whole numbers are.
        self.starts = {start: name for start, name in read.items() if isinstance(start, int)}
        self.starts = dict(sorted(self.starts.items()))
        self._switches = len(read) > 1
        self._stores = next((name for name in read.values() if name == "bf16-true"), None)
        self._float8: list[nn.Module] = []
        self._kept: dict[str, nn.Module] = {}
        self._device = torch.device("cpu")
        self._matmul: str | None = None
        self._name = ""
        self._observed: Observed | None = None
        if self._stores and self._switches:
            raise RecipeError(
                "Precision's schedule has bf16-true, which stores the weights in bfloat16.",
                why="What was rounded away would not come back with a switch.",
                fix="Use bf16, which keeps float32 weights, or bf16-true for the whole run.",
            )

    def at(self, step: int) -> str:
        """Return the precision of the update after ``step`` updates."""
        return next(name for start, name in reversed(self.starts.items()) if start <= step)

    def on_launch(self, strategy: Strategy) -> None:
        """Check that the strategy and the device can do all of it, before anything is built."""
        self._device = strategy.device
        names = list(self._written.values())
        unable = [name for name in names if _COMPUTE.get(name, name) not in strategy.precisions]
        fixed = strategy.precision_setting
        if unable or (self._switches and not strategy.switches_precision):
            what = "a precision schedule cannot run" if not unable else f"precision {unable[0]} cannot run"
            raise StrategyError(
                f"{what} under {strategy.name}{f' with {fixed}' if fixed else ''}.",
                why="Parameters are cast to the dtype that was set up there." if fixed else "",
                fix=f"Use {' or '.join(n for n in NAMES if n in strategy.precisions)} for the whole run"
                f"{f', or remove {fixed}' if fixed else ''}.",
            )
        if fixed and self.keep_fp32:
            raise StrategyError(
                f"keep_fp32 has no effect under {strategy.name} with {fixed}.",
                why="The strategy casts every parameter before a layer sees it.",
                fix=f"Remove keep_fp32, or {fixed}.",
            )
        if self._stores and self.keep_fp32 and not strategy.replicates:
            raise StrategyError(
                f"keep_fp32 cannot stand beside bf16-true under {strategy.name}.",
                why="What is gathered together has one dtype.",
                fix="Use precision: bf16, which keeps float32 weights, or leave keep_fp32 out.",
            )
        if "fp8" in names:
            self.library = require_float8(strategy.device, emulate=self.emulate, library=self.library)

    def on_module(self, module: Module) -> None:
        """Convert the module, in place: what is stored in bfloat16, multiplied in float8, or kept in float32."""
        if "fp8" in self._written.values():
            self._float8 = use_float8(module, self.library, emulate=self.emulate, keep=self.keep_fp32)
        if self.keep_fp32:
            self._kept = find_layers(module, self.keep_fp32, who="precision.keep_fp32")
        if self._stores:
            inside = {id(m) for layer in self._kept.values() for m in layer.modules()}
            for layer in module.modules():
                if id(layer) not in inside and not isinstance(layer, _BATCH_NORMS):
                    _store(layer, torch.bfloat16)
        outer = [n for n in self._kept if not any(n.startswith(f"{other}.") for other in self._kept)]
        for name in outer:
            wrap_forward(self._kept[name], functools.partial(_in_float32, device=self._device.type))

    def on_fit_start(self, state: State) -> None:
        """Count a schedule that is relative to the end of the run, and set the first precision."""
        if any(not isinstance(start, int) for start in self._written):
            self.starts = _resolve(self._written, state.planned_steps)
        self._set(state)

    def on_step_start(self, state: State, window: list[object]) -> None:
        """Set what this step computes in."""
        del window
        if self._switches:
            self._set(state)
        if self._observed is not None and not self._observed.begun:
            self._observed.begin(state.module, kept=self._kept.values())

    def on_gradients(self, state: State) -> None:
        """Look at the gradients of the first step of a precision."""
        if self._observed is not None:
            self._observed.see_gradients(state.strategy)

    def on_step(self, state: State) -> None:
        """After the first step of a precision, check that the dtypes are those promised, and print them."""
        if self._observed is None:
            return
        observed, self._observed = self._observed, None
        table = observe(observed, state.strategy)
        require_expected(
            table, compute=_DTYPE[state.precision], stored=torch.bfloat16 if self._stores else None, who=self._name
        )
        if state.strategy.is_main:
            self._print(state, table)

    def on_exception(self, state: State, error: BaseException) -> None:
        """Let go of the layers that were watched."""
        del state, error
        if self._observed is not None:
            self._observed.end()

    def on_fit_end(self, state: State) -> None:
        """Give torch its own matrix products back."""
        del state
        if self._matmul is not None:
            torch.set_float32_matmul_precision(self._matmul)
            self._matmul = None

    def _set(self, state: State) -> None:
        name = self.at(state.progress.step)
        if name == self._name:
            return
        self._name = name
        state.precision = _COMPUTE.get(name, name)
        self._observed = Observed() if state.stage == "fit" else None
        switch_float8(self._float8, on=name == "fp8")
        if name == "tf32" and self._matmul is None:
            self._matmul = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
        elif name != "tf32" and self._matmul is not None:
            torch.set_float32_matmul_precision(self._matmul)
            self._matmul = None

    def _print(self, state: State, table: Mapping[str, str]) -> None:
        step = state.progress.step
        listed = ", ".join(f"{name} {value}" for name, value in table.items())
        extra = ""
        if self._name == "fp8":
            extra += f"; products of {len(self._float8)} linear layers float8{' (emulated)' if self.emulate else ''}"
        if self._kept:
            extra += f"; kept in float32: {', '.join(self.keep_fp32)} ({len(self._kept)} layers)"
        terminal.say(f"precision {self._name} from step {step}: {listed}{extra}")


def _read(precision: str | Mapping[str | int, Any]) -> tuple[dict[int | str, str], dict[str, Any]]:
    """Return the schedule as written, whole numbers as such, and the options of fp8."""
    given: Mapping[Any, Any] = {0: precision} if isinstance(precision, str) else precision
    if set(given) == {"fp8"}:
        given = {0: given}
    read: dict[int | str, str] = {}
    options: dict[str, Any] = {}
    for key, value in given.items():
        name = value
        if isinstance(value, Mapping) and set(value) == {"fp8"}:
            name, inner = "fp8", value["fp8"] or {}
            _check_options(inner)
            options |= inner
        start = _start(key)
        if name not in NAMES or start is None:
            raise RecipeError(
                f"Precision has {name!r} from step {key!r}.",
                fix=f"Use {', '.join(NAMES)}, from a step such as 0 or 900, a share such as '90%', or 'last 10%' on.",
            )
        read[start] = name
    if 0 not in read:
        raise RecipeError("Precision's schedule does not say what step 0 computes in.", fix="Add an entry for 0.")
    return read, options


def _check_options(options: Any) -> None:
    unknown = sorted(set(options) - {"emulate", "library"}) if isinstance(options, Mapping) else [str(options)]
    if unknown:
        raise RecipeError(f"fp8 has no option {unknown[0]!r}.", fix="It has emulate (true or false) and library.")


def _start(key: Any) -> int | str | None:
    """Return a whole number of steps, the text of a relative start, or None when it is neither."""
    match = _KEY.match(str(key)) if not isinstance(key, bool) else None
    if match is None:
        return None
    last, number, unit = match.groups()
    if not last and not (unit or "").startswith(("%", "p", "P")):
        return int(number) if number.isdigit() else None
    return str(key) if last or float(number) <= 100 else None


def _resolve(written: Mapping[int | str, str], planned: int | None) -> dict[int, str]:
    """Return the schedule in steps."""
    if planned is None:
        relative = next(start for start in written if not isinstance(start, int))
        raise RecipeError(
            f"Precision switches at {relative!r}, and the length of the run is not known.",
            why="Nobody could say when that is.",
            fix="Give max_steps, or switch at a step.",
        )
    found: dict[int, str] = {}
    for start, name in written.items():
        step = start if isinstance(start, int) else _count(start, planned)
        found[step] = name
    return dict(sorted(found.items()))


def _count(text: str, planned: int) -> int:
    match = _KEY.match(text)
    assert match is not None
    last, number, unit = match.groups()
    is_share = (unit or "").lower() in ("%", "percent")
    steps = round(planned * float(number) / 100) if is_share else int(float(number))
    return max(0, planned - steps) if last else steps


def _store(layer: nn.Module, dtype: torch.dtype) -> None:
    """Store the floating-point parameters of one layer, not of those below it, in a dtype."""
    for parameter in layer.parameters(recurse=False):
        if parameter.dtype is torch.float32:
            parameter.data = parameter.data.to(dtype)


def _in_float32(forward: Callable[..., Any], device: str) -> Callable[..., Any]:
    return functools.partial(_call_in_float32, forward, device)


def _call_in_float32(forward: Callable[..., Any], device: str, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device, enabled=False):
        return forward(*map(_widen, args), **{key: _widen(value) for key, value in kwargs.items()})


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float32:
        return value.float()
    if isinstance(value, (tuple, list)):
        return type(value)(map(_widen, value)) if not hasattr(value, "_fields") else value
    return value
