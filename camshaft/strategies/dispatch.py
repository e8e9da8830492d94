"""Run any step of a user's module as one forward, so that what wraps it takes part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from camshaft.module import bind_step

if TYPE_CHECKING:
    from camshaft.module import Module

_NOTHING = "camshaft: no loss"


class Dispatch(nn.Module):
    """Hold a user's module inside a wrapper: ``forward(method, batch, *indices)`` calls a step.

    A wrapper (DDP, ``fully_shard``, DeepSpeed's engine) only sees what happens in ``forward``, and reads
    the graph off what it returns. A training step that returns no loss therefore returns a zero from
    here, which ``split_nothing`` recognises.

    Attributes:
        autocast: entered around every step, inside the wrapper, since DeepSpeed turns off what is outside.
        zero: makes the zero loss of a step that returned None, from the step itself.
    """

    def __init__(self, module: Module, zero: Callable[[Callable[..., Any]], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.autocast: AbstractContextManager[Any] = nullcontext()
        self.zero = zero
        self._steps = {name: bind_step(module, name) for name in module._steps}

    def forward(self, method: str, batch: Any, *indices: int) -> Any:
        """Call the step named ``method``."""
        with self.autocast:
            output = self._steps[method](batch, *indices)
            if method == "training_step" and self.module.automatic_optimization and _is_nothing(output):
                return {_NOTHING: self.zero(self._steps[method])}
        return output


def split_nothing(output: Any) -> tuple[Any, Tensor | None]:
    """Return a step's output and, if it was None, the zero loss that stands for it."""
    if type(output) is dict and _NOTHING in output:
        return None, output[_NOTHING]
    return output, None


def _is_nothing(output: Any) -> bool:
    return output is None or (isinstance(output, dict) and output.get("loss") is None)
