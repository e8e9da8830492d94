"""Recipes from strangers: each is refused within two seconds, runs nothing and imports nothing."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from camshaft.errors import CamshaftError, RecipeError
from camshaft.recipe import build_callbacks, build_data, build_module, load

RUN = "max_epochs: 1\n"
SECRET = "sk-abcdefghijklmnopqrstuvwx"


def target(path: str, more: str = "") -> str:
    return f"module: {{_target_: {path}{more}}}\n{RUN}"


def bomb(levels: int = 9) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


def interpolation_bomb(levels: int = 40) -> str:
    lines = ["module: {_target_: camshaft.module.Module}", "choices:", '  b0: ["xxxxxxxxxx"]']
    lines += [f'  b{i}: ["${{choices.b{i - 1}.0}}${{choices.b{i - 1}.0}}"]' for i in range(1, levels)]
    return "\n".join(lines)


PATHS = {
    "os.system": target("os.system", ", command: touch pwned"),
    "posix.system": target("posix.system", ", command: touch pwned"),
    "nt": target("nt.system"),
    "subprocess": target("subprocess.Popen", ", args: [touch, pwned]"),
    "subprocess run": target("subprocess.run", ", args: [touch, pwned]"),
    "eval": target("builtins.eval", ", source: 1"),
    "exec": target("builtins.exec"),
    "__import__": target("builtins.__import__", ", name: antigravity"),
    "importlib": target("importlib.import_module", ", name: antigravity"),
    "runpy": target("runpy.run_path", ", path_name: evil.py"),
    "pickle": target("pickle.loads"),
    "torch.load": target("torch.load", ", f: evil.pt"),
    "torch.hub": target("torch.hub.load", ", repo_or_dir: evil/evil"),
    "torch.classes": target("torch.ops.load_library", ", path: evil.so"),
    "ctypes": target("ctypes.CDLL", ", name: evil.so"),
    "shutil": target("shutil.rmtree", ", path: /"),
    "pathlib": target("pathlib.Path", ", path: /"),
    "open": target("io.open", ", file: pwned, mode: w"),
    "socket": target("socket.create_connection"),
    "urllib": target("urllib.request.urlretrieve"),
    "webbrowser": target("webbrowser.open"),
    "antigravity": target("antigravity.geohash"),
    "code": target("code.interact"),
    "pdb": target("pdb.set_trace"),
    "pip": target("pip.main"),
    "cpp_extension": target("torch.utils.cpp_extension.load_inline"),
    "torch.utils alias": target("torch.utils.data.dataloader.os.system"),
    "torch.nn alias": target("torch.nn.modules.module.functools.partial"),
    "torch.optim alias": target("torch.optim.optimizer.torch.load"),
    "torch.nn warnings": target("torch.nn.modules.module.warnings.sys.modules"),
    "torchmetrics alias": target("torchmetrics.metric.functools.partial"),
    "camshaft alias": target("camshaft.recipe.trust.os.system", ", command: touch pwned"),
    "camshaft importlib": target("camshaft.cli.importlib.import_module", ", name: antigravity"),
    "camshaft subprocess": target("camshaft.recipe.provenance.subprocess.Popen", ", args: [touch, pwned]"),
    "camshaft function": target("camshaft.recipe.trust.trust", ", folder: /"),
    "camshaft class of no use": target("camshaft.recipe.compose.Composed"),
    "prefix without a dot": target("camshaft_evil.Net"),
    "torch.nn prefix without a dot": target("torch.nnevil.Net"),
    "torchmetrics prefix": target("torchmetrics_evil.Net"),
    "dunder": target("torch.nn.Module.__init__.__globals__"),
    "dunder class": target("torch.nn.__class__"),
    "private": target("torch.nn._reduction.Net"),
    "relative": target("..os.system"),
    "spaces": target('"os .system"'),
    "colon": target('"os:system"'),
    "slash": target('"os/system"'),
    "unicode look-alike": target('"\u043es.system"'),
    "newline": target('"torch.nn.Linear\\nos.system"'),
    "nul": target('"torch.nn\\0.Linear"'),
    "empty": target('""'),
    "a single word": target("eval"),
    "a number": target("3"),
    "a list": target("[os.system]"),
    "a mapping": target("{_target_: os.system}"),
    "a long path": target(".".join(["a"] * 5000)),
    "not there": target("evil_module.Net"),
}
NESTED = {
    "in an argument": target("torch.nn.Identity", ", x: {_target_: os.system, command: touch pwned}"),
    "deep in an argument": target("torch.nn.Identity", ", x: [{y: [{_target_: subprocess.Popen, args: [ls]}]}]"),
    "callback": f"{target('camshaft.module.Module')}callbacks: {{x: {{_target_: os.system, command: ls}}}}",
    "callback of a short name": f"{target('camshaft.module.Module')}callbacks: {{checkpoint: {{_target_: os.system}}}}",
    "logger": f"{target('camshaft.module.Module')}loggers: {{x: {{_target_: subprocess.Popen, args: ls}}}}",
    "strategy": f"{target('camshaft.module.Module')}strategy: {{_target_: os.system, command: ls}}",
    "optimizer": f"{target('camshaft.module.Module')}optimizer: {{_target_: builtins.eval}}",
    "scheduler": f"{target('camshaft.module.Module')}optimizer: {{name: sgd}}\nscheduler: {{_target_: os.system}}",
    "data": f"{target('camshaft.module.Module')}data: {{_target_: os.system, command: ls}}",
    "a layer as a callback": f"{target('camshaft.module.Module')}callbacks: {{x: {{_target_: torch.nn.ReLU}}}}",
    "allow inside": f"{target('os.system')}allow: [os]",
    "trust inside": f"{target('os.system')}trust: true",
    "code elsewhere": f"{target('os.system')}code: /",
    "a target from an interpolation": target('"${name}"') + "name: os.system",
    "a target put together": "module: {_target_: '${name}.${device}'}\nname: os\ndevice: system\n",
    "a choice": f"{target('camshaft.module.Module')}choices: {{module._target_: [os.system]}}",
}
YAML = {
    "python object": "!!python/object/apply:os.system ['touch pwned']",
    "python name": "module: !!python/name:os.system ''",
    "python module": "module: !!python/module:antigravity ''",
    "own tag": "module: !evil {x: 1}",
    "tagged key": "!!python/object/apply:os.system ['ls']: 1",
    "binary": "module: !!binary aGVsbG8=",
    "billion laughs": bomb(),
    "billion laughs in maps": "a0: &a0 {x: 1}\n"
    + "\n".join(f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(10))}}}" for i in range(1, 9)),
    "merge bomb": "a0: &a0 {x: 1}\n"
    + "\n".join(f"a{i}: &a{i} {{<<: *a{i - 1}, k{i}: *a{i - 1}}}" for i in range(1, 40)),
    "self reference": "a: &a [*a]",
    "self reference in a map": "a: &a {b: *a}",
    "deep lists": "[" * 100_000,
    "deep maps": "{a: " * 100_000,
    "deep blocks": "- " * 50_000,
    "deep indents": "\n".join(f"{' ' * i}a:" for i in range(1000)),
    "many keys": "\n".join(f"k{i}: 1" for i in range(60_000)),
    "a long key": f"{'k' * 900_000}: 1",
    "a scalar of 10 MB": f"name: {'x' * 10_000_000}",
    "a scalar of 900 kB": f"name: {'x' * 900_000}",
    "a number of 900 kB": f"max_steps: {'9' * 900_000}",
    "a number of 4301 digits": f"max_steps: {'9' * 4301}",
    "nul bytes": "name: a\0b",
    "not UTF-8": b"name: \xff\xfe\xfa",
    "UTF-16": "name: x".encode("utf-16"),
    "binary file": bytes(range(256)) * 10,
    "two documents": "a: 1\n---\nb: 2\n",
    "a scalar": "just text",
    "a list": "- a\n- b\n",
    "duplicate keys": f"{target('camshaft.module.Module')}module: {{_target_: os.system}}",
}
INTERPOLATIONS = {
    "a secret": f"{target('camshaft.module.Module')}name: ${{oc.env:AWS_SECRET_ACCESS_KEY}}",
    "a secret with a default": f"{target('camshaft.module.Module')}name: ${{oc.env:AWS_SECRET_ACCESS_KEY,x}}",
    "another resolver": f"{target('camshaft.module.Module')}name: ${{oc.decode:x}}",
    "oc.create": f"{target('camshaft.module.Module')}name: ${{oc.create:x}}",
    "nested": f"{target('camshaft.module.Module')}name: ${{${{device}}}}",
    "a resolver by interpolation": f"{target('camshaft.module.Module')}name: ${{oc.${{device}}:X}}\ndevice: env",
    "a variable by interpolation": f"{target('camshaft.module.Module')}name: ${{oc.env:${{device}}}}\ndevice: HOME",
    "escapes": f"{target('camshaft.module.Module')}name: '\\\\${{oc.env:HOME}}'",
    "to itself": f"{target('camshaft.module.Module')}name: ${{name}}",
    "in a circle": f"{target('camshaft.module.Module')}name: ${{device}}\ndevice: ${{name}}",
    "a doubling": interpolation_bomb(),
    "of the whole": f"{target('camshaft.module.Module')}choices: {{a: ['${{choices}}']}}",
    "unfinished": f"{target('camshaft.module.Module')}name: '${{'",
    "unfinished many times": f"{target('camshaft.module.Module')}name: '{'${' * 20_000}'",
}
NAMES = {
    name: f"{target('camshaft.module.Module')}name: {text}"
    for name, text in {
        "up": "../../etc", "absolute": "/etc/cron.d", "hidden": ".ssh", "a slash": "a/b", "a backslash": '"a\\\\b"',
        "a nul": '"a\\0b"', "a newline": '"a\\nb"', "empty": '""', "a tilde": "~root", "long": "x" * 500,
        "dots": "..", "a device": '"con:"', "a space": '"a b"', "a control code": '"\\e[2J"',
    }.items()
}  # fmt: skip
EXTENDS = {
    "a password file": f"{target('camshaft.module.Module')}extends: /etc/passwd",
    "an absolute recipe": f"{target('camshaft.module.Module')}extends: /etc/x.yaml",
    "a home": f"{target('camshaft.module.Module')}extends: ~/x.yaml",
    "a web address": f"{target('camshaft.module.Module')}extends: https://example.com/x.yaml",
    "itself": f"{target('camshaft.module.Module')}extends: r.yaml",
    "a device": f"{target('camshaft.module.Module')}extends: ../../../../../../../dev/zero",
    "a mapping": f"{target('camshaft.module.Module')}extends: {{_target_: os.system}}",
    "a nul": f'{target("camshaft.module.Module")}extends: "x\\0.yaml"',
    "many": f"{target('camshaft.module.Module')}extends: [{', '.join(['x.yaml'] * 10_000)}]",
    "an interpolation": f"{target('camshaft.module.Module')}extends: '${{oc.env:HOME}}.yaml'",
}
SECRETS = {
    "a key by its shape": f"{target('camshaft.module.Module')}callbacks: {{x: {{_target_: a.B, v: {SECRET}}}}}",
    "a key by its name": f"{target('camshaft.module.Module')}loggers: {{x: {{_target_: a.B, api_key: hunter2hunter}}}}",
    "a variable in a hyper-parameter": target("camshaft.module.Module", ", x: '${oc.env:WANDB_API_KEY}'"),
}
LARGE = {
    name: "module:\n  _target_: torch.nn.Identity\n" + lines
    for name, lines in {
        "unknown keys": "".join(f"k{i}: 1\n" for i in range(9_000)),
        "unknown callbacks": "callbacks:\n" + "".join(f"  k{i}: {{}}\n" for i in range(6_000)),
        "intervals that are none": "callbacks:\n"
        + "".join(f"  k{i}: {{_target_: x.Y, every: x}}\n" for i in range(3_000)),
        "classes that are not there": "".join(f"  k{i}: {{_target_: torch.nn.No{i}}}\n" for i in range(4_000)),
        "classes without arguments": "".join(f"  k{i}: {{_target_: torch.nn.Linear}}\n" for i in range(4_000)),
        "arguments": "".join(f"  k{i}: 1\n" for i in range(9_000)),
        "interpolations": "".join(f"  k{i}: ${{device}}\n" for i in range(9_000)) + "device: cpu\n",
        "interpolations that lead nowhere": "".join(f"  k{i}: ${{devise}}\n" for i in range(999))
        + "".join(f"  l{i}: 1\n" for i in range(8_000)),
        "choices": "choices:\n" + "".join(f"  k{i}: [1, 2]\n" for i in range(4_000)),
    }.items()
}
GROUPS = {
    "path": PATHS, "nested": NESTED, "yaml": YAML, "interpolation": INTERPOLATIONS, "name": NAMES, "extends": EXTENDS,
    "secret": SECRETS, "large": LARGE,
}  # fmt: skip
HOSTILE = {f"{group}: {name}": text for group, cases in GROUPS.items() for name, text in cases.items()}


def test_there_are_enough_hostile_recipes():
    assert len(HOSTILE) >= 60


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_recipe_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-itself")
    text = HOSTILE[name]
    Path("r.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    before, start = set(sys.modules), time.perf_counter()
    with pytest.raises(RecipeError) as caught:
        load("r.yaml", inspect=True)
    assert time.perf_counter() - start < 2
    message = str(caught.value)
    assert "the-secret-itself" not in message
    assert SECRET not in message
    assert "hunter2" not in message
    assert len(message) < 30_000
    assert not Path("pwned").exists()
    new = {module.partition(".")[0] for module in set(sys.modules) - before}
    assert not new & {"antigravity", "evil", "pip", "code", "webbrowser", "torch"}


@pytest.mark.parametrize(
    "override",
    ["name=../x", "module._target_=os.system", "callbacks.x={_target_: os.system}", "x=!!python/name:os.system"],
)
def test_the_command_line_gets_no_further(override, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(target("camshaft.module.Module"))
    with pytest.raises(RecipeError):
        load("r.yaml", [override], inspect=True)


def test_a_file_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("/dev/zero", "/dev/stdin", ".", "missing.yaml", "x" * 10_000):
        with pytest.raises(RecipeError):
            load(path, inspect=True)


def test_an_alias_inside_the_readers_own_package_is_refused(project):
    Path("net.py").write_text("from subprocess import Popen\nimport os\nfrom os import system as Run\nThing = Popen\n")
    for name in ("Popen", "os.system", "Run", "Thing"):
        Path("r.yaml").write_text(f"{RUN}module: {{_target_: net.{name}, args: [touch, pwned]}}")
        with pytest.raises(RecipeError):
            build_module(load("r.yaml", trust=True))
    assert not Path("pwned").exists()


def test_python_beside_a_recipe_runs_only_in_a_trusted_folder(project):
    Path("net.py").write_text(
        "open('pwned', 'w').close()\nfrom camshaft.module import Module\nclass Net(Module): pass\n"
    )
    Path("r.yaml").write_text(target("net.Net"))
    recipe = load("r.yaml", inspect=True)
    for build in (build_module, build_callbacks, build_data):
        if build is build_module:
            with pytest.raises(RecipeError, match="not trusted"):
                build(recipe)
    with pytest.raises(RecipeError, match="not trusted"):
        load("r.yaml")
    assert not Path("pwned").exists()


LONE = """module: {_target_: camshaft.testing.tiny.TinyModule}
data: {_target_: camshaft.testing.tiny.TinyData}
max_epochs: 1
device: cpu
loggers: {tensorboard: null}
"""


@pytest.mark.parametrize(
    "more",
    [
        "loggers.jsonl.filename=../../../victim", "loggers.jsonl.filename=PLACE/victim",
        "loggers.csv.filename=../../../victim", 'loggers.jsonl.filename=".."',
        "callbacks.digest.path=PLACE/victim", "callbacks.digest.path=victim",
    ],
)  # fmt: skip
def test_a_file_of_the_reader_is_not_written_to(more, tmp_path, monkeypatch):
    from camshaft import fit

    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(LONE)
    Path("victim").write_text("alias ls='ls --color'\n")
    with pytest.raises(CamshaftError):
        fit.main(["r.yaml", more.replace("PLACE", str(tmp_path))])
    assert Path("victim").read_text() == "alias ls='ls --color'\n"


def test_what_would_steer_a_terminal_is_written_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(f'{target("camshaft.module.Module")}"\\e[2J\\e]0;title\\a": 1\n"\\u202ered": 2\n')
    with pytest.raises(RecipeError) as caught:
        load("r.yaml", inspect=True)
    message = str(caught.value)
    assert "\x1b" not in message
    assert "\\x1b[2J\\x1b]0;title\\x07 is not a key of a recipe." in message
    assert "\\u202ered is not a key of a recipe." in message


def test_a_hostile_recipe_ends_the_command_with_code_2(tmp_path):
    (tmp_path / "r.yaml").write_text(target("os.system", ", command: touch pwned"))
    done = subprocess.run(
        [sys.executable, "-m", "camshaft.check", "r.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "pwned").exists()
