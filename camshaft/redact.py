"""Keep secrets out of what is written: know them by name or shape, and blank them."""

from __future__ import annotations

import os
import re
from typing import Any

HIDDEN = "***"
_NAME = re.compile(
    r"(^|_)(API_?KEY|ACCESS_?KEY|SECRET|SECRETS|PASSWORD|PASSWD|CREDENTIALS?|(AUTH|ACCESS|API|HF|BOT|GITHUB)_TOKEN|DSN)(_|$)",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS?|AUTH|DSN)S?(_|$)", re.IGNORECASE)
_SHAPES = re.compile(
    r"sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}"
    r"|AKIA[A-Z0-9]{12,}|xox[abps]-[A-Za-z0-9-]{10,}|glpat-[A-Za-z0-9_-]{12,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)
_ASSIGNED = re.compile(r"\b([\w.-]{1,100})(\s*[=:]\s*)(['\"]?)([^\s'\"]{6,})\3")
_LOGIN = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


def is_secret_argument(name: str) -> bool:
    """Say whether an argument of that name holds a secret."""
    return bool(_NAME.search(name))


def is_secret_variable(name: str) -> bool:
    """Say whether an environment variable of that name holds a secret."""
    return bool(_VARIABLE.search(name))


def looks_secret(value: Any) -> bool:
    """Say whether a text has the shape of a known kind of key."""
    return isinstance(value, str) and bool(_SHAPES.search(value))


def redact(text: str) -> str:
    """Blank the secrets of this process's environment, known shapes of keys, and passwords in text."""
    for name, value in os.environ.items():
        if len(value) >= 8 and is_secret_variable(name) and value in text:
            text = text.replace(value, HIDDEN)
    text = _SHAPES.sub(HIDDEN, text)
    text = _LOGIN.sub(HIDDEN, text)
    return _ASSIGNED.sub(_blank, text)


def _blank(match: re.Match[str]) -> str:
    """Blank what is assigned to the name of a secret; a tokenizer, and the number of tokens, are none."""
    name, sign, quote, _ = match.groups()
    last = name.rpartition(".")[2].replace("-", "_")
    is_secret = is_secret_argument(last) or last.lower() == "token" or (last.isupper() and is_secret_variable(last))
    return f"{name}{sign}{quote}{HIDDEN}{quote}" if is_secret else match.group(0)
