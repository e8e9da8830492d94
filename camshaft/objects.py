"""Compute torchmetrics objects that a module logged by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from camshaft.errors import MetricError


def compute_all(objects: Mapping[str, Any]) -> dict[str, float]:
    """Compute every metric object, or collection, over what it saw on all ranks, and reset it.

    One that was logged under several names is computed once. All ranks call this together.
    """
    values: dict[str, float] = {}
    results: dict[int, Any] = {}
    for name, metric in sorted(objects.items()):
        if id(metric) not in results:
            results[id(metric)] = metric.compute()
            metric.reset()
        result = results[id(metric)]
        if isinstance(result, dict):
            values |= {f"{name}/{key}": _scalar(key, value) for key, value in result.items()}
        else:
            values[name] = _scalar(name, result)
    return values


def require_own_object(objects: Mapping[str, Any], name: str, metric: Any, loader: str) -> None:
    """Refuse one metric object for several loaders; ``loader`` is the ending of this loader's names.

    Raises:
        MetricError: it was logged for another loader before.
    """
    if loader and any(known is metric and not other.endswith(loader) for other, known in objects.items()):
        raise MetricError(
            f"{name!r} is one metric object that several loaders log.",
            why="It would mix them, and give one value under every loader's name.",
            fix="Keep one metric for each loader, such as self.accuracies[dataloader_idx] of a torch.nn.ModuleList.",
        )


def _scalar(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise MetricError(
            f"{name!r} computed a tensor of shape {tuple(value.shape)}.",
            why="A logged value is one number.",
            fix="Give the metric average='macro' or 'micro', or log each entry under its own name.",
        )
    return float(value)
