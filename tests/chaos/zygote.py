"""Fork a training run for every line on stdin, and let it be killed (kill -9) where the line says.

A line is JSON: ``place``, ``background``, and either ``phase`` with ``count``, the moment in this run at which
the process kills itself, or ``delay``, the seconds after which this process kills it. One line comes back
for each: how the run ended. Forking after the imports makes a start cost milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # making an optimizer imports it, and every start would pay for it

from camshaft.callback import Callback
from camshaft.callbacks.clip import ClipGradients
from camshaft.callbacks.digest import Digest
from camshaft.callbacks.ema import EMA
from camshaft.checkpoint import places
from camshaft.testing import TinyData, TinyModule, tiny_run

STEPS, EVERY = 40, 3


def die() -> None:
    """Be killed, as by kill -9: nothing of Python runs after it."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class Trap:
    """Count how often a moment came, and die at the one that was chosen."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self) -> bool:
        """Say whether this is the moment."""
        self.left -= 1
        return self.left < 0


class InStep(Callback):
    """Die after a backward or in the update."""

    def __init__(self, trap: Trap) -> None:
        self.trap = trap

    def on_backward(self, state: Any, loss: Any) -> None:
        if self.trap():
            die()


def set_trap(phase: str, trap: Trap) -> dict[str, Callback]:
    """Put the trap where the phase is; return the callbacks that it needs."""
    if phase == "step":
        return {"trap": InStep(trap)}
    if phase == "write":
        whole = places._FileSink.write

        def write(self: Any, data: memoryview) -> None:
            if trap():
                whole(self, data[: len(data) // 2])
                die()
            whole(self, data)

        places._FileSink.write = write
    elif phase in ("rename", "renamed"):
        rename = Path.rename

        def renamed(self: Path, target: Any) -> Any:
            is_moment = self.name.startswith(places.TMP) and self.is_dir() and trap()
            if is_moment and phase == "rename":
                die()
            moved = rename(self, target)
            if is_moment:  # before the new name is synced, and before a pointer names it
                die()
            return moved

        Path.rename = renamed
    elif phase == "prune":
        remove = places.shutil.rmtree

        def removed(path: Any, *args: Any, **options: Any) -> None:
            if trap():
                next(iter(sorted(Path(path).iterdir()))).unlink()
                die()
            remove(path, *args, **options)

        places.shutil.rmtree = removed
    return {}


def train(place: str, *, background: bool, phase: str = "", count: int = 0) -> None:
    """Train, or go on training, what every start of this battery trains."""
    torch.manual_seed(0)
    callbacks = {"clip": ClipGradients(1.0), "ema": EMA(0.9), "digest": Digest(str(Path(place) / "digest"))}
    callbacks |= set_trap(phase, Trap(count))

    def configure(module: Any) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    tiny_run(
        TinyModule(dropout=0.2, configure=configure), TinyData(44), callbacks=callbacks, accumulate=2, max_steps=STEPS,
        checkpoint={"every": f"{EVERY} steps", "keep_last": 2, "background": background}, resume="auto",
        runs_dir=place, name="chaos", log_every=5,
    )  # fmt: skip


def main() -> None:
    """Answer every line."""
    torch.set_num_threads(1)
    for text in sys.stdin:
        order = json.loads(text)
        delay = order.pop("delay", None)
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    train(**order)
                    code = 0
                except BaseException as error:
                    (Path(order["place"]) / "error").write_text(f"{type(error).__name__}: {error}")
                    raise
            os._exit(code)
        if delay is not None:
            time.sleep(delay)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
