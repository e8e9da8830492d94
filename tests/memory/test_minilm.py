"""Check that adapters teach a pretrained encoder more than a linear probe of it knows, on the same held-out plays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def probe() -> float:
    """Return the test accuracy of a logistic regression on frozen embeddings, its strength chosen on validation."""
    from minilm_lora import Passages, PlayKind
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    data, module = passages(Passages), PlayKind().eval()
    # The head is what the probe replaces: the module then returns what it sees.
    module.head = torch.nn.Identity()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        seen = {
            split: (
                torch.cat([module(t, m).float() for t, m, _ in set_of(data, split)]),
                getattr(data, split).tensors[2],
            )
            for split in ("train", "val", "test")
        }
    fitted = [
        make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000)).fit(*seen["train"])
        for strength in (3e-4, 1e-3, 3e-3, 1e-2, 1e-1, 1)
    ]
    best = max(fitted, key=lambda model: model.score(*seen["val"]))
    return float(best.score(*seen["test"]))


def passages(cls):
    from camshaft.recipe import load

    arguments = load(ROOT / "recipes" / "minilm_lora.yaml", inspect=True).config["data"]
    data = cls(**{key: value for key, value in arguments.items() if key != "_target_"})
    data.setup("fit")
    return data


def set_of(data, split):
    return torch.utils.data.DataLoader(getattr(data, split), 100)


@pytest.mark.long
def test_adapters_beat_a_linear_probe_on_plays_that_neither_saw(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    done = subprocess.run(
        [sys.executable, "-m", "camshaft.fit", "recipes/minilm_lora.yaml", f"runs_dir={tmp_path}"],
        cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("Test split")]
    adapted = float(line.partition("test/acc ")[2].split(",")[0])
    assert adapted > probe()
