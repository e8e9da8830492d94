"""Let data that keeps a state of its own go on from it, where other data is read again up to its position."""

from __future__ import annotations

import copy
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from camshaft.streams import OwnStreams


@runtime_checkable
class Stateful(Protocol):
    """Data that can say, as plain JSON data, where it stands, and go on from there when it is iterated next."""

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class StreamState:
    """What a stream was like before its newest round of batches: one round may be read ahead of the training.

    Attributes:
        owner: the part of the stream that has a state this process can ask for: the loader itself, or the
            dataset of a DataLoader without workers; None when there is none.
    """

    def __init__(self, loader: Any) -> None:
        self.owner = _owner(loader)
        self._noted: tuple[int, dict[str, Any], dict[str, Any] | None] | None = None
        self._saved: dict[str, Any] | None = None

    def note(self, batches: int, streams: OwnStreams | None) -> None:
        """Remember the state after so many batches of the epoch, and the streams the data draws from."""
        if self.owner is not None:
            self._noted = (batches, copy.deepcopy(self.owner.state_dict()), None if streams is None else streams.save())

    def save(self, batches: int) -> dict[str, Any] | None:
        """Return the state after so many batches of the running epoch; None when the stream has none."""
        if self.owner is None:
            return None
        if batches == 0:
            return {"batches": 0, "data": copy.deepcopy(self.owner.state_dict()), "streams": None}
        if self._noted is None or self._noted[0] != batches:
            return None
        return {"batches": batches, "data": self._noted[1], "streams": self._noted[2]}

    def load(self, saved: dict[str, Any] | None) -> None:
        """Keep what ``save`` returned for the next epoch that begins."""
        self._saved = saved if self.owner is not None else None

    def begin(self) -> tuple[int, dict[str, Any] | None]:
        """Give the data its state back for an epoch that goes on.

        Returns how many batches it is past by that, and the streams it had; 0 and None when there is no state.
        """
        saved, self._saved = self._saved, None
        if saved is None or self.owner is None:
            return 0, None
        self.owner.load_state_dict(saved["data"])
        return saved["batches"], saved["streams"]


def _owner(loader: Any) -> Stateful | None:
    if isinstance(loader, DataLoader):
        # Workers have copies of the dataset, and of what is no stream only its order decides what comes next.
        is_stream = isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0
        return loader.dataset if is_stream and isinstance(loader.dataset, Stateful) else None
    return loader if isinstance(loader, Stateful) else None
