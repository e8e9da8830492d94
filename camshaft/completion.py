"""Print shell completion for commands, recipes and the keys of a recipe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from camshaft.cli import COMMANDS, say

_BASH = """_camshaft() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    else
        COMPREPLY=($(compgen -f -X '!*.yaml' -- "$word") $(compgen -f -X '!*.yml' -- "$word")
            $(compgen -d -- "$word") $(compgen -W "{keys}" -- "$word"))
        [[ ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
    fi
}}
complete -F _camshaft camshaft
"""
_ZSH = """#compdef camshaft
_camshaft() {{
    if (( CURRENT == 2 )); then
        compadd {commands}
    else
        _files -g '*.(yaml|yml)'
        compadd -S '' -- {keys}
    fi
}}
compdef _camshaft camshaft
"""
_FISH = """complete -c camshaft -f -n __fish_use_subcommand -a '{commands}'
complete -c camshaft -n 'not __fish_use_subcommand' -a '{keys}'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the completion script of a shell."""
    from camshaft.recipe.settings import Settings, fields

    parser = argparse.ArgumentParser(
        prog="camshaft completion", description='Print shell completion: eval "$(camshaft completion bash)".'
    )
    parser.add_argument("shell", choices=sorted(_SCRIPTS))
    script = _SCRIPTS[parser.parse_args(argv).shell]
    say(script.format(commands=" ".join(COMMANDS), keys=" ".join(f"{key}=" for key in fields(Settings))))
    return 0
