"""Let all ranks act on a request at the same boundary, without blocking a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from camshaft.state import State

STOP, SAVE, VALIDATE, URGENT, FLYING = 1, 2, 4, 8, 16


def exchange(state: State, count: int) -> int:
    """Send this rank's requests along and return what all ranks act on now, as bits.

    Every rank calls this equally often; ``count`` is the same on all and says when an exchange ends.
    What was brought stays in ``state.control.agreed`` until it is acted on.
    """
    control = state.control
    if state.strategy.world_size == 1:
        return asked(state, everywhere=False) if control.stopping or control.saving or control.validating else 0
    due = count % state.limits.agree_every == 0
    flying = FLYING if state.flight is not None and state.store.in_flight else 0
    brought = state.strategy.agree(asked(state, everywhere=False) | flying, due=due)
    if due:
        # Two exchanges without the bit: the first may have begun before the flight did.
        control.landed = 0 if brought & FLYING or state.flight is None else control.landed + 1
    control.agreed |= brought & ~FLYING
    return control.agreed | asked(state, everywhere=True)


def has_landed(state: State) -> bool:
    """Say, alike on every rank, whether the checkpoint in flight is written on all of them."""
    if state.flight is None:
        return False
    if state.strategy.world_size == 1:
        return not state.store.in_flight
    return state.control.landed > 2


def asked(state: State, *, everywhere: bool) -> int:
    """Return the bits of the requests of this rank: all of them, or those that every rank makes alike."""
    control = state.control
    bits = 0
    for bit, request in ((STOP, control.stopping), (SAVE, control.saving), (VALIDATE, control.validating)):
        if request is not None and (request.everywhere or not everywhere):
            bits |= bit | (URGENT if request.urgent else 0)
    return bits
