"""Who may read which blocks, and until when?

A lease pins the blocks of one query.  Its token is redeemed once by each rank of the instance that
asked; the pins end when every rank has redeemed and finished, when the owner releases it or goes
away, or when its time is over, but never while a redemption is still being carried out.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

import attrs
import numpy as np
from numpy.typing import NDArray

from pegaflow.errors import LeaseExpired
from pegaflow.model.keys import InstanceId, LeaseToken, SessionId
from pegaflow.policy.index import Shelf


@attrs.define(eq=False)
class Lease:
    """Rows of one shelf, held for one instance."""

    token: LeaseToken
    owner: SessionId
    instance: InstanceId
    shelf: Shelf
    rows: NDArray[np.int64]
    """One a position of the query, in prefix order."""
    pinned: NDArray[np.int64]
    """The same rows, each once: what is unpinned at the end."""
    ranks: int
    expires: float
    redeemed: set[int] = attrs.field(factory=set)
    reading: int = 0
    """Redemptions that are being carried out."""
    live: bool = True
    """In the table: can still be redeemed, renewed and released."""


@attrs.define(eq=False)
class Leases:
    """The table of live leases.  ``unpin`` is asked exactly once for each lease that was added."""

    ttl_s: float
    _by_token: dict[LeaseToken, Lease] = attrs.field(factory=dict, init=False)
    _by_owner: dict[SessionId, dict[LeaseToken, None]] = attrs.field(factory=dict, init=False)
    _by_expiry: list[tuple[float, int, LeaseToken]] = attrs.field(factory=list, init=False)
    """A heap; an entry may be early (after a renewal) or stale, and is looked at again then."""
    _sequence: int = attrs.field(default=0, init=False)
    _ended_reading: dict[int, Lease] = attrs.field(factory=dict, init=False)
    """Out of the table, but a redemption still reads: id -> lease."""

    def __len__(self) -> int:
        """Live leases."""
        return len(self._by_token)

    def __iter__(self) -> Iterator[Lease]:
        """Leases that hold pins, oldest first."""
        yield from self._by_token.values()
        yield from self._ended_reading.values()

    def add(self, lease: Lease) -> None:
        """Start a lease whose blocks the caller has pinned.  The token is new."""
        assert lease.token not in self._by_token, "a lease token was drawn twice"
        self._by_token[lease.token] = lease
        self._by_owner.setdefault(lease.owner, {})[lease.token] = None
        self._push(lease)

    def redeem(self, token: LeaseToken, instance: InstanceId, rank: int, now: float) -> Lease:
        """Begin rank's only reading; :meth:`finish` must follow.  Raises :exc:`LeaseExpired`."""
        lease = self.peek(token, instance, now)
        if rank in lease.redeemed:
            raise LeaseExpired(f"rank {rank} has redeemed this lease already")
        lease.redeemed.add(rank)
        lease.reading += 1
        return lease

    def peek(self, token: LeaseToken, instance: InstanceId, now: float) -> Lease:
        """The live lease, without redeeming it.  Raises :exc:`LeaseExpired`."""
        lease = self._by_token.get(token)
        if lease is None or lease.expires <= now:
            raise LeaseExpired("the lease is unknown, used up, released or expired: recompute")
        if lease.instance != instance:
            raise LeaseExpired(f"the lease was given to another instance than {instance!r}")
        return lease

    def finish(self, lease: Lease) -> Lease | None:
        """End one reading.  Returns the lease when its pins end with it."""
        assert lease.reading > 0
        lease.reading -= 1
        if lease.live and len(lease.redeemed) >= lease.ranks and not lease.reading:
            self._forget(lease)
            return lease
        if not lease.live and not lease.reading:
            del self._ended_reading[id(lease)]
            return lease
        return None

    def renew(self, token: LeaseToken, owner: SessionId, now: float) -> Lease:
        """Start its time anew.  Raises :exc:`LeaseExpired` also for another owner's lease."""
        lease = self._by_token.get(token)
        if lease is None or lease.expires <= now or lease.owner != owner:
            raise LeaseExpired("the lease is unknown, used up, released, expired or not yours")
        lease.expires = now + self.ttl_s
        return lease

    def release(self, token: LeaseToken, owner: SessionId) -> tuple[bool, Lease | None]:
        """End it early: (was it there and the owner's, the lease if its pins end now)."""
        lease = self._by_token.get(token)
        if lease is None or lease.owner != owner:
            return False, None
        return True, self._end(lease)

    def expire(self, now: float) -> tuple[list[Lease], list[Lease]]:
        """End all whose time is at or before ``now``: (expired, those whose pins end now)."""
        expired: list[Lease] = []
        heap = self._by_expiry
        while heap and heap[0][0] <= now:
            _, _, token = heappop(heap)
            lease = self._by_token.get(token)
            if lease is None:
                continue
            if lease.expires > now:
                self._push(lease)
                continue
            expired.append(lease)
        return expired, [ended for lease in expired if (ended := self._end(lease))]

    def drop_owner(self, owner: SessionId) -> tuple[int, list[Lease]]:
        """End all of one owner: (how many, those whose pins end now)."""
        tokens = list(self._by_owner.get(owner, ()))
        ended = [self._end(self._by_token[token]) for token in tokens]
        return len(tokens), [lease for lease in ended if lease]

    def _push(self, lease: Lease) -> None:
        self._sequence += 1
        heappush(self._by_expiry, (lease.expires, self._sequence, lease.token))
        if len(self._by_expiry) > 2 * len(self._by_token) + 64:
            # Leases mostly end long before their time: without this the heap would keep ten
            # minutes of them.  Amortised over as many pushes.
            self._by_expiry = [
                (lease.expires, i, lease.token) for i, lease in enumerate(self._by_token.values())
            ]
            self._by_expiry.sort()

    def _end(self, lease: Lease) -> Lease | None:
        self._forget(lease)
        if lease.reading:
            self._ended_reading[id(lease)] = lease
            return None
        return lease

    def _forget(self, lease: Lease) -> None:
        lease.live = False
        del self._by_token[lease.token]
        tokens = self._by_owner[lease.owner]
        del tokens[lease.token]
        if not tokens:
            del self._by_owner[lease.owner]

    def validate(self) -> None:
        """Assert that the tables agree and that every live lease will be met by ``expire``."""
        by_owner: dict[SessionId, set[LeaseToken]] = {}
        early: dict[LeaseToken, float] = {}
        for when, _, token in self._by_expiry:
            early[token] = min(when, early.get(token, when))
        for token, lease in self._by_token.items():
            assert lease.live
            assert lease.token == token
            assert early[token] <= lease.expires
            assert 0 <= lease.reading <= len(lease.redeemed) <= lease.ranks
            assert len(lease.redeemed) < lease.ranks or lease.reading
            by_owner.setdefault(lease.owner, set()).add(token)
        assert {owner: set(tokens) for owner, tokens in self._by_owner.items()} == by_owner
        assert all(
            lease.reading and not lease.live and key == id(lease)
            for key, lease in self._ended_reading.items()
        )
