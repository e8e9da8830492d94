"""Measure a checkpoint on the validation split: ``python -m camshaft.validate recipe.yaml --checkpoint best``."""

from __future__ import annotations

from collections.abc import Sequence

from camshaft.cli import guard
from camshaft.evaluate import evaluate
from camshaft.worker import end


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and return the exit code."""
    return evaluate("validate", "Measure a checkpoint on the validation split.", argv)


if __name__ == "__main__":
    end(guard(main))
