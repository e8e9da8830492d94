"""Imports point down, libraries stay where they belong, files and functions stay short, and names are documented."""

import ast
import importlib
import inspect
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

import camshaft
from camshaft import testing
from camshaft.callback import Callback
from camshaft.loggers.base import Logger
from camshaft.recipe.registry import CALLBACKS, LOGGERS, OPTIMIZERS, SCHEDULERS, STRATEGIES
from camshaft.strategies.base import Strategy

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "camshaft").rglob("*.py"))

# The layers of the architecture, from below. What is not listed is a part of whatever imports it: it lies as high as
# the highest of its own imports.
LAYERS = [
    {"errors", "module"},
    {"callback", "state", "metrics", "data", "schedule", "strategies.base", "loggers.base"},
    {"loop", "step", "hooks", "checkpoint"},
    {"recipe", "callbacks", "loggers", "strategies"},
    {
        "fit", "validate", "test", "predict", "check", "show", "runs", "init", "schema", "completion", "verify_resume",
        "cli", "evaluate", "launch", "launchcall", "session", "choosing", "direct", "assembly", "resuming", "testing",
    },
]  # fmt: skip
# Strategies are built on these, which are no leaves; one strategy never imports another.
SHARED_STRATEGIES = {"accelerated", "sharded"}


def name_of(path):
    parts = path.relative_to(ROOT / "camshaft").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "camshaft"


MODULES = {name_of(path): path for path in SOURCES}


def is_typing(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@cache
def imports(path):
    """Return the full names that a file imports anywhere but for type checking; of camshaft, the modules."""
    found, nodes = set(), [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                inner = whole.removeprefix("camshaft.")
                found.add(whole if not whole.startswith("camshaft.") or inner in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        nodes += node.orelse if is_typing(node) else ast.iter_child_nodes(node)
    return frozenset(found)


def own_imports(name):
    found = {entry.removeprefix("camshaft.") for entry in imports(MODULES[name]) if entry.startswith("camshaft.")}
    return {entry for entry in found if entry in MODULES}


def listed_layer(name):
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for level, members in enumerate(LAYERS):
            if prefix in members and not (prefix == "strategies" and not is_leaf_strategy(name)):
                return level
    return None


def is_leaf_strategy(name):
    leaves = {path.split(".")[2] for path in STRATEGIES.values()} | SHARED_STRATEGIES
    return name.removeprefix("strategies.") in leaves


@cache
def layer(name, above=frozenset()):
    listed = listed_layer(name)
    if listed is not None:
        return listed
    return max((layer(other, above | {name}) for other in own_imports(name) - above - {name}), default=0)


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"camshaft"}))
def test_imports_point_down(name):
    upward = {other for other in own_imports(name) if layer(other) > layer(name)}
    assert not upward, f"{name} lies in layer {layer(name)}, and these above it"


def test_the_layers_are_those_of_real_modules():
    names = {part for name in MODULES for part in (name, name.partition(".")[0])}
    assert set().union(*LAYERS) <= names
    assert (layer("metrics"), layer("layers"), layer("worker"), layer("evaluation")) == (1, 0, 0, 1)


@pytest.mark.parametrize("kind", ["callbacks", "loggers", "strategies", "recipe"])
def test_leaves_never_import_each_other(kind):
    for name in MODULES:
        if listed_layer(name) != 3 or not name.startswith(f"{kind}."):
            continue
        others = {other for other in own_imports(name) if listed_layer(other) == 3}
        if kind == "recipe":
            others = {other for other in others if not other.startswith("recipe")}
        elif kind == "strategies":
            others -= {f"strategies.{shared}" for shared in SHARED_STRATEGIES}
        assert not others, name


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("accelerate", "strategies"), ("deepspeed", "strategies"), ("omegaconf", "recipe"), ("tensorboard", "loggers"),
        ("torch.utils.tensorboard", "loggers"),
    ],
)  # fmt: skip
def test_a_library_is_imported_in_its_own_place_alone(library, home):
    # Launching may hand over to Accelerate's launcher.
    allowed = {"launch"} if library == "accelerate" else set()
    users = {
        name
        for name, path in MODULES.items()
        if any(entry == library or entry.startswith(f"{library}.") for entry in imports(path))
    }
    assert users
    assert {name for name in users if not name.startswith(f"{home}.")} <= allowed


def tracked():
    """Return the files of the project: those in version control, where there is one."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        return [path for path in ROOT.rglob("*") if path.is_file() and ".git" not in path.parts]
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


@pytest.mark.parametrize("folder", ["camshaft", "recipes", "benchmarks", "tests"])
def test_files_have_at_most_400_lines(folder):
    long = {}
    for path in (ROOT / folder).rglob("*.py"):
        if (count := len(path.read_text().splitlines())) > 400:
            long[str(path.relative_to(ROOT))] = count
    assert not long


@pytest.mark.parametrize("folder", ["camshaft", "recipes"])
def test_functions_have_fewer_than_40_lines(folder):
    long = {}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = node.end_lineno - node.lineno + 1
                if count >= 40:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = count
    assert not long


def test_no_file_names_a_place_of_one_machine():
    place = re.compile(r"(?<![\w.~])/(?:home|root|Users|mnt|work|tmp)/\w")
    found = {}
    for path in tracked():
        if path.suffix in (".py", ".yaml", ".yml", ".toml", ".md", ".txt", ".json", "") and path != Path(__file__):
            lines = path.read_text(errors="replace").splitlines()
            found |= {f"{path.relative_to(ROOT)}:{n}": line for n, line in enumerate(lines, 1) if place.search(line)}
    assert not found


# -- names


@pytest.mark.parametrize(
    ("names", "base"),
    [(CALLBACKS, Callback), (LOGGERS, Logger), (STRATEGIES, Strategy), (OPTIMIZERS, object), (SCHEDULERS, object)],
    ids=["callbacks", "loggers", "strategies", "optimizers", "schedulers"],
)
def test_every_short_name_is_a_class_of_its_kind(names, base):
    for name, target in names.items():
        module, _, attribute = target.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as missing:
            if missing.name.startswith("camshaft"):
                raise
            # A library that only this class needs: the file has the class all the same.
            defined = ast.parse(MODULES[module.removeprefix("camshaft.")].read_text()).body
            assert attribute in [node.name for node in defined if isinstance(node, ast.ClassDef)], name
            continue
        assert issubclass(found, base), name
        assert f"{found.__module__}.{found.__qualname__}" == target, "the path of a class is where it is defined"


def test_every_bundled_callback_and_logger_has_a_short_name():
    for kind, names, base in (("callbacks", CALLBACKS, "Callback"), ("loggers", LOGGERS, "Logger")):
        for name, path in MODULES.items():
            if not name.startswith(f"{kind}.") or name == "loggers.base":
                continue
            for node in ast.parse(path.read_text()).body:
                is_one = isinstance(node, ast.ClassDef) and base in [ast.unparse(b) for b in node.bases]
                if is_one and not node.name.startswith("_"):
                    assert f"camshaft.{name}.{node.name}" in names.values()


@pytest.mark.parametrize("package", [camshaft, testing], ids=["camshaft", "camshaft.testing"])
def test_public_names_are_those_that_are_exported_explicitly(package):
    tree = ast.parse(Path(package.__file__).read_text())
    exported = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert exported == set(package.__all__)
    assert list(package.__all__) == sorted(package.__all__)
    assert {name for name in dir(package) if not name.startswith("_")} >= exported


@pytest.mark.parametrize(
    "subject",
    [getattr(package, name) for package in (camshaft, testing) for name in package.__all__],
    ids=lambda subject: subject.__name__,
)
def test_public_names_and_their_public_methods_are_documented(subject):
    assert subject.__doc__
    assert not subject.__doc__.startswith(f"{subject.__name__}("), "a dataclass without a docstring of its own"
    if isinstance(subject, type):
        for name, member in vars(subject).items():
            if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                # Recorder's hooks are made in a loop: their events are documented.
                assert member.__doc__ or name.startswith("on_"), name


def test_an_unknown_public_name_is_refused():
    with pytest.raises(AttributeError, match="module 'camshaft' has no attribute 'Trainer'"):
        camshaft.Trainer  # noqa: B018
