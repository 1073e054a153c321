"""Which engines are here, which ranks of them have registered, and what ends when a session ends?

A rank belongs to the process that registered it.  That process may use it through several sessions
(one for loads, one for saves), another process of the same name may not: after a restart its block
ids would mean the memory of the one that died.

``Memory`` is whatever an engine gives for an attached rank; it is only kept and handed back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import attrs

from pegaflow.errors import BadRequest, NotReady, UnknownInstance
from pegaflow.model.keys import InstanceId, Namespace, SessionId
from pegaflow.model.layout import GroupLayout

Memory = TypeVar("Memory")


@attrs.frozen(eq=False)
class Registration(Generic[Memory]):
    """One rank's memory and how blocks lie in it."""

    session: SessionId
    rank: int
    slot_index: int
    slot_count: int
    groups: tuple[GroupLayout, ...]
    memory: Memory

    def layout(self, group: int) -> GroupLayout:
        """Raises :exc:`BadRequest` for a group that the rank does not have."""
        for layout in self.groups:
            if layout.group == group:
                return layout
        raise BadRequest(f"rank {self.rank} registered no group {group}", "group")


@attrs.define(eq=False)
class Instance(Generic[Memory]):
    """One engine replica; here as long as one of its sessions is."""

    name: InstanceId
    namespace: Namespace
    world_size: int
    sessions: set[SessionId] = attrs.field(factory=set)
    ranks: dict[int, Registration[Memory]] = attrs.field(factory=dict)

    @property
    def missing(self) -> int:
        """Ranks that have not registered."""
        return self.world_size - len(self.ranks)


@attrs.frozen(eq=False)
class Dropped(Generic[Memory]):
    """What ended with a session."""

    detach: tuple[Registration[Memory], ...] = ()
    """The caller detaches their memory."""
    gone: InstanceId | None = None
    """The instance whose last session this was."""


@attrs.define(eq=False)
class Instances(Generic[Memory]):
    """The registry.  A session belongs to one instance; an instance has a session a process."""

    _by_name: dict[InstanceId, Instance[Memory]] = attrs.field(factory=dict, init=False)
    _of_session: dict[SessionId, Instance[Memory]] = attrs.field(factory=dict, init=False)
    _process: dict[SessionId, str] = attrs.field(factory=dict, init=False)
    """How the session's process calls itself."""

    def __iter__(self) -> Iterator[Instance[Memory]]:
        """All instances, the oldest first."""
        return iter(self._by_name.values())

    def __len__(self) -> int:
        """Instances that have a session."""
        return len(self._by_name)

    def open(
        self,
        session: SessionId,
        instance: InstanceId,
        namespace: Namespace,
        world_size: int,
        process: str = "",
    ) -> None:
        """Add a session.  Raises :exc:`BadRequest` if its instance is open in another shape."""
        assert session not in self._of_session, session
        here = self._by_name.get(instance)
        if here is None:
            here = self._by_name[instance] = Instance(instance, namespace, world_size)
        elif here.namespace != namespace:
            raise BadRequest(
                f"instance {instance!r} is open with namespace {here.namespace!r}", "namespace"
            )
        elif here.world_size != world_size:
            raise BadRequest(
                f"instance {instance!r} is open with {here.world_size} ranks, not {world_size}",
                "world-size",
            )
        here.sessions.add(session)
        self._of_session[session] = here
        self._process[session] = process

    def of(self, session: SessionId) -> Instance[Memory]:
        """The session's instance.  Raises :exc:`UnknownInstance` after it was dropped."""
        here = self._of_session.get(session)
        if here is None:
            raise UnknownInstance("the session has ended: open and register again")
        return here

    def check(self, session: SessionId, rank: int, slot_index: int, slot_count: int) -> None:
        """Whether :meth:`register` could take this.  Raises :exc:`BadRequest`."""
        here = self.of(session)
        if not 0 <= rank < here.world_size:
            raise BadRequest(f"rank {rank} of {here.world_size}", "rank")
        if not 0 <= slot_index < slot_count <= here.world_size:
            raise BadRequest(
                f"slot {slot_index} of {slot_count} for {here.world_size} ranks", "slot-index"
            )
        for other in here.ranks.values():
            if other.rank != rank and other.slot_count != slot_count:
                raise BadRequest(
                    f"rank {other.rank} registered {other.slot_count} slots a block, "
                    f"rank {rank} has {slot_count}",
                    "slot-count",
                )

    def register(self, registration: Registration[Memory]) -> Registration[Memory] | None:
        """Add a rank; returns the older registration that it supersedes, to be detached."""
        self.check(
            registration.session,
            registration.rank,
            registration.slot_index,
            registration.slot_count,
        )
        here = self.of(registration.session)
        older = here.ranks.get(registration.rank)
        here.ranks[registration.rank] = registration
        return older

    def rank(self, session: SessionId, rank: int) -> Registration[Memory]:
        """A rank that the session's process registered.  Raises :exc:`NotReady`."""
        here = self.of(session)
        found = here.ranks.get(rank)
        if found is None:
            raise NotReady(f"rank {rank} of instance {here.name!r} has not registered")
        if found.session != session and self._process[found.session] != self._process[session]:
            raise NotReady(
                f"rank {rank} of instance {here.name!r} was registered by another process: "
                f"{self._process[found.session]!r}"
            )
        return found

    def ready(self, instance: InstanceId) -> bool:
        """Whether all ranks have registered."""
        here = self._by_name.get(instance)
        return here is not None and not here.missing

    def drop_rank(self, registration: Registration[Memory]) -> bool:
        """Forget one registration, if it is still the current one of its rank."""
        here = self._of_session.get(registration.session)
        if here is None or here.ranks.get(registration.rank) is not registration:
            return False
        del here.ranks[registration.rank]
        return True

    def drop_registrations(self, session: SessionId) -> tuple[Registration[Memory], ...]:
        """Forget what the session registered and is still current; the session stays open."""
        here = self._of_session.get(session)
        if here is None:
            return ()
        mine = tuple(found for found in here.ranks.values() if found.session == session)
        for found in mine:
            del here.ranks[found.rank]
        return mine

    def drop_session(self, session: SessionId) -> Dropped[Memory]:
        """Forget a session; nothing happens the second time."""
        detach = self.drop_registrations(session)
        here = self._of_session.pop(session, None)
        if here is None:
            return Dropped()
        del self._process[session]
        here.sessions.remove(session)
        if here.sessions:
            return Dropped(detach)
        del self._by_name[here.name]
        return Dropped(detach, here.name)

    def validate(self) -> None:
        """Assert that sessions, instances and ranks agree."""
        seen: dict[SessionId, Instance[Memory]] = {}
        for name, here in self._by_name.items():
            assert here.name == name
            assert here.sessions
            assert len(here.ranks) <= here.world_size
            for rank, found in here.ranks.items():
                assert found.rank == rank
                assert 0 <= rank < here.world_size
                assert found.session in here.sessions, "a rank outlived its session"
            for session in here.sessions:
                assert session not in seen
                seen[session] = here
        assert seen == self._of_session
        assert self._process.keys() == seen.keys()
