import subprocess
import sys

import pytest

from camshaft.cli import COMMANDS, guard, main, split
from camshaft.errors import ModuleError, RecipeError

GOOD = "module: {_target_: net.Net}\nmax_epochs: 1\n"


def run(*words, cwd=None):
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=120, cwd=cwd)


def test_help_fits_a_screen_and_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 100
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_fits_a_screen(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 24
    assert text.startswith(f"usage: camshaft {command} ")


def test_no_command_and_a_wrong_one_are_wrong_input(capsys):
    assert main([]) == 2
    assert main(["chekc"]) == 2
    assert capsys.readouterr().err == "camshaft: 'chekc' is not a command. Did you mean 'check'?\n"


def test_exit_codes_tell_what_happened(capsys):
    def raising(error):
        def command(argv):
            raise error

        return command

    late = RecipeError("late.")
    late.during_training = True
    assert guard(lambda argv: 0) == 0
    assert guard(raising(RecipeError("early.", fix="Do this."))) == 2
    assert guard(raising(ModuleError("early."))) == 2
    assert guard(raising(late)) == 1
    assert guard(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == (
        "RecipeError: early.\n  Do this.\nModuleError: early.\nRecipeError: late.\nInterrupted.\n"
    )
    with pytest.raises(ZeroDivisionError):
        guard(raising(ZeroDivisionError()))


def test_check_says_yes_or_everything_that_is_wrong(project):
    (project / "r.yaml").write_text(GOOD)
    done = run("camshaft.check", "r.yaml")
    assert done.returncode == 0
    assert done.stdout == (
        "r.yaml: no mistakes (1 file, 0 overrides).\n"
        f"It runs Python from {project}, which is not trusted yet: fit asks, or takes --trust.\n"
    )
    done = run("camshaft.cli", "check", "r.yaml", "max_epoch=3", "module.hiden=1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "RecipeError: r.yaml has 2 mistakes.\n"
        "command line: max_epoch=3: max_epoch is not a key of a recipe.\n"
        "  It would be ignored. Did you mean 'max_epochs'?\n"
        "command line: module.hiden=1: module.hiden is not an argument of net.Net.\n"
        "  It would be ignored and hidden would stay 8. Did you mean 'hidden'?\n"
    )


def test_files_and_overrides_may_be_mixed(project):
    (project / "a=b.yaml").write_text(GOOD)
    assert split(["x.yaml", "a=b.yaml", "a.b=c", "+n=1", "~g", "y.yaml"]) == (
        ["x.yaml", "a=b.yaml", "y.yaml"],
        ["a.b=c", "+n=1", "~g"],
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_the_commands_and_keys(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)
    assert "max_epochs=" in text
    assert "{{" not in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [("camshaft che", "check"), ("camshaft fit max_ep", "max_epochs="), ("camshaft fit rec", "recipe.yaml")],
)
def test_bash_completes_commands_keys_and_recipes(words, expected, tmp_path):
    (tmp_path / "recipe.yaml").write_text("")
    (tmp_path / "record.txt").write_text("")
    script = run("camshaft.cli", "completion", "bash").stdout
    place = len(words.split()) - 1
    code = f"{script}\nCOMP_WORDS=({words}); COMP_CWORD={place}; _camshaft; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=30, cwd=tmp_path)
    assert done.stdout.strip() == expected


def test_the_command_line_does_not_import_torch():
    code = "import sys, camshaft.cli, camshaft.recipe; print('torch' in sys.modules, 'omegaconf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False False"
