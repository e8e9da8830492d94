"""Record the events of a run in the order they fire."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from camshaft.callback import EVENTS, Callback
from camshaft.state import State


class Recorder(Callback):
    """Keep (event, ``progress.step`` when it fired) for every event, in ``events``.

    ``only`` keeps some events and drops the rest. Several recorders that share a list through ``into``
    show the order of callbacks; ``label`` then says which of them heard an event: "label.on_step".
    ``state`` is the run's state, from ``on_fit_start`` or ``on_restore`` on.
    """

    def __init__(
        self, *, only: Collection[str] = EVENTS, into: list[tuple[str, int]] | None = None, label: str = ""
    ) -> None:
        self.events: list[tuple[str, int]] = [] if into is None else into
        self.state: State | None = None
        self._only = frozenset(only)
        self._prefix = f"{label}." if label else ""

    @property
    def names(self) -> list[str]:
        """The events without their steps."""
        return [event for event, _ in self.events]

    def record(self, event: str, subject: object) -> None:
        """Add an event; ``subject`` is the first argument of its hook."""
        if isinstance(subject, State):
            self.state = subject
        if event in self._only:
            step = self.state.progress.step if self.state is not None else 0
            self.events.append((self._prefix + event, step))


def _recording(event: str) -> Callable[..., None]:
    def hook(self: Recorder, subject: Any, *_rest: Any) -> None:
        self.record(event, subject)

    hook.__name__ = event
    return hook


for _event in EVENTS:
    setattr(Recorder, _event, _recording(_event))
