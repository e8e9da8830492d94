"""Write a checkpoint's predictions to files: ``python -m camshaft.predict recipe.yaml --checkpoint best``."""

from __future__ import annotations

from collections.abc import Sequence

from camshaft.cli import guard
from camshaft.evaluate import evaluate
from camshaft.worker import end


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and return the exit code."""
    return evaluate("predict", "Write a checkpoint's predictions to files.", argv)


if __name__ == "__main__":
    end(guard(main))
