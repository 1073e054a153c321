"""What does this host's cache hold, and what may happen to it next?

:class:`Host` composes arena, shelves, sealing, eviction and leases.  It is synchronous and does no
I/O: each method is one atomic step.  A transfer is prepare, do, complete: ``saving`` and
``loading`` hand out a plan as a ``with`` block; what lies between the plan's begin and end is the
caller's copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from pegaflow.errors import BadRequest, ManifestMismatch
from pegaflow.model.keys import (
    BlockHash,
    InstanceId,
    LeaseToken,
    Manifest,
    Namespace,
    SessionId,
)
from pegaflow.model.messages import Loading, Ready, SaveRun
from pegaflow.policy import sealing
from pegaflow.policy.arena import Arena
from pegaflow.policy.eviction import Fresh, LeafFirst, Victim
from pegaflow.policy.figures import (
    Counters,
    Evicted,
    ExpiredLease,
    HostStatistics,
    NamespaceStatistics,
    StaleBlocks,
)
from pegaflow.policy.index import ABSENT, SEALED, Partial, Rows, Shelf
from pegaflow.policy.leases import Lease, Leases

GROUPS_MAX = 1 << 16
SLOTS_MAX = 4096
AMPLIFICATION_MAX = 4
"""One allocation evicts at most so many times what it lacks: with several block sizes in a pool a
hole of the right length may not appear even when everything leaves."""

NO_LIMIT = 1 << 62

NO_LEASE = LeaseToken(b"")


@attrs.frozen(eq=False)
class SaveOrder:
    """One rank wants these runs stored in its slot."""

    namespace: Namespace
    instance: InstanceId
    slot_index: int
    runs: Sequence[SaveRun]


class Part(NamedTuple):
    """Blocks of one run that got room."""

    run_index: int
    picks: Rows
    """Indices into the run, ascending."""
    pool_offsets: NDArray[np.int64]
    """Bytes; where block ``picks[i]`` goes."""


@attrs.frozen(eq=False)
class Sealed:
    """What one commit did; ``parts``: (index of the run, indices into it) that sealed."""

    stored: int
    failed: int
    blocks: int
    parts: tuple[tuple[int, Rows], ...]


@attrs.define(eq=False)
class Space:
    """One namespace: who uses it, and its shelves by group."""

    manifest: Manifest
    owners: set[SessionId] = attrs.field(factory=set)
    shelves: dict[int, Shelf] = attrs.field(factory=dict)
    open_plans: int = 0

    def is_idle(self) -> bool:
        """Nobody uses it and nothing is in it."""
        return not (
            self.owners or self.open_plans or any(shelf.keys for shelf in self.shelves.values())
        )


@attrs.define(eq=False)
class SavePlan:
    """Room for one save, until it is committed or left."""

    order: SaveOrder
    parts: list[Part]
    known: int
    rejected: int
    _host: Host
    _space: Space
    _shelves: list[Shelf]
    _rows: list[Rows]
    settled: bool = False

    @property
    def blocks(self) -> int:
        """Picks over all parts: the length of ``failed`` in :meth:`commit`."""
        return sum(len(part.picks) for part in self.parts)

    def commit(self, failed: NDArray[np.bool_], now: float) -> Sealed:
        """Publish what was copied; ``failed`` has one flag a pick over all parts in order.

        Failed ones give their room back and may be saved again.  At most once.
        """
        return self._host._settle(self, failed, now)

    def abort(self, now: float) -> None:
        """Give all room back, unless it was committed."""
        if not self.settled:
            self._host._settle(self, np.ones(self.blocks, np.bool_), now)


@attrs.define(eq=False)
class LoadPlan:
    """Leased blocks of one rank, pinned until the plan is left."""

    pool_offsets: NDArray[np.int64]
    """Bytes; one a position asked for."""
    slot_bytes: int
    lease: Lease


OnEvicted = Callable[[Namespace, int, Sequence[BlockHash]], None]
"""(namespace, group, hashes) that left; the accounting is done already."""


@attrs.define(eq=False, kw_only=True)
class Host:
    """The cache of one host.  ``now`` is any clock in seconds that never runs backwards."""

    make_token: Callable[[], LeaseToken]
    lease_ttl_s: float = 600.0
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    unsealed_ttl_s: float = 300.0
    align_bytes: int = 512
    on_evicted: OnEvicted | None = None
    _arena: Arena = attrs.field(init=False)
    _leases: Leases = attrs.field(init=False)
    _order: LeafFirst = attrs.field(factory=LeafFirst, init=False)
    _spaces: dict[Namespace, Space] = attrs.field(factory=dict, init=False)
    _shelf_number: int = attrs.field(default=0, init=False)
    _counters: Counters = attrs.field(factory=Counters, init=False)
    _saves: dict[int, SavePlan] = attrs.field(factory=dict, init=False)
    _open_loads: int = attrs.field(default=0, init=False)
    _draining: bool = attrs.field(default=False, init=False)
    """Background eviction went above the high watermark and has not reached the low one yet."""

    def __attrs_post_init__(self) -> None:
        """Build the parts."""
        assert 0 < self.low_watermark <= self.high_watermark <= 1
        self._arena = Arena(align_bytes=self.align_bytes)
        self._leases = Leases(self.lease_ttl_s)

    # ---- set-up

    def add_memory(self, offset_bytes: int, size_bytes: int, *, adjacent: bool = False) -> None:
        """More of the pool is usable.  No extent crosses from one range to the next by default."""
        self._arena.add_memory(offset_bytes, size_bytes, adjacent=adjacent)

    def open_namespace(
        self, namespace: Namespace, manifest: Manifest, owner: SessionId | None = None
    ) -> None:
        """Use a namespace.  Raises :exc:`ManifestMismatch` naming the field that differs.

        The manifest holds while blocks, plans or owners are there; ``owner`` counts until
        :meth:`drop_owner`.
        """
        space = self._spaces.get(namespace)
        if space is not None and (field := space.manifest.first_difference(manifest)):
            if not space.is_idle():
                raise ManifestMismatch(
                    f"namespace {namespace!r} holds keys of another identity: {field} is "
                    f"{space.manifest.fields.get(field)!r}, not {manifest.fields.get(field)!r}",
                    field,
                )
            self._forget_space(namespace)
            space = None
        if space is None:
            space = self._spaces[namespace] = Space(manifest)
        if owner is not None:
            space.owners.add(owner)

    def declare_slots(
        self, namespace: Namespace, group: int, slot_index: int, slot_count: int, slot_bytes: int
    ) -> None:
        """Fix a group's geometry.  Raises :exc:`ManifestMismatch` if it was fixed differently."""
        space = self._space(namespace)
        if not 0 <= group < GROUPS_MAX:
            raise BadRequest(f"group {group} is not in 0..{GROUPS_MAX - 1}", "group")
        if not 0 < slot_count <= SLOTS_MAX or not 0 <= slot_index < slot_count:
            raise BadRequest(f"slot {slot_index} of {slot_count}", "slot-index")
        if slot_bytes <= 0:
            raise BadRequest(f"a slot has {slot_bytes} bytes", "slot-bytes")
        shelf = space.shelves.get(group)
        if shelf is None:
            shelf = Shelf(self._shelf_number, namespace, group, slot_count)
            self._shelf_number += 1
            space.shelves[group] = self._order.shelves[shelf.number] = shelf
        shelf.declare(slot_index, slot_count, slot_bytes, self._arena.padded(slot_bytes))

    # ---- save

    @contextmanager
    def saving(self, order: SaveOrder, now: float) -> Iterator[SavePlan]:
        """Reserve room for what is not here yet, evicting when it is short.

        Per run the first blocks in prefix order get what room there is.  Leaving without commit
        gives everything back.  Raises :exc:`BadRequest` for what was not declared.
        """
        plan = self._reserve(order)
        try:
            yield plan
        finally:
            plan.abort(now)

    def _reserve(self, order: SaveOrder) -> SavePlan:
        space = self._space(order.namespace)
        shelves = [self._shelf(space, run.group) for run in order.runs]
        for shelf in shelves:
            shelf.check_slot(order.slot_index)
        plan = SavePlan(order, [], 0, 0, self, space, [], [])
        for run_index, (run, shelf) in enumerate(zip(order.runs, shelves, strict=True)):
            self._reserve_run(plan, run_index, run, shelf)
        self._counters.known += plan.known
        self._counters.rejections += plan.rejected
        self._saves[id(plan)] = plan
        space.open_plans += 1
        return plan

    def _reserve_run(self, plan: SavePlan, run_index: int, run: SaveRun, shelf: Shelf) -> None:
        slot = plan.order.slot_index
        rows, picks = sealing.wanted(shelf, slot, run.hashes)
        plan.known += len(run.hashes) - len(picks)
        here = rows[rows >= 0]
        if len(here):
            # Used now; and its own head must be the last to leave for the sake of the tail.
            self._order.touch(shelf, here[shelf.missing[here] == SEALED])
        if not len(picks):
            return
        size = shelf.slot_bytes[slot]
        offsets = self._arena.allocate(len(picks), size)
        if len(offsets) < len(picks):
            offsets = self._make_room(shelf, here, run.parent, offsets, len(picks), size)
        plan.rejected += len(picks) - len(offsets)
        picks = picks[: len(offsets)]
        if len(picks):
            plan.parts.append(Part(run_index, picks, offsets))
            plan._shelves.append(shelf)
            plan._rows.append(sealing.claim(shelf, slot, run.hashes, rows, picks))

    def _make_room(
        self, shelf: Shelf, here: Rows, parent: bytes, got: Rows, count: int, size: int
    ) -> NDArray[np.int64]:
        """Evict, then give up unsealed leftovers, until ``count`` extents are there.

        The blocks of the run itself (``here``) and its parent stay.
        """
        own = np.unique(np.append(here, shelf.find([BlockHash(parent)])))
        own = own[own >= 0]
        keep = own[shelf.missing[own] == SEALED]
        unsealed = own[shelf.missing[own] != SEALED]
        self._order.pin(shelf, keep)
        shelf.filling[unsealed] += 1
        try:
            budget = AMPLIFICATION_MAX * (count - len(got)) * self._arena.padded(size)
            while len(got) < count and budget > 0:
                short = (count - len(got)) * self._arena.padded(size)
                freed = self._evict_for(min(short, budget), size, may_fail=not len(got))
                freed = freed or self._reclaim_for(short, size)
                if not freed:
                    break
                budget -= freed
                more = self._arena.allocate(count - len(got), size)
                got = np.concatenate([got, more])
        finally:
            shelf.filling[unsealed] -= 1
            self._order.unpin(shelf, keep)
        return got

    def _evict_for(self, short_bytes: int, size: int, *, may_fail: bool) -> int:
        """Bytes that left; nobody leaves if even all who may would not make room for one extent."""
        victims, freed = self._order.choose(short_bytes, NO_LIMIT)
        if may_fail and freed + self._arena.free_bytes < size:
            self._order.restore(victims)
            return 0
        self._remove(victims)
        return freed

    def _reclaim_for(self, short_bytes: int, size: int) -> int:
        """Bytes of unsealed leftovers given up because room is short."""
        found: list[tuple[Shelf, list[int]]] = []
        freed = 0
        for shelf in self._order.shelves.values():
            rows: list[int] = []
            for row in sealing.reclaimable(shelf, since=None, instance=None):
                if freed >= short_bytes:
                    break
                rows.append(row)
                freed += self._unsealed_bytes(shelf, row)
            found.append((shelf, rows))
        if freed + self._arena.free_bytes < size:
            return 0
        for shelf, rows in found:
            self._give_up(shelf, rows)
        return freed

    def _settle(self, plan: SavePlan, failed: NDArray[np.bool_], now: float) -> Sealed:
        assert not plan.settled, "a plan was committed twice"
        assert failed.shape == (plan.blocks,), failed.shape
        plan.settled = True
        del self._saves[id(plan)]
        plan._space.open_plans -= 1
        slot, stamp = plan.order.slot_index, Partial(now, plan.order.instance)
        fresh: list[Fresh] = []
        parts: list[tuple[int, Rows]] = []
        stored = at = 0
        for part, shelf, rows in zip(plan.parts, plan._shelves, plan._rows, strict=True):
            bad = failed[at : at + len(rows)]
            at += len(rows)
            done = sealing.settle(shelf, slot, rows, part.pool_offsets, bad, stamp)
            self._arena.free(part.pool_offsets[bad], shelf.slot_bytes[slot])
            stored += done.committed_count
            if len(done.sealed):
                positions = part.picks[done.sealed]
                run = plan.order.runs[part.run_index]
                before = [run.hashes[i - 1] if i else run.parent for i in positions.tolist()]
                fresh.append((shelf, rows[done.sealed], before))
                parts.append((part.run_index, positions))
        blocks = self._order.welcome(fresh)
        self._counters.insertions += blocks
        self._counters.failed += at - stored
        return Sealed(stored, at - stored, blocks, tuple(parts))

    # ---- query and load

    def look(
        self,
        namespace: Namespace,
        group: int,
        hashes: Sequence[BlockHash],
        parent: bytes,
        instance: InstanceId,
        owner: SessionId,
        ranks: int,
        now: float,
    ) -> Ready | Loading:
        """The longest sealed prefix, leased.  Every hash counts once, as a hit or as a miss.

        ``parent`` is not needed to find them: a hash covers all before it.
        """
        shelf = self._shelf(self._space(namespace), group)
        rows = shelf.sealed_prefix(hashes)
        hits = len(rows)
        self._counters.hits += hits
        self._counters.misses += len(hashes) - hits
        if not hits:
            return Ready(0, NO_LEASE, 0)
        # Only a broken client repeats a hash within a prefix, but a pin must be given back once.
        pinned = rows if self._order.touch(shelf, rows) else np.unique(rows)
        self._order.pin(shelf, pinned)
        token = self.make_token()
        self._leases.add(
            Lease(token, owner, instance, shelf, rows, pinned, ranks, now + self.lease_ttl_s)
        )
        self._counters.leases_granted += 1
        return Ready(hits, token, round(self.lease_ttl_s * 1000))

    @contextmanager
    def loading(
        self,
        token: LeaseToken,
        instance: InstanceId,
        rank: int,
        slot_index: int,
        group: int,
        positions: NDArray[np.int64] | NDArray[np.uint32],
        now: float,
    ) -> Iterator[LoadPlan]:
        """Redeem a rank's share.  The blocks stay while the plan is open, whatever the lease does.

        Raises :exc:`LeaseExpired` (unknown, over, another instance's, redeemed by this rank), or
        :exc:`BadRequest`, which leaves the share as it was.
        """
        lease = self._leases.peek(token, instance, now)
        shelf = lease.shelf
        if shelf.group != group:
            raise BadRequest(f"the lease is for group {shelf.group}, not {group}", "group")
        if not 0 <= rank < lease.ranks:
            raise BadRequest(f"rank {rank} of {lease.ranks}", "rank")
        slot_bytes = shelf.check_slot(slot_index)
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(
            lease.rows
        ):
            raise BadRequest(f"a position is outside the {len(lease.rows)} blocks", "positions")
        self._leases.redeem(token, instance, rank, now)
        self._open_loads += 1
        try:
            offsets = shelf.offsets[slot_index][lease.rows[positions]]
            assert not len(offsets) or int(offsets.min()) >= 0, "a leased block is not here"
            yield LoadPlan(offsets, slot_bytes, lease)
        finally:
            self._open_loads -= 1
            ended = self._leases.finish(lease)
            if ended is not None:
                self._unpin([ended])

    def renew(self, token: LeaseToken, owner: SessionId, now: float) -> int:
        """Start the lease's time anew; returns it in milliseconds.  Raises :exc:`LeaseExpired`."""
        self._leases.renew(token, owner, now)
        return round(self.lease_ttl_s * 1000)

    def release(self, tokens: Sequence[LeaseToken], owner: SessionId) -> int:
        """Give leases back early, ignoring unknown ones and those of others.  Returns how many."""
        released = 0
        for token in tokens:
            found, ended = self._leases.release(token, owner)
            released += found
            if ended is not None:
                self._unpin([ended])
        return released

    def _unpin(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self._order.unpin(lease.shelf, lease.pinned)

    # ---- time, loss and clean-up

    def expire(self, now: float) -> list[ExpiredLease | StaleBlocks]:
        """End what is over at or before ``now``; idempotent."""
        out: list[ExpiredLease | StaleBlocks] = []
        expired, ended = self._leases.expire(now)
        self._unpin(ended)
        self._counters.leases_expired += len(expired)
        out += [
            ExpiredLease(lease.token, lease.owner, lease.instance, len(lease.rows))
            for lease in expired
        ]
        for shelf in self._order.shelves.values():
            rows = sealing.reclaimable(shelf, since=now - self.unsealed_ttl_s, instance=None)
            if rows:
                self._give_up(shelf, rows)
                out.append(StaleBlocks(shelf.namespace, shelf.group, len(rows)))
        return out

    def drop_leases(self, owner: SessionId) -> int:
        """Give back every lease of a session.  Returns their count."""
        count, ended = self._leases.drop_owner(owner)
        self._unpin(ended)
        return count

    def drop_owner(self, owner: SessionId) -> int:
        """A session ended: its leases end, and it uses no namespace.  Returns its leases' count."""
        count = self.drop_leases(owner)
        for namespace, space in list(self._spaces.items()):
            if owner in space.owners:
                space.owners.remove(owner)
                if space.is_idle():
                    self._forget_space(namespace)
        return count

    def drop_instance(self, instance: InstanceId) -> int:
        """An engine is gone: give up the blocks that it left unfinished.  Returns their count."""
        count = 0
        for shelf in self._order.shelves.values():
            rows = sealing.reclaimable(shelf, since=None, instance=instance)
            self._give_up(shelf, rows)
            count += len(rows)
        return count

    def evict_to_low_watermark(self, limit_blocks: int) -> Evicted:
        """Background eviction: above the high watermark, go down to the low one, a bit each call.

        No blocks evicted means that there is nothing to do, or nothing that may leave.
        """
        used, capacity = self._arena.used_bytes, self._arena.capacity_bytes
        mark = self.low_watermark if self._draining else self.high_watermark
        self._draining = used > capacity * mark
        if not self._draining:
            return Evicted()
        victims, freed = self._order.choose(used - int(capacity * self.low_watermark), limit_blocks)
        self._remove(victims)
        return Evicted(blocks=len(victims), size_bytes=freed)

    def clear(self, namespace: Namespace | None = None) -> Evicted:
        """Remove all blocks, of one namespace or of all; leased ones and their heads stay.

        Raises :exc:`BadRequest` for a namespace that nobody opened.
        """
        spaces = list(self._spaces.values()) if namespace is None else [self._space(namespace)]
        blocks = size = unsealed = still = 0
        for space in spaces:
            for shelf in space.shelves.values():
                rows = self._clearable(shelf)
                leftovers = sealing.reclaimable(shelf, since=None, instance=None)
                blocks, size = blocks + len(rows), size + len(rows) * shelf.block_bytes
                unsealed += len(leftovers)
                self._give_up(shelf, leftovers)
                self._cut(shelf, rows)
                still += len(shelf.keys)
        for name, space in list(self._spaces.items()):
            if space.is_idle():
                self._forget_space(name)
        return Evicted(blocks, size, unsealed, still)

    def _clearable(self, shelf: Shelf) -> Rows:
        """Sealed rows that no pinned row hangs under."""
        stays = shelf.pins > 0
        for row in np.flatnonzero(stays).tolist():
            up = int(shelf.parent[row])
            while up >= 0 and not stays[up]:
                stays[up] = True
                up = int(shelf.parent[up])
        return np.flatnonzero((shelf.missing == SEALED) & ~stays)

    def _remove(self, victims: list[Victim]) -> None:
        """Carry out what :meth:`LeafFirst.choose` chose."""
        by_shelf: dict[int, list[int]] = {}
        for shelf, row in victims:
            by_shelf.setdefault(shelf.number, []).append(row)
        for number, rows in by_shelf.items():
            # The children counts above the victims were taken down when they were chosen.
            self._leave(self._order.shelves[number], np.array(rows, np.int64))

    def _cut(self, shelf: Shelf, rows: Rows) -> None:
        """Remove whole subtrees."""
        up = shelf.parent[rows]
        np.subtract.at(shelf.children, up[up >= 0], 1)
        self._leave(shelf, rows)

    def _leave(self, shelf: Shelf, rows: Rows) -> None:
        """Sealed rows go: extents, index, counters; then those who listen hear of it."""
        if not len(rows):
            return
        listed = rows.tolist()
        hashes = [shelf.hashes[row] for row in listed] if self.on_evicted else []
        for column, slot_bytes in zip(shelf.offsets, shelf.slot_bytes, strict=True):
            self._arena.free(column[rows], slot_bytes)
        shelf.sealed_count -= len(rows)
        shelf.forget(listed)
        self._counters.evictions += len(rows)
        self._counters.evicted_bytes += len(rows) * shelf.block_bytes
        if self.on_evicted is not None:
            try:
                self.on_evicted(shelf.namespace, shelf.group, hashes)
            except AssertionError:
                raise
            except Exception:  # a listener's trouble must not stop eviction (T21)
                self._counters.callback_failures += 1

    def _give_up(self, shelf: Shelf, rows: list[int]) -> None:
        """Unsealed rows that nobody is copying go."""
        if not rows:
            return
        at = np.array(rows, np.int64)
        for column, slot_bytes in zip(shelf.offsets, shelf.slot_bytes, strict=True):
            offsets = column[at]
            here = offsets[offsets != ABSENT]
            if len(here):
                self._arena.free(here, slot_bytes)
        shelf.forget(rows)
        self._counters.unsealed_reclaimed += len(rows)

    def _unsealed_bytes(self, shelf: Shelf, row: int) -> int:
        return sum(
            self._arena.padded(slot_bytes)
            for column, slot_bytes in zip(shelf.offsets, shelf.slot_bytes, strict=True)
            if column[row] >= 0
        )

    # ---- looking things up

    def _space(self, namespace: Namespace) -> Space:
        space = self._spaces.get(namespace)
        if space is None:
            raise BadRequest(f"namespace {namespace!r} was not opened", "namespace")
        return space

    def _shelf(self, space: Space, group: int) -> Shelf:
        shelf = space.shelves.get(group)
        if shelf is None:
            raise BadRequest(f"no rank has declared group {group}", "group")
        return shelf

    def _forget_space(self, namespace: Namespace) -> None:
        space = self._spaces.pop(namespace)
        for shelf in space.shelves.values():
            del self._order.shelves[shelf.number]

    # ---- watching

    def statistics(self) -> HostStatistics:
        """A snapshot; costs a few microseconds a namespace."""
        namespaces: dict[Namespace, NamespaceStatistics] = {}
        blocks = size = unsealed = pinned = pinned_bytes = 0
        for name, space in self._spaces.items():
            shelves = space.shelves.values()
            here = NamespaceStatistics(
                blocks=sum(shelf.sealed_count for shelf in shelves),
                size_bytes=sum(shelf.sealed_count * shelf.block_bytes for shelf in shelves),
                unsealed=sum(len(shelf.keys) - shelf.sealed_count for shelf in shelves),
                pinned_blocks=sum(shelf.pinned_count for shelf in shelves),
            )
            namespaces[name] = here
            blocks += here.blocks
            size += here.size_bytes
            unsealed += here.unsealed
            pinned += here.pinned_blocks
            pinned_bytes += sum(shelf.pinned_count * shelf.block_bytes for shelf in shelves)
        return HostStatistics(
            capacity_bytes=self._arena.capacity_bytes,
            used_bytes=self._arena.used_bytes,
            largest_free_bytes=self._arena.largest_free_bytes,
            blocks=blocks,
            block_bytes=size,
            unsealed=unsealed,
            pinned_blocks=pinned,
            pinned_bytes=pinned_bytes,
            leases=len(self._leases),
            open_saves=len(self._saves),
            open_loads=self._open_loads,
            namespaces=namespaces,
            **attrs.asdict(self._counters),
        )

    def story(self, namespace: Namespace, group: int, key: BlockHash) -> str:
        """What is known of one block, in words; for people and for failed assertions."""
        space = self._spaces.get(namespace)
        shelf = space.shelves.get(group) if space else None
        if shelf is None:
            return f"namespace {namespace!r} has no group {group}"
        row = shelf.keys.get(key)
        if row is None:
            return f"{key.hex()} is not here"
        missing = int(shelf.missing[row])
        slots = [int(column[row]) for column in shelf.offsets]
        up = int(shelf.parent[row])
        return (
            f"{key.hex()}: {'sealed' if missing == SEALED else f'{missing} slots missing'}, "
            f"slots at {slots}, {int(shelf.filling[row])} in flight, {int(shelf.pins[row])} pins, "
            f"{int(shelf.children[row])} children, used at {int(shelf.used[row])} of "
            f"{self._order.tick}, parent {shelf.hashes[up].hex() if up >= 0 else 'not here'}"
        )

    def validate(self) -> None:
        """Assert every invariant; costs far more than any operation."""
        lent: list[tuple[int, int]] = []
        for name, space in self._spaces.items():
            plans = [plan for plan in self._saves.values() if plan._space is space]
            assert len(plans) == space.open_plans
            for group, shelf in space.shelves.items():
                assert self._order.shelves[shelf.number] is shelf
                assert (shelf.namespace, shelf.group) == (name, group)
                shelf.validate()
                for column, slot_bytes in zip(shelf.offsets, shelf.slot_bytes, strict=True):
                    lent += [(offset, slot_bytes) for offset in column[column >= 0].tolist()]
        assert sum(len(space.shelves) for space in self._spaces.values()) == len(
            self._order.shelves
        )
        for plan in self._saves.values():
            for part, shelf in zip(plan.parts, plan._shelves, strict=True):
                size = shelf.slot_bytes[plan.order.slot_index]
                lent += [(offset, size) for offset in part.pool_offsets.tolist()]
        self._arena.validate(lent)
        self._order.validate()
        self._leases.validate()
        self._validate_pins()

    def _validate_pins(self) -> None:
        """Pins of a block = leases that hold it."""
        pins = {number: np.zeros_like(shelf.pins) for number, shelf in self._order.shelves.items()}
        reading = 0
        for lease in self._leases:
            pins[lease.shelf.number][lease.pinned] += 1
            reading += lease.reading
        for number, shelf in self._order.shelves.items():
            assert (pins[number] == shelf.pins).all(), "a pin belongs to no lease"
        assert reading == self._open_loads
