"""Promises: which refused calls were told to come back, to whichever router they come.

Owns what this router tells the others of its bookings, what it knows of theirs, and the claims between them:
a call that was refused here and comes back elsewhere is let in there, and what was kept for it here goes
after it (see `bookings`, `leases`). Scopes are tenants, for their limits, and the line, for a place. Lives on
the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from core.clock import Clock
from router.limits import PromisedCall

# bookings are told to the others before those that were refused come back
_TOLD_AHEAD_S = 2.0
_MAX_TOLD = 2000
# what is told of another's bookings is up to two rounds old, so they seem due that much later than they are
_EARLY_S = 0.6

PLACE = ""
"""The scope of places in the line; no tenant's name is empty."""


class Promisor(Protocol):
    """Who keeps something for calls that were told to come back."""

    def due_by(self, at: float) -> Iterable[tuple[int, float]]:
        """(call, when) of those that are to come by then."""
        ...

    def hand_over(self, call: int, now: float) -> None:
        """It came to another router: leave what was kept for it."""
        ...


class Promises:
    """One per router."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._promisors: dict[str, Promisor] = {}
        self._elsewhere: dict[tuple[str, int], list[float]] = {}
        self._claims: list[PromisedCall] = []

    def watch(self, scope: str, promisor: Promisor) -> None:
        """From now on what `promisor` keeps is told to the others."""
        self._promisors[scope] = promisor

    def try_claim(self, scope: str, call: int) -> bool:
        """Whether another router told this call to come by now; that one is told that it came here."""
        due = self._elsewhere.get((scope, call))
        if not due or due[0] > self._clock.now() + _EARLY_S:
            return False
        due.pop(0)
        self._claims.append(PromisedCall(scope, call, 0.0))
        return True

    def told(self) -> tuple[PromisedCall, ...]:
        """What this router keeps for calls that come soon."""
        now = self._clock.now()
        found: list[PromisedCall] = []
        for scope, promisor in self._promisors.items():
            for call, due_at in promisor.due_by(now + _TOLD_AHEAD_S):
                found.append(PromisedCall(scope, call, due_at - now))
                if len(found) == _MAX_TOLD:
                    return tuple(found)
        return tuple(found)

    def take_claims(self) -> tuple[PromisedCall, ...]:
        """Calls that came here and not to whoever told them to; each once."""
        claims, self._claims = tuple(self._claims), []
        return claims

    def hear(self, elsewhere: Iterable[PromisedCall], claimed: Iterable[PromisedCall]) -> bool:
        """What the others keep now, and which calls they were that came to them instead of here; whether
        there are any of these.
        """
        now = self._clock.now()
        known: dict[tuple[str, int], list[float]] = {}
        for promise in elsewhere:
            known.setdefault((promise.scope, promise.call), []).append(now + promise.due_in_s)
        # what was claimed in the meantime is not known to be claimed there yet
        for key, num in Counter((claim.scope, claim.call) for claim in self._claims).items():
            del known.get(key, [])[:num]
        self._elsewhere = {key: sorted(due) for key, due in known.items()}
        has_any = False
        for claim in claimed:
            promisor = self._promisors.get(claim.scope)
            if promisor is not None:
                promisor.hand_over(claim.call, now)
                has_any = True
        return has_any
