"""Let data that keeps a state of its own go on from it, where other data is read again up to its position."""

from __future__ import annotations

import copy
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from camshaft.streams import HostStreams, OwnStreams, streams_to_json


@runtime_checkable
class Stateful(Protocol):
    """Data that can say, as plain JSON data, where it stands, and go on from there when it is iterated next."""

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class StreamState:
    """Where a stream stands: how many batches all ranks had of its epoch, and its own state if it has one.

    The state is that before the newest round of batches, for one round may be read ahead of the training.

    Attributes:
        owner: the part of the stream that has a state this process can ask for: the loader itself, or the
            dataset of a DataLoader without workers; None when there is none.
    """

    def __init__(self, loader: Any) -> None:
        self.owner = _owner(loader)
        self._noted: tuple[int, dict[str, Any], HostStreams | None] | None = None
        self._saved: dict[str, Any] | None = None
        # Of the run that was saved, other ranks than here may have had a part of what is a round here.
        self._part = 0

    def note(self, batches: int, streams: OwnStreams | None) -> None:
        """Remember the state after so many batches of the epoch, and the streams the data draws from."""
        if self.owner is not None:
            self._noted = (batches, copy.deepcopy(self.owner.state_dict()), None if streams is None else streams.state)

    def save(self, batches: int) -> dict[str, Any]:
        """Return where the stream stands after so many batches of the running epoch."""
        data = streams = None
        if self.owner is not None and batches == 0:
            data = copy.deepcopy(self.owner.state_dict())
        elif self._noted is not None and self._noted[0] == batches:
            _, data, drawn = self._noted
            streams = None if drawn is None else streams_to_json(drawn)
        return {"batches": batches + self._part if batches else 0, "data": data, "streams": streams}

    def load(self, saved: dict[str, Any] | None) -> None:
        """Keep what ``save`` returned for the next epoch that begins."""
        self._saved = saved

    def begin(self, batches: int) -> tuple[int, dict[str, Any] | None]:
        """Give the data its state back for an epoch that goes on after ``batches``.

        Returns how many batches are still to be read and dropped, and the streams that the data then draws from,
        when they are not those of the epoch's start.
        """
        saved, self._saved = self._saved, None
        self._part = saved["batches"] - batches if saved is not None else 0
        if saved is None or saved["data"] is None or self.owner is None:
            return batches + self._part, None
        self.owner.load_state_dict(saved["data"])
        return 0, saved["streams"]


def _owner(loader: Any) -> Stateful | None:
    if isinstance(loader, DataLoader):
        # Workers have copies of the dataset, and of what is no stream only its order decides what comes next.
        is_stream = isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0
        return loader.dataset if is_stream and isinstance(loader.dataset, Stateful) else None
    return loader if isinstance(loader, Stateful) else None
