from helpers import errors, read

GOOD = "module: {_target_: net.Net}\nmax_epochs: 1\noptimizer: {name: sgd, lr: 0.1}\n"


def test_a_recipe_names_its_free_choices(project):
    recipe = read(f"{GOOD}choices: {{optimizer.lr: [0.1, 0.01], module.hidden: [8, 16]}}\n")
    assert recipe.settings.choices == {"optimizer.lr": [0.1, 0.01], "module.hidden": [8, 16]}


def test_every_value_of_a_choice_is_checked(project):
    assert errors(f"{GOOD}choices:\n  optimizer.lr: [0.1, fast]\n  module.hiden: [8]\n  max_epochs: []\n") == (
        "r.yaml has 3 mistakes.\n"
        "r.yaml:5: with optimizer.lr='fast': optimizer.lr is 'fast', and must be a number.\n"
        "r.yaml:6: with module.hiden=8: module.hiden is not an argument of net.Net.\n"
        "  It would be ignored and hidden would stay 8. Did you mean 'hidden'?\n"
        "r.yaml:7: choices.max_epochs names no value.\n"
        "  Give a list of values."
    )
