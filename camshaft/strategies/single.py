"""Train on one device with plain PyTorch: the reference for every other strategy."""

from __future__ import annotations

import torch

from camshaft.errors import StrategyError
from camshaft.strategies.base import Strategy


class Single(Strategy):
    """One process, one device. ``device`` is auto, cpu, cuda, cuda:N, mps or tpu.

    auto takes CUDA, then MPS, then the CPU.
    """

    name = "single"

    def __init__(self, device: str = "auto") -> None:
        super().__init__()
        self._wanted = device

    def launch(self) -> None:
        """Choose the device.

        Raises:
            StrategyError: the machine, or the installed torch, has no such device.
        """
        self.device = choose_device(self._wanted)


def choose_device(wanted: str) -> torch.device:
    """Return the device of that name, or say what it lacks."""
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps") if torch.backends.mps.is_available() else torch.device("cpu")
    if wanted in ("tpu", "xla"):
        return _xla_device()
    kind = wanted.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        built = "this torch was built without CUDA" if torch.version.cuda is None else "no NVIDIA driver answers"
        raise StrategyError(
            f"device is {wanted!r}, and torch {torch.__version__} sees no CUDA device.",
            why=f"The reason is that {built}.",
            fix="Install a CUDA build of torch on a machine with an NVIDIA GPU, or set device: auto.",
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise StrategyError(
            "device is 'mps', and this machine has no Metal device.",
            fix="Use a Mac with Apple silicon and macOS 12.3 or newer, or set device: auto.",
        )
    if kind not in ("cpu", "cuda", "mps"):
        raise StrategyError(f"device {wanted!r} is unknown.", fix="Use auto, cpu, cuda, cuda:0, mps or tpu.")
    return torch.device(wanted)


def _xla_device() -> torch.device:
    try:
        import torch_xla  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise StrategyError(
            "device is 'tpu', and torch_xla cannot be imported.",
            why=f"The import says: {error}.",
            fix="On a TPU machine, pip install torch_xla[tpu] in the release that matches torch.",
        ) from error
    return torch.device(torch_xla.device())
