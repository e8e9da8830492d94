import os
import pty
import subprocess
import sys

import pytest

from camshaft.errors import RecipeError
from camshaft.recipe import load
from camshaft.recipe.trust import Allowed, allowed, is_trusted, refusal, resolve, trust


def test_a_prefix_ends_at_a_dot():
    allow = Allowed(("my_project", "torch.nn"))
    assert allow.covers("my_project")
    assert allow.covers("my_project.models.Net")
    assert not allow.covers("my_project_evil.Net")
    assert not allow.covers("torch.nnx")
    assert not allow.covers("torch")


def test_an_allowed_package_is_imported_and_others_are_not(project, monkeypatch):
    assert refusal("fractions.Fraction", Allowed()) is not None
    assert refusal("fractions.Fraction", allowed(["fractions"], None)) is None


def test_the_readers_file_and_variable_allow_too(project, tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "allow").write_text("# mine\nmy_project\nenv:MY_TOKEN\n")
    monkeypatch.setenv("CAMSHAFT_ALLOW", "other_project,env:MORE")
    found = allowed([], None)
    assert found.covers("my_project.x")
    assert found.covers("other_project.x")
    assert found.variables == {"MY_TOKEN", "MORE"}


@pytest.mark.parametrize("entry", ["", "a b", "os;system", "../x", "env:", "env:A B", "*"])
def test_a_wrong_allowance_is_refused(entry):
    with pytest.raises(RecipeError, match="neither a package nor env:NAME"):
        allowed([entry], None)


def test_trust_is_given_once_for_a_folder(project):
    (project / "r.yaml").write_text("module: {_target_: net.Net}\nmax_epochs: 1\n")
    with pytest.raises(RecipeError) as caught:
        load("r.yaml")
    assert str(caught.value) == (
        f"net.Net is Python in {project}, a folder that you have not trusted.\n"
        "  Running it can do anything that you can. Read it, then pass --trust once, or set "
        "CAMSHAFT_TRUST to the folder."
    )
    load("r.yaml", trust=True)
    load("r.yaml")
    assert is_trusted(str(project))
    assert is_trusted(str(project / "below"))
    assert not is_trusted(str(project.parent))


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 2), ("", 2)])
def test_a_person_at_a_terminal_is_asked_once(project, answer, code):
    (project / "r.yaml").write_text("module: {_target_: net.Net}\nmax_epochs: 1\n")
    script = "import sys; from camshaft.cli import guard; from camshaft.recipe import load; "
    script += "sys.exit(guard(lambda words: load('r.yaml') is None))"
    main, child = pty.openpty()
    try:
        process = subprocess.Popen([sys.executable, "-c", script], stdin=child, stdout=child, stderr=child)
        try:
            os.write(main, f"{answer}\n".encode())
            assert process.wait(30) == code
        finally:
            process.kill()
            process.wait()
        shown = os.read(main, 4096).decode()
    finally:
        os.close(main)
        os.close(child)
    question = f"The recipe runs Python from {project} (net.Net). Trust this folder from now on? [y/N] "
    assert question in shown
    assert ("that you have not trusted" in shown) == bool(code)
    assert is_trusted(str(project)) == (not code)


def test_trust_of_a_name_is_not_trust_of_a_longer_name(project, tmp_path):
    trust(str(tmp_path / "lib"))
    assert not is_trusted(str(tmp_path / "library"))


def test_the_recipes_that_come_with_camshaft_are_trusted():
    from pathlib import Path

    import camshaft.recipe.trust as module

    assert is_trusted(str(Path(module.__file__).parents[2] / "recipes"))


def test_a_class_is_checked_by_identity(trusted):
    (trusted / "other.py").write_text("from fractions import Fraction as Number\nimport net\nNet = net.Net\n")
    allow = allowed([], str(trusted))
    assert resolve("other.Net", allow).__name__ == "Net"
    with pytest.raises(RecipeError, match=r"another name for fractions.Fraction"):
        resolve("other.Number", allow)
    sys.modules.pop("other")


def test_an_object_that_hides_behind_anothers_name_is_refused(trusted):
    (trusted / "other.py").write_text(
        "import net\nclass Evil: pass\nEvil.__module__ = 'net'\nEvil.__qualname__ = 'Net'\n"
    )
    with pytest.raises(RecipeError, match=r"another name for net.Net"):
        resolve("other.Evil", allowed([], str(trusted)))


@pytest.mark.parametrize(
    "path", ["torch.utils.data.DataLoader", "camshaft.errors.RecipeError", "torch.optim.Optimizer.x"]
)
def test_open_packages_give_building_blocks_only(path):
    with pytest.raises(RecipeError):
        resolve(path, Allowed())


@pytest.mark.parametrize(
    "path", ["torch.nn.Linear", "torch.optim.AdamW", "torch.utils.data.TensorDataset", "torchmetrics.MeanMetric"]
)
def test_building_blocks_are_given(path):
    assert resolve(path, Allowed()).__name__ == path.rpartition(".")[2]


def test_a_module_beside_the_recipe_needs_its_folder_on_the_path(trusted):
    resolve("net.Net", allowed([], str(trusted)))
    assert str(trusted) in sys.path
