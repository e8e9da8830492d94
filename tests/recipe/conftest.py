"""A small project with a module, data and callbacks beside its recipes, in a folder of its own."""

from pathlib import Path

import pytest

NET = """
from typing import Literal

import torch

from camshaft.callback import Callback
from camshaft.data import DataModule
from camshaft.module import Module
from camshaft.schedule import ScheduleLike

Mode = Literal["min", "max"]


class Net(Module):
    def __init__(self, hidden: int = 8, dropout: float = 0.1, *, names: list[str] | None = None, head=None):
        super().__init__()
        self.hidden, self.head = hidden, head
        self.layer = torch.nn.Linear(2, hidden)

    def training_step(self, batch):
        return self.layer(batch).sum()


class Big(Net):
    def __init__(self, depth: int, **kwargs):
        super().__init__(**kwargs)
        self.depth = depth


class Open(Net):
    def __init__(self, **options):
        super().__init__()
        self.options = options


class Data(DataModule):
    def __init__(self, batch_size: int = 4, path: str = "x"):
        self.batch_size, self.path = batch_size, path


class Freeze(Callback):
    def __init__(self, depth: int, mode: Mode = "min", warm: ScheduleLike = "1 epoch"):
        self.depth, self.mode = depth, mode


class Often(Callback):
    def __init__(self, every: str = "1 epoch"):
        self.every = every


def build():
    return Net()
"""

BASE = """module: {_target_: net.Net, hidden: 8}
data: {_target_: net.Data}
optimizer: {name: adamw, lr: 1e-3}
max_epochs: 3
"""


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAMSHAFT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CAMSHAFT_TRUST", raising=False)
    monkeypatch.delenv("CAMSHAFT_ALLOW", raising=False)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder current, so that errors show short names; its Python is not trusted."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "net.py").write_text(NET)
    (folder / "base.yaml").write_text(BASE)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def trusted(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import sys

    monkeypatch.setenv("CAMSHAFT_TRUST", str(project))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("net", "other"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield project
    for name in ("net", "other"):
        sys.modules.pop(name, None)
