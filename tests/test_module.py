"""A module keeps its arguments, refuses misspelled hooks, and is called with what its steps take."""

import copy
import io
import pickle
from dataclasses import dataclass

import pytest
import torch

from camshaft.errors import ModuleError
from camshaft.module import Module, bind_step


class Net(Module):
    def __init__(self, width=2, rate=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)


class Wide(Net):
    def __init__(self, depth, *, width=8, rate=0.5):
        super().__init__(width, rate)
        self.depth = depth


class Log:
    def __init__(self):
        self.entries = []

    def log(self, *entry):
        self.entries.append(entry)


def define(**members):
    return type("Own", (Module,), members)


def step(self, batch):
    return batch


# -- hyper-parameters


def test_arguments_are_kept_with_their_defaults():
    assert Net(3).hparams == {"width": 3, "rate": 0.1}


def test_hyperparameters_are_attributes_too_both_ways():
    hparams = Net().hparams
    hparams.rate = 0.3
    assert (hparams["rate"], hparams.rate) == (0.3, 0.3)
    with pytest.raises(AttributeError, match="no hyper-parameter 'depth'"):
        _ = hparams.depth


def test_a_base_class_that_keeps_arguments_keeps_those_of_the_derived_class():
    assert Wide(5).hparams == {"width": 8, "rate": 0.5, "depth": 5}


def test_a_derived_class_keeps_its_own_when_both_call():
    class Both(Net):
        def __init__(self, rate, depth):
            super().__init__(rate=rate * 10)
            self.save_hyperparameters()

    assert Both(0.1, 2).hparams == {"width": 2, "rate": 0.1, "depth": 2}


def test_a_network_that_only_the_derived_class_takes_is_left_out_with_a_warning():
    class Holder(Net):
        def __init__(self, network, rate):
            super().__init__(rate=rate)
            self.network = network

    with pytest.warns(UserWarning, match="network is not kept"):
        assert Holder(torch.nn.Linear(1, 1), 0.2).hparams == {"width": 2, "rate": 0.2}


def test_a_part_made_inside_init_keeps_only_its_own():
    class Outer(Net):
        def __init__(self, width):
            super().__init__(width)
            self.inner = Net(width + 1)

    outer = Outer(3)
    assert (outer.hparams["width"], outer.inner.hparams) == (3, {"width": 4, "rate": 0.1})


def test_variable_arguments_are_kept():
    class Variable(Module):
        def __init__(self, first, *widths, **options):
            super().__init__()
            self.save_hyperparameters()

    assert Variable(1, 2, 3, act="relu").hparams == {"first": 1, "widths": [2, 3], "act": "relu"}


def test_names_and_ignore_choose():
    class Chosen(Module):
        def __init__(self, a, b, c, network):
            super().__init__()
            self.save_hyperparameters("a", "b", ignore="b")

    assert Chosen(1, 2, 3, torch.nn.Linear(1, 1)).hparams == {"a": 1}


def test_a_name_that_is_no_argument_is_refused():
    class Chosen(Module):
        def __init__(self, rate):
            super().__init__()
            self.save_hyperparameters("rtae")

    with pytest.raises(ModuleError, match="Did you mean 'rate'"):
        Chosen(1)


def test_a_mapping_is_kept_from_anywhere_and_names_only_from_init():
    net = Net()
    net.save_hyperparameters({"lr": 1})
    assert net.hparams["lr"] == 1
    with pytest.raises(ModuleError, match="outside __init__"):
        net.save_hyperparameters()


def test_later_changes_to_an_argument_are_not_its_value():
    class Lists(Module):
        def __init__(self, widths):
            super().__init__()
            self.save_hyperparameters()
            widths.pop()

    assert Lists([1, 2]).hparams == {"widths": [1, 2]}


@dataclass
class Config:
    width: int = 3


@pytest.mark.parametrize(
    "value", [Config(), torch.ones(1), torch.nn.Linear(1, 1), {1: 2}, [object()], float("nan"), len]
)
def test_what_is_no_plain_data_is_refused_by_name(value):
    with pytest.raises(ModuleError, match=r"Net\(rate=...\)"):
        Net(rate=value)


def test_without_a_call_hyperparameters_are_empty_and_not_shared():
    first, second = define()(), define()()
    first.hparams["a"] = 1
    assert second.hparams == {}


# -- copies


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "deepcopy", "pickle"]
)
def test_a_copy_of_a_running_module_is_not_running_and_the_original_still_is(copied):
    net = Net(4)
    net.attach(Log())
    other = copied(net)
    other.log("x", 1)
    net.log("x", 2)
    assert [entry[1] for entry in net._engine.entries] == [2]
    assert other.hparams == net.hparams
    assert torch.equal(other.layer.weight, net.layer.weight)


def test_a_running_module_is_saved_without_its_run():
    net, file = Net(4), io.BytesIO()
    net.attach(Log())
    torch.save(net, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).hparams == net.hparams
    assert list(net.state_dict()) == ["layer.weight", "layer.bias"]


# -- definition


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainning_step", "training_step"), ("train_step", "training_step"), ("val_step", "validation_step"),
        ("validaton_step", "validation_step"), ("configure_optimisers", "configure_optimizers"),
        ("train_dataloaders", "train_dataloader"), ("validation_dataloader", "val_dataloader"),
        ("configure_optimizer", "configure_optimizers"), ("predictstep", "predict_step"),
    ],
)  # fmt: skip
def test_a_misspelled_step_is_refused(wrong, right):
    with pytest.raises(ModuleError, match=right):
        define(**{wrong: step})


@pytest.mark.parametrize(
    "hook", ["on_train_epoch_end", "on_fit_start", "on_step", "on_validation_batch_end", "on_save_checkpoint",
             "training_epoch_end", "optimizer_step", "on_before_zero_grad", "on_train_start"],
)  # fmt: skip
def test_a_hook_that_belongs_in_a_callback_is_refused(hook):
    with pytest.raises(ModuleError, match="Callback"):
        define(**{hook: step})


@pytest.mark.parametrize(
    "name", ["log_images", "detach", "on_policy_loss", "encode", "attached", "step", "loss", "override", "stop",
             "hparam", "test_accuracy", "predict", "optimizer", "train_stepper", "forward_step"],
)  # fmt: skip
def test_a_users_own_method_is_left_alone(name):
    assert define(**{name: step})


def test_a_near_name_beside_the_real_step_is_left_alone():
    assert define(training_step=step, train_step=step, training_steps=step)


# -- steps


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (lambda self, batch: (batch,), ("b",)),
        (lambda self, batch, batch_idx: (batch, batch_idx), ("b", 3)),
        (lambda self, x, i: (x, i), ("b", 3)),
        (lambda self, x, i, j: (x, i, j), ("b", 3, 1)),
        (lambda self, batch, batch_idx, dataloader_idx=0: (batch, batch_idx, dataloader_idx), ("b", 3, 1)),
        (lambda self, batch, dataloader_idx=0: (batch, dataloader_idx), ("b", 1)),
        (lambda self, batch, dataloader_idx, batch_idx: (batch, batch_idx, dataloader_idx), ("b", 3, 1)),
        (lambda self, *args: args, ("b", 3, 1)),
        (lambda self, batch, prefix="val": (batch, prefix), ("b", "val")),
        (lambda self, batch, batch_idx, prefix="val": (batch, batch_idx, prefix), ("b", 3, "val")),
        (lambda self, batch, prefix="val", batch_idx=0: (batch, batch_idx, prefix), ("b", 3, "val")),
        (lambda self, batch, *, batch_idx: (batch, batch_idx), ("b", 3)),
        (lambda self, batch, **options: (batch, options), ("b", {})),
    ],
)
def test_a_step_gets_what_it_takes(method, expected):
    assert bind_step(define(validation_step=method)(), "validation_step")("b", 3, 1) == expected


@pytest.mark.parametrize(
    "method",
    [lambda self: 0, lambda self, a, b, c, d: 0, lambda self, batch, batch_idx, optimizer_idx: 0,
     lambda self, batch, *, a, b, c: 0],
)  # fmt: skip
def test_a_step_of_an_impossible_shape_is_refused(method):
    with pytest.raises(ModuleError, match="cannot be called"):
        bind_step(define(training_step=method)(), "training_step")


def test_a_step_without_a_loader_index_gets_the_first():
    bound = bind_step(define(training_step=lambda self, b, i, dataloader_idx: dataloader_idx)(), "training_step")
    assert bound("b", 0, 0) == 0


def test_testing_is_validating_unless_overridden():
    assert define(validation_step=lambda self, batch: ("val", batch))().test_step("b", 0) == ("val", "b")


def test_logging_without_a_run_does_nothing_and_manual_steps_say_why():
    net = Net()
    net.log("a", 1)
    net.log_dict({"a": 1})
    net.log_text("a", "b")
    with pytest.raises(ModuleError, match="not being trained"):
        net.optimizers()


def test_a_module_knows_its_device_without_parameters_too():
    assert define()().device == Net().device == torch.device("cpu")
