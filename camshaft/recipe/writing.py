"""Write resolved recipes as YAML."""

from __future__ import annotations

from typing import Any

import yaml

from camshaft.recipe.source import is_text


class _Dumper(yaml.SafeDumper):
    """Indent lists below their key, and never write aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write every value out."""
        del data
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    # The dumper leaves bare what YAML 1.1 takes for text, such as 1e3; a recipe reads that as a number.
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if is_text(value) else "'")


_Dumper.add_representer(str, _text)


def to_yaml(data: Any) -> str:
    """Write plain data so that reading it gives the same data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read_plain(text: str) -> Any:
    """Read what ``to_yaml`` wrote as plain data, without checking it."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - a safe loader
