"""Say what a checkpoint needs to know of the other ranks."""

from __future__ import annotations

from typing import Protocol


class Peers(Protocol):
    """The ranks that save together. Every ``Strategy`` is one."""

    @property
    def rank(self) -> int:
        """Number this process, from 0."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes what exists once; true on exactly one rank."""

    def gather_objects(self, value: object) -> list[object]:
        """Return every rank's ``value`` in rank order, on every rank. All ranks call it."""


class Alone:
    """One process without peers: for tools, and for a save after the peers may be gone."""

    rank = 0
    world_size = 1
    is_main = True

    def gather_objects(self, value: object) -> list[object]:
        """Return ``[value]``."""
        return [value]
