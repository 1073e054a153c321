"""The registry of engines beside a naive model."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pegaflow.errors import BadRequest, NotReady, UnknownInstance
from pegaflow.model.keys import InstanceId, Namespace, SessionId
from pegaflow.model.layout import GroupLayout, Run
from pegaflow.policy.instances import Instances, Registration

LAYOUT = GroupLayout(3, 4, (Run(0, 0, 64, 64),))


@attrs.define
class NaiveSession:
    instance: str
    namespace: str
    world: int
    process: str
    ranks: dict[int, Registration[str]] = attrs.field(factory=dict)


class InstancesMachine(RuleBasedStateMachine):
    """The model keeps sessions only, and finds everything by looking through all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.real: Instances[str] = Instances()
        self.sessions: dict[int, NaiveSession] = {}
        self.next_session = 0
        self.attached: set[str] = set()
        self.memories = 0

    @rule(
        name=st.sampled_from("AB"),
        space=st.sampled_from("nm"),
        world=st.integers(1, 3),
        process=st.sampled_from(["one", "two"]),
    )
    def open(self, name: str, space: str, world: int, process: str) -> None:
        session = SessionId(self.next_session)
        self.next_session += 1
        fits = all(
            (other.namespace, other.world) == (space, world)
            for other in self.sessions.values()
            if other.instance == name
        )
        try:
            self.real.open(session, InstanceId(name), Namespace(space), world, process)
        except BadRequest:
            assert not fits
        else:
            assert fits
            self.sessions[session] = NaiveSession(name, space, world, process)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), rank=st.integers(-1, 3), slot=st.integers(0, 2), slots=st.integers(1, 3))
    def register(self, data: st.DataObject, rank: int, slot: int, slots: int) -> None:
        session = SessionId(data.draw(st.sampled_from(sorted(self.sessions))))
        mine = self.sessions[session]
        current = self._ranks(mine.instance)
        good = 0 <= rank < mine.world and slot < slots <= mine.world
        good = good and all(r == rank or c.slot_count == slots for r, c in current.items())
        self.memories += 1
        new = Registration(session, rank, slot, slots, (LAYOUT,), f"memory-{self.memories}")
        try:
            older = self.real.register(new)
        except BadRequest:
            assert not good
            return
        assert good
        assert older is current.get(rank)
        if older is not None:
            self.attached.remove(older.memory)
            self.sessions[older.session].ranks.pop(rank)
        mine.ranks[rank] = new
        self.attached.add(new.memory)

    @rule(session=st.integers(0, 12))
    def drop(self, session: int) -> None:
        dropped = self.real.drop_session(SessionId(session))
        mine = self.sessions.pop(session, None)
        expected = list(mine.ranks.values()) if mine else []
        assert sorted(r.memory for r in dropped.detach) == sorted(r.memory for r in expected)
        self.attached -= {r.memory for r in dropped.detach}
        last = mine is not None and not any(
            other.instance == mine.instance for other in self.sessions.values()
        )
        assert dropped.gone == (mine.instance if last and mine else None)

    @rule(session=st.integers(0, 12))
    def unregister(self, session: int) -> None:
        detached = self.real.drop_registrations(SessionId(session))
        mine = self.sessions.get(session)
        assert {r.rank for r in detached} == (set(mine.ranks) if mine else set())
        self.attached -= {r.memory for r in detached}
        if mine:
            mine.ranks.clear()

    @precondition(lambda self: any(s.ranks for s in self.sessions.values()))
    @rule(data=st.data())
    def drop_rank(self, data: st.DataObject) -> None:
        found = data.draw(
            st.sampled_from([r for s in self.sessions.values() for r in s.ranks.values()])
        )
        assert self.real.drop_rank(found)
        assert not self.real.drop_rank(found)
        del self.sessions[found.session].ranks[found.rank]
        self.attached.remove(found.memory)

    def _ranks(self, instance: str) -> dict[int, Registration[str]]:
        return {
            rank: found
            for session in self.sessions.values()
            if session.instance == instance
            for rank, found in session.ranks.items()
        }

    @invariant()
    def agrees(self) -> None:
        self.real.validate()
        names = {session.instance for session in self.sessions.values()}
        assert {here.name for here in self.real} == names
        assert len(self.real) == len(names)
        held = {found.memory for here in self.real for found in here.ranks.values()}
        assert held == self.attached
        for number, session in self.sessions.items():
            current = self._ranks(session.instance)
            assert self.real.ready(InstanceId(session.instance)) == (len(current) == session.world)
            for rank in range(session.world):
                owner = self.sessions[current[rank].session] if rank in current else None
                if owner is not None and owner.process == session.process:
                    assert self.real.rank(SessionId(number), rank) is current[rank]
                else:
                    with pytest.raises(NotReady):
                        self.real.rank(SessionId(number), rank)


TestInstances = InstancesMachine.TestCase
TestInstances.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_session_that_ended_is_unknown_and_may_not_remove_a_newer_rank() -> None:
    registry: Instances[str] = Instances()
    old, new = SessionId(1), SessionId(2)
    for session in (old, new):
        registry.open(session, InstanceId("e"), Namespace("n"), 1)
    first = Registration(old, 0, 0, 1, (LAYOUT,), "first")
    second = Registration(new, 0, 0, 1, (LAYOUT,), "second")
    assert registry.register(first) is None
    assert registry.register(second) is first
    assert not registry.drop_rank(first)
    assert registry.drop_session(old).detach == ()
    assert registry.rank(new, 0) is second
    with pytest.raises(UnknownInstance):
        registry.of(old)
    assert not registry.drop_rank(first)
    assert registry.drop_registrations(old) == ()


def test_another_process_of_the_same_name_may_not_use_a_rank() -> None:
    """After a restart the block ids of the new process would mean the old one's memory."""
    registry: Instances[str] = Instances()
    names = {SessionId(1): "old", SessionId(2): "new", SessionId(3): "old"}
    for session, process in names.items():
        registry.open(session, InstanceId("e"), Namespace("n"), 1, process)
    first = Registration(SessionId(1), 0, 0, 1, (LAYOUT,), "first")
    registry.register(first)
    assert registry.rank(SessionId(3), 0) is first
    with pytest.raises(NotReady, match="another process"):
        registry.rank(SessionId(2), 0)


def test_a_rank_knows_its_groups() -> None:
    found = Registration(SessionId(1), 0, 0, 1, (LAYOUT,), "memory")
    assert found.layout(3) is LAYOUT
    with pytest.raises(BadRequest, match="group 1"):
        found.layout(1)


def test_nobody_is_ready_who_is_not_here() -> None:
    assert not Instances[str]().ready(InstanceId("nobody"))
