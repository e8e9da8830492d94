import yaml
from helpers import read, write

from camshaft.callback import EVENTS
from camshaft.recipe import load
from camshaft.recipe.display import annotate, diff
from camshaft.show import main

GOOD = "module:\n  _target_: net.Net\n  hidden: 4\nmax_epochs: 1\n"


def test_every_value_is_shown_with_its_layer(project):
    write("optimizer: {name: adamw, betas: [0.9, 0.95]}\n", "o.yaml")
    text = annotate(read(f"extends: o.yaml\n{GOOD}", ["log_every=5", "callbacks.progress=null"]))
    lines = {line.partition("#")[0].strip(): line.partition("#")[2].strip() for line in text.splitlines()}
    assert lines["hidden: 4"] == "r.yaml:4"
    assert lines["betas: [0.9, 0.95]"] == "o.yaml:1 (extended by r.yaml)"
    assert lines["log_every: 5"] == "command line: log_every=5"
    assert lines["progress: null"] == "command line: callbacks.progress=null"
    assert lines["summary: {}"] == "default"


def test_a_shorthand_is_shown_where_it_was_set(project):
    shown = annotate(read(f"{GOOD}seed: 3\nprecision: {{0: bf16, 9: fp32}}\n", ["checkpoint=false"]))
    lines = {line.partition("#")[0].strip(): line.partition("#")[2].strip() for line in shown.splitlines()}
    assert lines["seed: 3"] == "r.yaml:5"
    assert lines["0: bf16"] == "r.yaml:6"
    assert lines["checkpoint: null"] == "command line: checkpoint=false"
    shown = annotate(read(f"{GOOD}checkpoint: {{keep_last: 2}}\n"))
    assert "keep_last: 2" in shown
    assert "# r.yaml:5" in shown.partition("keep_last: 2")[2].partition("\n")[0]


def test_what_is_shown_is_the_resolved_recipe(project):
    recipe = read(
        f"{GOOD}name: 'a-${{max_epochs}}'\ncallbacks: {{f: {{_target_: net.Freeze, depth: 1, at: [1, 2]}}}}\n"
    )
    assert yaml.safe_load(annotate(recipe)) == recipe.config
    assert yaml.safe_load(recipe.to_yaml()) == recipe.config


def test_the_command_prints_plain_yaml_when_asked(project, capsys):
    write(GOOD)
    assert main(["r.yaml", "--plain", "seed=5"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == load("r.yaml", ["seed=5"], inspect=True).config
    assert main(["r.yaml"]) == 0
    assert "# r.yaml:2" in capsys.readouterr().out


def test_it_explains_who_listens_to_what_in_the_order_they_run(trusted, capsys):
    write(f"{GOOD}callbacks: {{f: {{_target_: net.Freeze, depth: 1}}, clip_gradients: {{max_norm: 1.0}}}}\n")
    assert main(["r.yaml", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listeners = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert set(EVENTS) <= set(listeners)
    assert listeners["on_gradients"] == ["finite,", "clip_gradients"]
    assert listeners["on_fit_start"][:2] == ["seed,", "summary"]


def test_diff_lists_what_differs():
    old, new = {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 1, "c": 3}, "e": None}
    assert diff(old, new) == [("a.c", "2", "3"), ("d", "[1]", None), ("e", None, "null")]
