"""Starting costs next to nothing: the best of several runs, in CPU time, because others may share the machine."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def seconds_of(code, runs):
    """Return the least that ``code`` prints, over several new processes."""
    best = float("inf")
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        best = min(best, float(done.stdout))
    return best


def test_importing_camshaft_is_quick_and_imports_no_torch():
    code = (
        "import sys, time; start = time.process_time(); import camshaft; taken = time.process_time() - start; "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; print(taken)"
    )
    assert seconds_of(code, 5) < 0.05


OWN = """
import torch
from torch.utils.data import DataLoader, TensorDataset

from camshaft import DataModule, Module


class Line(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])


class Data(DataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(24, 3), torch.randn(24, 1)), batch_size=4)
"""

# Everything that a command does, up to the moment at which the loop would make its first step.
MEASURE = """
import os, sys, time
start = time.process_time()
import torch
torch_alone = time.process_time() - start
from camshaft import fit, loop

def step(state, window, hooks):
    print("seconds", time.process_time() - start - torch_alone, flush=True)
    os._exit(0)

def train_epoch(state, hooks, _):
    original(state, hooks, step)

original, loop.train_epoch = loop.train_epoch, train_epoch
fit.main(["line.yaml", "--trust"])
"""


def test_the_first_step_comes_within_a_second_and_a_half_of_importing_torch(tmp_path):
    # Without libraries of a recipe's own, such as scikit-learn, which takes 1.2 s by itself.
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "line.yaml").write_text(
        "module: {_target_: own.Line}\ndata: {_target_: own.Data}\noptimizer: {name: adamw}\nmax_epochs: 2\n"
    )
    best = float("inf")
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE], cwd=tmp_path, capture_output=True, text=True, timeout=60,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CAMSHAFT_HOME": str(tmp_path / "home")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        best = min(best, float(done.stdout.split("seconds")[1]))
    assert best < 1.5


def test_checking_a_recipe_imports_no_torch():
    code = (
        "import sys; from camshaft.cli import main; main(['check', 'recipes/digits.yaml']); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
