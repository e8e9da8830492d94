"""Dispatch commands, read what they share, and turn errors into exit codes.

Exit codes: 0 done, 2 wrong input (nothing was trained), 1 failed while training, 130 interrupted,
143 terminated.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camshaft.errors import CamshaftError
from camshaft.worker import end, follow_launcher, report_error, report_exit

if TYPE_CHECKING:
    from camshaft.recipe import Recipe

COMMANDS = {
    "fit": "train what a recipe describes",
    "validate": "measure a checkpoint on the validation split",
    "test": "measure a checkpoint on the test split",
    "predict": "write a checkpoint's predictions to files",
    "check": "find every mistake in a recipe, without starting anything",
    "show": "print a resolved recipe and where each value came from",
    "init": "write a starter project that trains and passes its test",
    "runs": "list runs; 'runs diff A B' compares two",
    "schema": "print the JSON schema of recipes, for editors",
    "export": "write the weights of a checkpoint for use elsewhere",
    "verify_resume": "prove that a resumed run equals an uninterrupted one",
    "completion": "print completion for bash, zsh or fish",
}
EXIT_OK, EXIT_FAILED, EXIT_INPUT = 0, 1, 2
EXIT_INTERRUPTED, EXIT_TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``camshaft COMMAND ...`` and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return EXIT_OK if arguments else EXIT_INPUT
    if arguments[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"camshaft {version('camshaft')}")
        return EXIT_OK
    name = arguments[0].replace("-", "_")
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "'camshaft --help' lists them."
        print(f"camshaft: {arguments[0]!r} is not a command. {hint}", file=sys.stderr)
        return EXIT_INPUT
    return guard(_command(name), arguments[1:])


def _command(name: str) -> Callable[[Sequence[str] | None], int]:
    command: Callable[[Sequence[str] | None], int] = importlib.import_module(f"camshaft.{name}").main
    return command


def guard(command: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """Run a command; print errors that users can act on without a traceback, and return an exit code.

    An error with ``during_training`` set ended a run that had begun; others are wrong input.
    """
    follow_launcher()
    try:
        return command(argv)
    except CamshaftError as error:
        code = EXIT_FAILED if getattr(error, "during_training", False) else EXIT_INPUT
        if not report_error(error, code):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return code
    except SystemExit as leaving:
        # Code of the user's that ends a rank: its peers, who lose it, must not seem to have failed first.
        if not isinstance(leaving.code, int) or not report_exit(leaving.code):
            raise
        return leaving.code
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe, such as head, has what it wanted; the interpreter must not flush into it again.
        sys.stdout = None
        return EXIT_OK
    except Exception as error:
        if not report_error(error, EXIT_FAILED):
            raise
        return EXIT_FAILED


def say(text: str) -> None:
    """Print what the user asked for."""
    print(text)


class _Parser(argparse.ArgumentParser):
    """Take options between recipes and overrides, as people type them."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, wherever the options stand."""
        return self.parse_intermixed_args(args, namespace)


def recipe_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser for a command that takes recipes and overrides."""
    parser = _Parser(
        prog=f"camshaft {name}",
        usage=f"camshaft {name} [options] recipe.yaml [more.yaml ...] [path=value ...]",
        description=description,
        epilog="Overrides: a.b=c sets, +a.b=c adds, ~a.b removes. Later recipes win over earlier ones.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="+", help="recipe files, then overrides such as optimizer.lr=1e-3")
    parser.add_argument("--allow", action="append", default=[], metavar="NAME", help="package, or env:NAME, it may use")
    parser.add_argument("--trust", action="store_true", help="trust the Python beside the recipe from now on")
    parser.add_argument(
        "--accelerate-config",
        metavar="FILE",
        help="take processes and strategy from a file of 'accelerate config', or from 'default', where it writes",
    )
    return parser


def read_recipe(arguments: argparse.Namespace, *, inspect: bool = False) -> Recipe:
    """Load the recipe that a command line names.

    Raises:
        RecipeError: the recipe has mistakes.
    """
    from camshaft.recipe import load

    files, overrides = split(arguments.recipe)
    if getattr(arguments, "accelerate_config", None) is not None:
        from camshaft.launchfile import overrides_of

        said = load(files, overrides, allow=arguments.allow, inspect=True)
        overrides = [*overrides, *overrides_of(arguments.accelerate_config, said)]
    return load(files, overrides, allow=arguments.allow, trust=arguments.trust, inspect=inspect)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell recipe files from overrides."""
    files: list[str] = []
    overrides: list[str] = []
    for word in words:
        is_override = word.startswith(("+", "~")) or ("=" in word and not Path(word).is_file())
        (overrides if is_override else files).append(word)
    return files, overrides


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: camshaft COMMAND [recipe.yaml ...] [path=value ...] [--help]",
            "",
            *lines,
            "",
            "Every command is also python -m camshaft.COMMAND.",
            "Exit codes: 0 done, 2 wrong input, 1 failed while training, 130 interrupted, 143 terminated.",
        ]
    )


if __name__ == "__main__":
    end(main())
