from helpers import errors, read

GOOD = "module: {_target_: net.Net}\nmax_epochs: 1\n"


def test_a_reference_keeps_the_type_of_its_value(project):
    recipe = read("module: {_target_: net.Net, hidden: '${batch_size}'}\nbatch_size: 32\nmax_epochs: 1\n")
    assert recipe.config["module"]["hidden"] == 32


def test_a_reference_inside_text_becomes_text(project):
    recipe = read(f"{GOOD}name: lr-${{optimizer.lr}}\noptimizer: {{name: sgd, lr: 0.1}}\n")
    assert recipe.name == "lr-0.1"


def test_a_reference_follows_an_override(project):
    recipe = read(f"{GOOD}name: epochs-${{max_epochs}}\n", ["max_epochs=9"])
    assert recipe.name == "epochs-9"


def test_a_reference_may_be_relative(project):
    recipe = read(f"{GOOD}optimizer: {{name: sgd, lr: 0.1, momentum: '${{.lr}}'}}\n")
    assert recipe.config["optimizer"]["momentum"] == 0.1


def test_a_wrong_reference_is_named_with_the_nearest(project):
    assert errors(f"{GOOD}name: x-${{max_epoch}}\n") == (
        "r.yaml:3: name refers to ${max_epoch}, and there is no such value.\n  Did you mean 'max_epochs'?"
    )


def test_a_variable_needs_leave(project, monkeypatch):
    monkeypatch.setenv("MY_PLACE", "here")
    text = "module: {_target_: net.Net, names: ['${oc.env:MY_PLACE}']}\nmax_epochs: 1\n"
    assert errors(text) == (
        "r.yaml:1: module.names.0 reads the environment variable MY_PLACE, which is not allowed.\n"
        "  A recipe from someone else could carry a secret of yours away. "
        "If you mean it, pass --allow env:MY_PLACE, or add env:MY_PLACE to your allow file."
    )
    assert read(text, allow=["env:MY_PLACE"]).config["module"]["names"] == ["here"]


def test_a_variable_that_is_a_number_is_one(project, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert (
        read("module: {_target_: net.Net, hidden: '${oc.env:SLURM_JOB_ID}'}\nmax_epochs: 1\n").config["module"][
            "hidden"
        ]
        == 17
    )


def test_a_variable_that_is_not_set_takes_its_default_or_is_named(project, monkeypatch):
    monkeypatch.delenv("DATA_DIR", raising=False)
    assert (
        read(f"{GOOD}data: {{_target_: net.Data, path: '${{oc.env:DATA_DIR,data}}'}}\n").config["data"]["path"]
        == "data"
    )
    assert "needs the environment variable DATA_DIR" in errors(
        f"{GOOD}data: {{_target_: net.Data, path: '${{oc.env:DATA_DIR}}'}}\n"
    )


def test_a_secret_is_read_when_its_object_is_built_and_is_nowhere_else(trusted, monkeypatch):
    from camshaft.recipe import build_callbacks, load

    monkeypatch.setenv("TRACKER_TOKEN", "very-secret-text")
    (trusted / "other.py").write_text(
        "from camshaft.callback import Callback\nclass Track(Callback):\n"
        "    def __init__(self, token: str): self.token = token\n"
    )
    off = "seed: null, finite: null, summary: null, checkpoint: null, progress: null"
    (trusted / "r.yaml").write_text(
        f"{GOOD}callbacks: {{x: {{_target_: other.Track, token: '${{oc.env:TRACKER_TOKEN}}'}}, {off}}}\n"
    )
    recipe = load("r.yaml", allow=["env:TRACKER_TOKEN"])
    assert "very-secret-text" not in recipe.to_yaml() + repr(recipe)
    assert build_callbacks(recipe)["x"].token == "very-secret-text"
