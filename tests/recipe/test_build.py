import pytest
import torch

from camshaft.errors import RecipeError
from camshaft.recipe import (
    build_callbacks,
    build_data,
    build_loggers,
    build_module,
    build_optimizer,
    build_scheduler,
    build_strategy,
    load,
)

OFF = "seed: null, finite: null, summary: null, checkpoint: null, progress: null"


def recipe(text, *overrides):
    from helpers import write

    return load(write(text), overrides)


def test_module_data_and_strategy_are_built_with_their_arguments(trusted):
    loaded = recipe(
        "module: {_target_: net.Net, hidden: 5}\n"
        "data: {_target_: net.Data, batch_size: 3}\nmax_epochs: 1\ndevice: cpu\n"
    )
    assert build_module(loaded).hidden == 5
    assert build_data(loaded).batch_size == 3
    assert build_strategy(loaded)._wanted == "cpu"


def test_without_data_there_is_none(trusted):
    assert build_data(recipe("module: {_target_: net.Net}\nmax_epochs: 1\n")) is None


def test_objects_inside_arguments_are_built(trusted):
    text = (
        "module: {_target_: net.Net, head: {_target_: torch.nn.Linear, in_features: 2, out_features: 3}}\n"
        "max_epochs: 1\n"
    )
    assert build_module(recipe(text)).head.out_features == 3


def test_a_schedule_and_an_error_policy_are_taken_off_and_set(trusted):
    text = (
        "module: {_target_: net.Net}\nmax_epochs: 1\n"
        f"callbacks: {{f: {{_target_: net.Freeze, depth: 2, every: 5 steps, after: 10, on_error: disable}}, {OFF}}}\n"
    )
    built = build_callbacks(recipe(text))
    assert list(built) == ["f"]
    assert (built["f"].depth, built["f"].name, built["f"].on_error) == (2, "f", "disable")
    assert (built["f"].schedule.every_steps, built["f"].schedule.after) == (5, 10)


def test_an_argument_of_the_constructor_is_not_taken_off(trusted):
    text = (
        f"module: {{_target_: net.Net}}\nmax_epochs: 1\n"
        f"callbacks: {{o: {{_target_: net.Often, every: 3 steps}}, {OFF}}}\n"
    )
    built = build_callbacks(recipe(text))["o"]
    assert built.every == "3 steps"
    assert built.schedule is None


def test_no_logger_is_built_when_all_are_off(trusted):
    text = "module: {_target_: net.Net}\nmax_epochs: 1\nloggers: {console: null, jsonl: null, tensorboard: null}\n"
    assert build_loggers(recipe(text)) == {}


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "rmsprop", "adagrad", "nadam", "radam"])
def test_every_built_in_optimizer_is_built(trusted, name):
    build = build_optimizer(
        recipe(f"module: {{_target_: net.Net}}\nmax_epochs: 1\noptimizer: {{name: {name}, lr: 0.25}}\n")
    )
    optimizer = build([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer).__name__.lower() == name
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("entry", "interval"),
    [
        ("cosine, warmup_steps: 2", "step"), ("linear", "step"),
        ("constant", "step"), ("inverse_sqrt, warmup_steps: 2", "step"),
        ("step, step_size: 3", None), ("multistep, milestones: [2]", None), ("exponential, gamma: 0.9", None),
        ("plateau, monitor: val/loss", None), ("onecycle, max_lr: 0.1", None),
        ("step, step_size: 3, interval: step", "step"),
    ],
)  # fmt: skip
def test_every_built_in_scheduler_is_built(trusted, entry, interval):
    text = (
        f"module: {{_target_: net.Net}}\nmax_epochs: 1\n"
        f"optimizer: {{name: sgd, lr: 0.1}}\nscheduler: {{name: {entry}}}\n"
    )
    loaded = recipe(text)
    optimizer = build_optimizer(loaded)([torch.nn.Parameter(torch.zeros(1))])
    plan = build_scheduler(loaded)(optimizer, 100)
    assert plan.interval == interval
    assert plan.name == entry.partition(",")[0]
    plan.resolve(100)
    if entry.startswith("onecycle"):
        assert plan.scheduler.total_steps == 100
        assert plan.interval == "step"


def test_a_schedule_over_a_run_of_unknown_length_says_so(trusted):
    loaded = recipe(
        "module: {_target_: net.Net}\nmax_time: 1 hour\noptimizer: {name: sgd, lr: 0.1}\nscheduler: {name: cosine}\n"
    )
    optimizer = build_optimizer(loaded)([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(RecipeError, match="which is not known"):
        build_scheduler(loaded)(optimizer, None)


def test_an_error_of_a_constructor_is_located(trusted):
    (trusted / "other.py").write_text(
        "from camshaft.module import Module\nfrom camshaft.errors import ModuleError\n"
        "class Bad(Module):\n    def __init__(self, x: int):\n"
        "        raise ModuleError('x is odd.', fix='Make it even.')\n"
        "class Worse(Module):\n    def __init__(self, x: int):\n        raise ValueError('no')\n"
    )
    from camshaft.errors import ModuleError

    with pytest.raises(ModuleError) as caught:
        build_module(recipe("max_epochs: 1\nmodule: {_target_: other.Bad, x: 1}\n"))
    assert str(caught.value) == "r.yaml:2: module: x is odd.\n  Make it even."
    with pytest.raises(
        RecipeError, match=r"r\.yaml:2: module: Worse could not be built: ValueError: no \(other\.py, line 8\)"
    ):
        build_module(recipe("max_epochs: 1\nmodule: {_target_: other.Worse, x: 1}\n"))


def test_defaults_come_around_the_recipes_own_callbacks(trusted):
    text = (
        "module: {_target_: net.Net}\nmax_epochs: 1\nseed: 7\n"
        "callbacks: {f: {_target_: net.Freeze, depth: 1}, progress: null}\n"
    )
    loaded = recipe(text)
    assert list(loaded.config["callbacks"]) == ["seed", "finite", "f", "progress", "summary", "checkpoint"]
    assert loaded.settings.seed == 7
    assert list(loaded.config["loggers"]) == ["console", "jsonl", "tensorboard"]


def test_checkpoint_false_switches_it_off(trusted):
    assert (
        recipe("module: {_target_: net.Net}\nmax_epochs: 1\ncheckpoint: false\n").config["callbacks"]["checkpoint"]
        is None
    )


def test_the_resolved_recipe_gives_the_same_run_from_another_folder(trusted, tmp_path):
    first = recipe(
        "module: {_target_: net.Net, hidden: 1e1}\nmax_epochs: 1\nseed: 3\ncheckpoint: {keep_last: 2}\nname: a\n"
    )
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "recipe.yaml").write_text(first.to_yaml())
    second = load(tmp_path / "runs" / "recipe.yaml")
    assert second.to_yaml() == first.to_yaml()
    assert second.settings == first.settings
    assert build_module(second).hidden == 10
