import json
import os
import platform
import subprocess
import sys

import pytest

from camshaft.errors import RecipeError
from camshaft.runs import main


def make(folder, name, state="finished", *, pid=None, checkpoint=False, recipe="max_epochs: 1\n", **status):
    path = folder / "runs" / name
    path.mkdir(parents=True)
    (path / "status.json").write_text(json.dumps({"state": state, "step": 10, "epoch": 1, "pid": pid, **status}))
    (path / "provenance.json").write_text(
        json.dumps(
            {"host": platform.node(), "git": {"revision": f"r{len(name)}", "diff": ""}, "packages": {"torch": "2"}}
        )
    )
    (path / "recipe.yaml").write_text(recipe)
    if checkpoint:
        (path / "checkpoints" / "step_000010").mkdir(parents=True)
    return path


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_are_listed_with_state_best_and_how_to_resume(place, capsys):
    first = make(place, "a/1", best={"name": "val/acc", "value": 0.98765, "step": 8})
    second = make(place, "b/1", "failed", checkpoint=True, error="LossError: the loss is nan.\n  more")
    for age, path in ((1, first), (2, second)):
        os.utime(path / "status.json", (age, age))
    assert main([]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "run state step epoch best age"
    assert lines[1].startswith("runs/a/1 finished 10 1 val/acc 0.9877 @ 8 ")
    assert lines[2].startswith("runs/b/1 failed 10 1 - ")
    assert lines[3:] == [
        "LossError: the loss is nan.",
        "resume: camshaft fit runs/b/1/recipe.yaml resume=runs/b/1",
    ]


def test_a_run_whose_process_is_gone_has_died(place, capsys):
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    make(place, "a/1", "running", pid=done.pid, checkpoint=True)
    make(place, "a/2", "running", pid=os.getpid())
    main([])
    text = capsys.readouterr().out
    assert text.count("died") == 1
    assert text.count("running") == 1
    assert text.count("resume:") == 1


def test_a_run_that_was_started_from_python_is_resumed_from_there(place, capsys):
    make(place, "a/1", "stopped", checkpoint=True, recipe="")
    main([])
    assert "    resume: camshaft.run(..., resume='runs/a/1')\n" in capsys.readouterr().out


def test_damaged_files_are_read_as_empty(place, capsys):
    path = make(place, "a/1")
    (path / "status.json").write_text("{half")
    (path / "provenance.json").unlink()
    assert main([]) == 0
    assert "unknown" in capsys.readouterr().out


def test_runs_of_one_name_and_json(place, capsys):
    make(place, "a/1")
    make(place, "b/1")
    assert main(["b", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["path"] == "runs/b/1"
    assert run["state"] == "finished"


def test_no_runs_is_wrong_input(place):
    with pytest.raises(RecipeError, match="there are no runs in runs"):
        main([])


def test_diff_shows_recipe_code_and_result(place, capsys):
    make(place, "a/1", recipe="optimizer: {lr: 0.1, name: sgd}\n", metrics={"val/acc": 0.5})
    make(place, "bb/1", recipe="optimizer: {lr: 0.2, name: sgd}\nseed: 1\n", metrics={"val/acc": 0.75})
    assert main(["diff", "runs/a/1", "runs/bb/1"]) == 0
    assert capsys.readouterr().out == (
        "- runs/a/1\n+ runs/bb/1\n\n"
        "recipe\n  optimizer.lr: 0.1 -> 0.2\n  seed: - -> 1\n\n"
        "code\n  revision: r3 -> r4\n\n"
        "result\n  metrics.val/acc: 0.5 -> 0.75\n"
    )
    assert main(["diff", "runs/a/1", "runs/a/1"]) == 0
    assert "no difference" in capsys.readouterr().out


def test_diff_of_what_is_no_run_says_so(place):
    with pytest.raises(RecipeError, match="is no run directory"):
        main(["diff", "x", "y"])
