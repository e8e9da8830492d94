from pathlib import Path

from helpers import errors, read, write

from camshaft.recipe import load

BASE = "extends: base.yaml\n"


def test_a_later_layer_wins_and_every_value_knows_its_own(project):
    write("max_epochs: 5\noptimizer: {weight_decay: 0.1}\n", "hw.yaml")
    recipe = read("extends: [base.yaml, hw.yaml]\nmodule: {hidden: 16}\n", ["optimizer.lr=0.5"])
    assert recipe.config["module"] == {"_target_": "net.Net", "hidden": 16}
    assert recipe.config["optimizer"] == {"name": "adamw", "lr": 0.5, "weight_decay": 0.1}
    assert str(recipe.origins["module._target_"]) == "base.yaml:1 (extended by r.yaml)"
    assert str(recipe.origins["max_epochs"]) == "hw.yaml:1 (extended by r.yaml)"
    assert str(recipe.origins["module.hidden"]) == "r.yaml:2"
    assert str(recipe.origins["optimizer.lr"]) == "command line: optimizer.lr=0.5"


def test_several_recipes_on_one_command_line_compose_in_order(project):
    write("max_epochs: 7\n", "more.yaml")
    recipe = load(["base.yaml", "more.yaml"], inspect=True)
    assert recipe.settings.max_epochs == 7


def test_a_run_is_named_after_the_last_recipe_that_says_what_is_trained(project):
    Path("hardware").mkdir()
    write("device: cpu\n", "hardware/cpu.yaml")
    write("extends: base.yaml\nmodule: {hidden: 3}\n", "big.yaml")
    assert load(["base.yaml", "hardware/cpu.yaml"], inspect=True).name == "base"
    write("extends: base.yaml\nmodule: {_target_: net.Big, depth: 1}\n", "big.yaml")
    assert load(["base.yaml", "big.yaml", "hardware/cpu.yaml"], inspect=True).name == "big"


def test_the_python_is_beside_the_file_that_names_the_module_or_where_code_says(project):
    Path("deep").mkdir()
    write("extends: ../base.yaml\n", "deep/e.yaml")
    assert load("deep/e.yaml", inspect=True).config["code"] == str(project)
    write("module: {_target_: net.Net}\nmax_epochs: 1\ncode: ..\n", "deep/f.yaml")
    assert load("deep/f.yaml", inspect=True).config["code"] == str(project)


def test_extends_is_relative_to_the_file_that_says_it(project):
    Path("deep").mkdir()
    write("extends: ../base.yaml\nmax_epochs: 2\n", "deep/mid.yaml")
    recipe = read("extends: deep/mid.yaml\n")
    assert recipe.settings.max_epochs == 2
    assert str(recipe.origins["data._target_"]) == "base.yaml:2 (extended by deep/mid.yaml)"


def test_a_circle_is_refused(project):
    write("extends: b.yaml\n", "a.yaml")
    write("extends: a.yaml\n", "b.yaml")
    assert errors("extends: a.yaml\n") == (
        "the recipes extend each other in a circle: r.yaml -> a.yaml -> b.yaml -> a.yaml.\n  Remove one 'extends'."
    )


def test_a_missing_file_is_named_with_the_nearest(project):
    assert errors("extends: bse.yaml\n").startswith(
        "r.yaml has 3 mistakes.\nr.yaml:1: extends names bse.yaml, and there is no bse.yaml.\n  Did you mean base.yaml?"
    )


def test_another_class_replaces_the_arguments_of_the_old_one(project):
    recipe = read(f"{BASE}optimizer: {{name: sgd, lr: 0.1}}\n")
    assert recipe.config["optimizer"] == {"name": "sgd", "lr": 0.1}
    recipe = read(BASE, ["optimizer={name: sgd, lr: 0.2}"])
    assert recipe.config["optimizer"] == {"name": "sgd", "lr": 0.2}


def test_a_list_is_replaced_not_joined(project):
    write("module: {_target_: net.Net, names: [a, b]}\nmax_epochs: 1\n", "list.yaml")
    assert read("extends: list.yaml\nmodule: {names: [c]}\n").config["module"]["names"] == ["c"]


def test_a_bare_callback_is_on_and_null_is_off(project):
    write("callbacks:\n  checkpoint:\n", "on.yaml")
    assert load(["base.yaml", "on.yaml"], inspect=True).config["callbacks"]["checkpoint"] == {}
    write("callbacks:\n  checkpoint: null\n", "off.yaml")
    assert load(["base.yaml", "off.yaml"], inspect=True).config["callbacks"]["checkpoint"] is None
    assert load(["base.yaml"], ["callbacks.checkpoint=null"], inspect=True).config["callbacks"]["checkpoint"] is None


def test_overrides_set_add_and_remove(project):
    recipe = read(BASE, ["module.hidden=32", "+module.names=[a]", "~data", "+max_steps=1e3"])
    assert recipe.config["module"] == {"_target_": "net.Net", "hidden": 32, "names": ["a"]}
    assert "data" not in recipe.config
    assert recipe.settings.max_steps == 1000


def test_an_override_reaches_into_lists(project):
    recipe = read(f"{BASE}module: {{names: [a, b]}}\n", ["module.names.1=c"])
    assert recipe.config["module"]["names"] == ["a", "c"]


def test_an_override_turns_a_short_strategy_into_its_arguments(project):
    assert "strategy.devce is not an argument of camshaft.strategies.single.Single" in errors(
        f"{BASE}strategy: single\n", ["strategy.devce=cpu"]
    )


def test_wrong_overrides_are_all_named(project):
    assert errors(BASE, ["max_epochs", "+max_epochs=3", "~gone", "max_epochs.x=1", "a..b=1", "module.hidden=["]) == (
        "r.yaml has 6 mistakes.\n"
        "command line: +max_epochs=3: max_epochs is there already, from base.yaml:4 (extended by r.yaml).\n"
        "  '+' adds what is new. Write max_epochs=3 to change it.\n"
        "command line: a..b=1: 'a..b=1' is no override.\n"
        "  It would change nothing. Write path=value to set, +path=value to add, ~path to remove, "
        "for example optimizer.lr=1e-3.\n"
        "command line: max_epochs: 'max_epochs' is no override.\n"
        "  It would change nothing. Write path=value to set, +path=value to add, ~path to remove, "
        "for example optimizer.lr=1e-3.\n"
        "command line: max_epochs.x=1: max_epochs is {'x': 1}, and must be a whole number or null.\n"
        "command line: module.hidden=[: the value of module.hidden is not YAML.\n"
        "  Quote it: path='\"text\"'.\n"
        "command line: ~gone: 'gone' is not in the recipe.\n"
        "  There is nothing to remove. Switch a default off with callbacks.NAME=null."
    )


def test_what_was_written_is_kept_whole(project):
    one = "# mine\nmodule: {_target_: net.Net}\nmax_epochs: 1\n"
    assert read(one).text == one
    several = read("extends: base.yaml\n", ["seed=1"]).text
    assert several.startswith("# r.yaml\nextends: base.yaml\n---\n# base.yaml\nmodule:")
    assert several.endswith("---\n# command line\n# seed=1\n")


def test_a_file_name_becomes_a_name_that_a_directory_can_have(project):
    write("module: {_target_: net.Net}\nmax_epochs: 1\n", "_my recipe (2).yaml")
    assert load("_my recipe (2).yaml", inspect=True).name == "my-recipe--2-"


def test_files_that_extend_the_same_again_and_again_are_refused_early(project):
    for depth in range(6):
        below = ", ".join([f"l{depth + 1}.yaml"] * 8) if depth < 5 else ""
        (project / f"l{depth}.yaml").write_text(f"extends: [{below}]\nseed: {depth}\n")
    assert errors("extends: l0.yaml\n") == "r.yaml extends more than 50 files.\n  Join some of them."


def test_an_override_that_replaces_a_mapping_forgets_where_its_parts_came_from(project):
    recipe = read(BASE, ["module={_target_: net.Big, depth: 2}"])
    assert recipe.config["module"] == {"_target_": "net.Big", "depth": 2}
    assert {key for key in recipe.origins if key.startswith("module")} == {"module", "module._target_", "module.depth"}
    assert str(recipe.origins["module.depth"]).startswith("command line")
