"""The messages, whole."""

import sys

from helpers import errors, read

GOOD = "module: {_target_: net.Net}\nmax_epochs: 1\n"


def test_all_mistakes_come_at_once_with_their_lines_and_nearest_names(project):
    assert errors(
        "module:\n  _target_: net.Net\n  hiden: 3\n  dropout: often\n"
        "optimzer: {name: adamw}\nmax_epochs: yes\ncallbacks:\n"
        "  chekpoint: {}\n  freeze: {_target_: net.Freeze, mode: mni}\n"
    ) == (
        "r.yaml has 7 mistakes.\n"
        "r.yaml:3: module.hiden is not an argument of net.Net.\n"
        "  It would be ignored and hidden would stay 8. Did you mean 'hidden'?\n"
        "r.yaml:4: module.dropout is 'often', and must be a number.\n"
        "r.yaml:5: optimzer is not a key of a recipe.\n"
        "  It would be ignored. Did you mean 'optimizer'?\n"
        "r.yaml:6: max_epochs is 'yes', and must be a whole number or null.\n"
        "r.yaml:8: callbacks.chekpoint names no built-in callback and has no _target_.\n"
        "  Nothing says which class it is. Did you mean 'checkpoint'? Otherwise add _target_: my_file.Class.\n"
        "r.yaml:9: callbacks.freeze.mode is 'mni', and must be one of min, max.\n"
        "  Did you mean 'min'?\n"
        "r.yaml:9: callbacks.freeze lacks 'depth', which net.Freeze needs.\n"
        "  It could not be built. Add 'depth: <a whole number>'."
    )


def test_one_mistake_is_one_message(project):
    assert errors(f"{GOOD}strategy: dpp\n") == (
        "r.yaml:3: strategy is 'dpp', and no strategy has that name.\n"
        "  Did you mean 'ddp'? A strategy of your own is named by _target_: my_file.Class."
    )


def test_a_mistake_in_an_extended_file_names_the_layer(project):
    (project / "bad.yaml").write_text("optimizer: {name: adamw, lr: fast}\n")
    assert errors(f"extends: bad.yaml\n{GOOD}") == (
        "bad.yaml:1 (extended by r.yaml): optimizer.lr is 'fast', and must be a number."
    )


def test_a_mistake_on_the_command_line_names_the_override(project):
    assert errors(GOOD, ["log_every=often"]) == (
        "command line: log_every=often: log_every is 'often', and must be a whole number."
    )


def test_quoted_numbers_are_text(project):
    assert errors(f'{GOOD}optimizer: {{name: sgd, lr: "1e-3"}}\n') == (
        "r.yaml:3: optimizer.lr is '1e-3', and must be a number.\n  In quotes it is text. Write 1e-3 without quotes."
    )


def test_yaml_1_1_booleans_are_named(project):
    assert errors(f"{GOOD}checkpoint: {{at_end: on}}\n") == (
        "r.yaml:3: checkpoint.at_end is 'on', and must be true or false.\n"
        "  YAML reads 'on' as text, or not, depending on its version. Write true."
    )


def test_base_60_is_named(project):
    assert errors("module: {_target_: net.Net}\nmax_steps: 1:30\n") == (
        "r.yaml:2: max_steps is '1:30', and must be a whole number or null.\n"
        "  One YAML reads it as base 60, another as text. Write a plain number, or an interval such as '90 minutes'."
    )


def test_numbers_where_text_is_wanted_ask_for_quotes(project):
    assert errors(f"{GOOD}name: 123\n") == (
        "r.yaml:3: name is 123, and must be text or null.\n  YAML reads it as a number. Quote it: '123'."
    )
    assert "Quote it: 'true'." in errors(f"{GOOD}device: true\n")


def test_whole_numbers_may_be_written_as_1e3(project):
    recipe = read("module: {_target_: net.Net, hidden: 1e2}\nmax_steps: 1e3\n")
    assert recipe.config["module"]["hidden"] == 100
    assert isinstance(recipe.config["module"]["hidden"], int)
    assert recipe.settings.max_steps == 1000
    assert "max_steps is 1000.5" in errors("module: {_target_: net.Net}\nmax_steps: 1000.5\n")


def test_a_class_that_is_not_there_is_named_with_the_nearest(project):
    assert errors("module: {_target_: net.Nett}\nmax_epochs: 1\n") == (
        "r.yaml:1: module._target_ is net.Nett, and net has no Nett.\n  Did you mean 'Net'?"
    )


def test_a_class_of_another_kind_is_refused(project):
    assert errors("module: {_target_: net.Freeze, depth: 1}\nmax_epochs: 1\n") == (
        "r.yaml:1: module names net.Freeze, which is no module.\n  Give a subclass of camshaft.module.Module."
    )


def test_a_function_is_refused(project):
    assert "net.build, which is a function" in errors("module: {_target_: net.build}\nmax_epochs: 1\n")


def test_arguments_that_go_on_to_a_base_are_known(project):
    recipe = read("module: {_target_: net.Big, depth: 2, hidden: 4}\nmax_epochs: 1\n")
    assert recipe.config["module"]["hidden"] == 4
    assert "Did you mean 'hidden'?" in errors("module: {_target_: net.Big, depth: 2, hiden: 4}\nmax_epochs: 1\n")


def test_arguments_that_a_class_collects_are_free(project):
    assert read("module: {_target_: net.Open, anything: 2}\nmax_epochs: 1\n").config["module"]["anything"] == 2


def test_objects_inside_arguments_are_checked_too(project):
    text = (
        "module: {_target_: net.Net, head: {_target_: torch.nn.Linear, in_features: 2, out_featurs: 3}}\n"
        "max_epochs: 1\n"
    )
    assert errors(text) == (
        "r.yaml has 2 mistakes.\n"
        "r.yaml:1: module.head.out_featurs is not an argument of torch.nn.Linear.\n"
        "  It would be ignored. Did you mean 'out_features'?\n"
        "r.yaml:1: module.head lacks 'out_features', which torch.nn.Linear needs.\n"
        "  It could not be built. Add 'out_features: <a whole number>'."
    )


def test_what_camshaft_passes_itself_is_not_taken(project):
    assert errors(f"{GOOD}optimizer: {{name: sgd, params: []}}\n") == (
        "r.yaml:3: optimizer.params is given by camshaft itself.\n  Remove it."
    )


def test_a_logger_may_carry_an_error_policy_and_no_schedule(project):
    read(f"{GOOD}loggers: {{csv: {{on_error: raise}}}}\n")
    assert errors(f"{GOOD}loggers: {{csv: {{every: 5 steps}}}}\n").startswith(
        "r.yaml:3: loggers.csv.every is not an argument of camshaft.loggers.csv.CSV."
    )


def test_callbacks_may_carry_a_schedule_and_an_error_policy(project):
    read(f"{GOOD}callbacks: {{f: {{_target_: net.Freeze, depth: 1, every: 1 epoch, after: 10, on_error: disable}}}}\n")
    assert errors(f"{GOOD}callbacks: {{f: {{_target_: net.Freeze, depth: 1, on_error: ignore}}}}\n") == (
        "r.yaml:3: callbacks.f.on_error is 'ignore', and must be one of raise, disable."
    )


def test_an_interval_of_a_constructor_is_read_as_people_say_it(project):
    read(f"{GOOD}callbacks: {{f: {{_target_: net.Freeze, depth: 1, warm: 10 minutes}}}}\n")
    assert errors(f"{GOOD}callbacks: {{f: {{_target_: net.Freeze, depth: 1, warm: often}}}}\n") == (
        "r.yaml:3: callbacks.f.warm is 'often', and must be an interval.\n"
        "  Nothing would say when it is due. Write '500 steps', '2 epochs' or '10 minutes'."
    )


def test_a_value_left_open_asks_for_it(project):
    text = "module:\n  _target_: net.Net\n  hidden: ???\nmax_epochs: 1\n"
    assert errors(text) == (
        "r.yaml:3: module.hidden is left open (???).\n  Give it: module.hidden=VALUE on the command line."
    )
    assert read(text, ["module.hidden=3"]).config["module"]["hidden"] == 3


def test_a_recipe_without_a_module_says_so(project):
    assert errors("max_epochs: 1\n") == (
        "r.yaml:1: the recipe names no module.\n"
        "  There is nothing to train. Add 'module: {_target_: my_file.MyModule}'."
    )


def test_a_missing_recipe_is_named_with_the_nearest(project):
    import pytest

    from camshaft.errors import RecipeError
    from camshaft.recipe import load

    with pytest.raises(RecipeError) as caught:
        load("bsae.yaml")
    assert str(caught.value) == "bsae.yaml does not exist.\n  Did you mean base.yaml?"


def test_checking_imports_neither_torch_nor_the_recipes_own_code(project):
    import subprocess

    (project / "r.yaml").write_text(f"{GOOD}optimizer: {{name: adamw}}\nscheduler: {{name: cosine}}\n")
    code = (
        "import sys; from camshaft.recipe import load; load('r.yaml', inspect=True); "
        "print([name for name in ('torch', 'net', 'accelerate') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_shorthand_is_checked_like_its_callback(project):
    assert errors(f"{GOOD}checkpoint: {{kep_last: 2}}\n") == (
        "r.yaml:3: checkpoint.kep_last is not an argument of camshaft.callbacks.checkpoint.Checkpoint.\n"
        "  It would be ignored and keep_last would stay 1. Did you mean 'keep_last'?"
    )
    assert read(f"{GOOD}checkpoint: {{at: [1, 2]}}\n").config["callbacks"]["checkpoint"] == {"every": {"at": [1, 2]}}
    assert errors(f"{GOOD}checkpoint: {{_target_: net.Freeze}}\n") == (
        "r.yaml:3: checkpoint stands for the built-in callback of that name.\n"
        "  Name a class of your own as callbacks.checkpoint._target_."
    )


def test_a_file_of_nothing_but_mistakes_is_not_listed_to_its_end(project):
    lines = errors("".join(f"k{number}: 1\n" for number in range(200))).splitlines()
    assert lines[0] == "r.yaml has more than 50 mistakes; these were found first."
    assert lines[1] == "r.yaml:1: k0 is not a key of a recipe."
    assert sum(line.startswith("r.yaml:") for line in lines) == 50
