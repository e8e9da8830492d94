"""What the README and the pages under docs say is true: code runs, recipes are right, links and commands exist."""

import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from camshaft.callback import EVENTS
from camshaft.cli import COMMANDS
from camshaft.recipe import load
from camshaft.recipe.registry import CALLBACKS, LOGGERS
from camshaft.recipe.source import parse

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language):
    """Return (page and number, text) of every block of a language."""
    block = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [
        pytest.param(text, id=f"{page.name}-{number}")
        for page in PAGES
        for number, text in enumerate(block.findall(page.read_text()), 1)
    ]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "block", "exec"), {"__name__": "block"})


@pytest.mark.parametrize("text", blocks("yaml"))
def test_recipes_are_right(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Alternatives of one key are shown under each other: the last stands for them.
    text = re.sub(r"^(\w+:) .*\n(?=\1 )", "", text, flags=re.MULTILINE)
    data = parse(text, "block").data
    if "module" not in data and set(data) <= {
        "callbacks",
        "checkpoint",
        "validate",
        "strategy",
        "precision",
        "loggers",
    }:
        # A part of a recipe, shown alone: it is right in any.
        text += "module: {_target_: digits.DigitsMLP}\ndata: {_target_: digits.Digits}\n"
        text += "optimizer: {name: adamw}\nmax_epochs: 10\n"
    if "digits." in text:
        (tmp_path / "digits.py").write_text((ROOT / "recipes" / "digits.py").read_text())
        Path("block.yaml").write_text(text)
        for name in set(re.findall(r"_target_: (my_\w+)\.", text)):
            # The person's own file is what the page shows.
            Path(f"{name}.py").write_text("\n\n".join(block.values[0] for block in blocks("python")))
        load("block.yaml", inspect=True)


def heading(line):
    """Return the anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            anchors = {heading(line) for line in linked.read_text().splitlines() if line.startswith("#")}
            assert anchor in anchors, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_of_the_project_exist(page):
    # What a fenced block without a language shows is printed by a program, of whatever project.
    fenced = re.compile(r"^```(\w*)\n.*?^```", re.MULTILINE | re.DOTALL)
    text = fenced.sub(lambda block: block[0] if block[1] else "", page.read_text())
    for name in re.findall(r"\b((?:recipes|docs|benchmarks|tests)/[\w./-]+\.(?:yaml|py|md))\b", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    for name in set(re.findall(r"python -m (camshaft\.\w+)", page.read_text())):
        assert importlib.util.find_spec(name), name


def test_every_command_has_a_module_with_a_main():
    for name in COMMANDS:
        assert callable(importlib.import_module(f"camshaft.{name}").main), name


def test_the_set_up_commands_are_the_two_that_the_project_promises():
    text = (ROOT / "README.md").read_text()
    commands = [line.strip() for line in text.splitlines() if "pip install" in line]
    assert commands == [
        "pip install -c constraints.txt -e '.[recipes]' && python -m camshaft.fit recipes/digits.yaml",
        "pip install -c constraints.txt -e '.[test]' && pytest",
    ]


def test_help_lists_every_command():
    done = subprocess.run([sys.executable, "-m", "camshaft.cli", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert all(re.search(rf"^  {name} ", done.stdout, re.MULTILINE) for name in COMMANDS)


def test_the_names_of_events_in_the_documentation_exist():
    for page in PAGES:
        found = set(re.findall(r"`(on_[a-z_]+)(?:\(|`)", page.read_text()))
        assert found - {"on_error"} <= set(EVENTS), page.name


def row(name, target):
    """Return the row of a class in docs/callbacks.md: its short name, what it does, and its arguments."""
    module, _, attribute = target.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    arguments = []
    for parameter in inspect.signature(found).parameters.values():
        value = parameter.default
        shown = value if isinstance(value, str) else "[]" if value == () else json.dumps(value, default=str)
        arguments.append(f"`{parameter.name}`" if value is parameter.empty else f"`{parameter.name}: {shown}`")
    first = inspect.getdoc(found).partition("\n")[0].replace("``", "`")
    return f"| `{name}` | {first} | {', '.join(arguments)} |"


@pytest.mark.parametrize(("name", "target"), [*CALLBACKS.items(), *LOGGERS.items()])
def test_every_callback_and_logger_has_its_row(name, target):
    assert row(name, target) in (ROOT / "docs" / "callbacks.md").read_text().splitlines()
