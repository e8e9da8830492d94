import subprocess
import sys

import pytest

from camshaft.errors import RecipeError
from camshaft.init import main
from camshaft.recipe import build_data, build_module, load


def test_it_writes_a_project_that_is_right_and_trusted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["my project"]) == 0
    assert "camshaft fit my project/recipe.yaml" in capsys.readouterr().out
    recipe = load("my project/recipe.yaml")
    assert recipe.name == "my-project"
    try:
        assert build_module(recipe).hparams == {"hidden": 64}
        data = build_data(recipe)
    finally:
        for name in ("model", "data"):
            sys.modules.pop(name, None)
    data.setup("fit")
    assert len(data.train) == 1800


def test_it_overwrites_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "model.py").write_text("mine")
    with pytest.raises(RecipeError, match=r"already holds model.py"):
        main(["p"])
    assert (tmp_path / "p" / "model.py").read_text() == "mine"
    assert not (tmp_path / "p" / "recipe.yaml").exists()


def test_its_own_test_passes_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["p"])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "p"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
