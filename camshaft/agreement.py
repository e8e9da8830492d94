"""Let all ranks act on a request at the same boundary, without blocking a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from camshaft.state import State

STOP, SAVE, VALIDATE, URGENT = 1, 2, 4, 8


def exchange(state: State, count: int) -> int:
    """Send this rank's requests along and return what all ranks act on now, as bits.

    Every rank calls this equally often; ``count`` is the same on all and says when an exchange ends.
    What was brought stays in ``state.control.agreed`` until it is acted on.
    """
    control = state.control
    if state.strategy.world_size == 1:
        return asked(state, everywhere=False)
    due = count % state.limits.agree_every == 0
    control.agreed |= state.strategy.agree(asked(state, everywhere=False), due=due)
    return control.agreed | asked(state, everywhere=True)


def asked(state: State, *, everywhere: bool) -> int:
    """Return the bits of the requests of this rank: all of them, or those that every rank makes alike."""
    control = state.control
    bits = 0
    for bit, request in ((STOP, control.stopping), (SAVE, control.saving), (VALIDATE, control.validating)):
        if request is not None and (request.everywhere or not everywhere):
            bits |= bit | (URGENT if request.urgent else 0)
    return bits
