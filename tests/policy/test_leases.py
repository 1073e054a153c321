"""The table of leases beside a naive model."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pegaflow.errors import LeaseExpired
from pegaflow.model.keys import InstanceId, LeaseToken, Namespace, SessionId
from pegaflow.policy.index import Shelf
from pegaflow.policy.leases import Lease, Leases

SHELF = Shelf(0, Namespace("n"), 0, 1)
ROWS = np.array([0], np.int64)
TTL = 10.0


@attrs.define
class Naive:
    owner: int
    instance: str
    ranks: int
    expires: float
    redeemed: set[int] = attrs.field(factory=set)
    reading: int = 0
    live: bool = True

    @property
    def pinned(self) -> bool:
        return self.live or self.reading > 0


class LeasesMachine(RuleBasedStateMachine):
    readings = Bundle("readings")

    def __init__(self) -> None:
        super().__init__()
        self.real = Leases(TTL)
        self.model: list[Naive] = []
        self.unpinned: list[LeaseToken] = []
        self.now = 0.0

    @staticmethod
    def token(number: int) -> LeaseToken:
        return LeaseToken(b"%016d" % number)

    def ended(self, lease: Lease | None) -> None:
        if lease is not None:
            self.unpinned.append(lease.token)

    @rule(owner=st.integers(0, 2), instance=st.sampled_from("AB"), ranks=st.integers(1, 3))
    def add(self, owner: int, instance: str, ranks: int) -> None:
        token = self.token(len(self.model))
        self.real.add(
            Lease(
                token,
                SessionId(owner),
                InstanceId(instance),
                SHELF,
                ROWS,
                ROWS,
                ranks,
                self.now + TTL,
            )
        )
        self.model.append(Naive(owner, instance, ranks, self.now + TTL))

    @rule(
        target=readings,
        number=st.integers(0, 12),
        instance=st.sampled_from("AB"),
        rank=st.integers(0, 2),
    )
    def redeem(self, number: int, instance: str, rank: int) -> tuple[int, Lease] | None:
        naive = self.model[number] if number < len(self.model) else None
        good = (
            naive is not None
            and naive.live
            and naive.expires > self.now
            and naive.instance == instance
            and rank not in naive.redeemed
        )
        if naive is not None and rank >= naive.ranks:
            return None  # the Host refuses it before
        try:
            lease = self.real.redeem(self.token(number), InstanceId(instance), rank, self.now)
        except LeaseExpired:
            assert not good
            return None
        assert good
        assert naive is not None
        naive.redeemed.add(rank)
        naive.reading += 1
        return number, lease

    @rule(reading=consumes(readings))
    def finish(self, reading: tuple[int, Lease] | None) -> None:
        if reading is None:
            return
        number, lease = reading
        naive = self.model[number]
        naive.reading -= 1
        if len(naive.redeemed) == naive.ranks and not naive.reading:
            naive.live = False
        self.ended(self.real.finish(lease))

    @rule(number=st.integers(0, 12), owner=st.integers(0, 2))
    def renew(self, number: int, owner: int) -> None:
        naive = self.model[number] if number < len(self.model) else None
        good = (
            naive is not None and naive.live and naive.expires > self.now and naive.owner == owner
        )
        try:
            self.real.renew(self.token(number), SessionId(owner), self.now)
        except LeaseExpired:
            assert not good
        else:
            assert good
            assert naive is not None
            naive.expires = self.now + TTL

    @rule(number=st.integers(0, 12), owner=st.integers(0, 2))
    def release(self, number: int, owner: int) -> None:
        naive = self.model[number] if number < len(self.model) else None
        good = naive is not None and naive.live and naive.owner == owner
        found, ended = self.real.release(self.token(number), SessionId(owner))
        assert found == good
        if good and naive is not None:
            naive.live = False
        self.ended(ended)

    @rule(owner=st.integers(0, 2))
    def drop_owner(self, owner: int) -> None:
        mine = [naive for naive in self.model if naive.live and naive.owner == owner]
        count, ended = self.real.drop_owner(SessionId(owner))
        assert count == len(mine)
        for naive in mine:
            naive.live = False
        for lease in ended:
            self.ended(lease)

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 10.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        over = [naive for naive in self.model if naive.live and naive.expires <= self.now]
        expired, ended = self.real.expire(self.now)
        assert len(expired) == len(over)
        for naive in over:
            naive.live = False
        for lease in ended:
            self.ended(lease)
        assert self.real.expire(self.now) == ([], [])

    @invariant()
    def agrees(self) -> None:
        self.real.validate()
        assert len(self.real) == sum(naive.live for naive in self.model)
        held = {lease.token for lease in self.real}
        assert held == {self.token(i) for i, naive in enumerate(self.model) if naive.pinned}
        gone = [self.token(i) for i, naive in enumerate(self.model) if not naive.pinned]
        assert sorted(self.unpinned) == gone, "pins end exactly once"


TestLeases = LeasesMachine.TestCase
TestLeases.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_the_expiry_heap_stays_small_when_leases_end_early() -> None:
    leases = Leases(600.0)
    for i in range(5_000):
        token = LeasesMachine.token(i)
        leases.add(Lease(token, SessionId(0), InstanceId("i"), SHELF, ROWS, ROWS, 1, i + 600.0))
        if i % 100:
            assert leases.release(token, SessionId(0))[0]
    leases.validate()
    assert len(leases) == 50
    assert len(leases._by_expiry) <= 2 * 50 + 64
    expired, _ = leases.expire(5_600.0)
    assert len(expired) == 50


def test_a_token_that_was_drawn_twice_is_a_bug() -> None:
    leases = Leases(1.0)
    lease = Lease(LeasesMachine.token(1), SessionId(0), InstanceId("i"), SHELF, ROWS, ROWS, 1, 1.0)
    leases.add(lease)
    with pytest.raises(AssertionError, match="twice"):
        leases.add(lease)
