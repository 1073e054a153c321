"""The whole policy beside a naive model, many plans open at once."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import attrs
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from pegaflow.errors import BadRequest, LeaseExpired, ManifestMismatch
from pegaflow.model.keys import (
    BlockHash,
    InstanceId,
    LeaseToken,
    Manifest,
    Namespace,
    SessionId,
)
from pegaflow.model.messages import Ready, SaveRun
from pegaflow.policy.figures import ExpiredLease
from pegaflow.policy.host import Host, LoadPlan, SaveOrder, SavePlan
from pegaflow.testing.naive import Key, NaiveForest

Runs = list[tuple[int, list[int], int | None]]
"""(group, names, parent)"""
SIZE = 512
TTL, UNSEALED_TTL = 60.0, 30.0
# One namespace and group a shelf, in the order in which they are declared: (name, group, slots).
SHELVES = (("n", 0, 1), ("n", 1, 2), ("m", 0, 1))
NAMES = st.lists(st.integers(0, 11), min_size=1, max_size=6)


def name(number: int) -> BlockHash:
    return BlockHash(b"%016d" % number)


@attrs.define
class NaivePlan:
    """parts: (shelf, slot, hash, hash before it, run, index) of each pick in order."""

    parts: list[tuple[int, int, BlockHash, bytes, int, int]]
    instance: str


Opened = tuple[ExitStack, SavePlan, NaivePlan]


@attrs.define
class NaiveLease:
    token: LeaseToken
    owner: int
    instance: str
    keys: list[Key]
    expires: float
    ranks: int
    redeemed: set[int] = attrs.field(factory=set)
    reading: int = 0
    live: bool = True


Load = tuple[ExitStack, NaiveLease, LoadPlan, int, list[int]]


@attrs.define
class NaiveHost:
    """Room is a number of slots of one size; sealed blocks live in the naive forest."""

    room: int = 0
    forest: NaiveForest = attrs.field(factory=NaiveForest)
    unsealed: dict[Key, dict[int, bool]] = attrs.field(factory=dict)
    """Slots: True when it is here, False while it is being copied."""
    moved: dict[Key, tuple[float, str]] = attrs.field(factory=dict)
    evicted: int = 0

    def reserve(self, order: SaveOrder, shelves: list[int]) -> tuple[NaivePlan, int, int]:
        plan = NaivePlan([], order.instance)
        known = rejected = 0
        for run_index, (run, shelf) in enumerate(zip(order.runs, shelves, strict=True)):
            here = [h for h in run.hashes if self.is_here((shelf, h))]
            picks = [
                h
                for h in dict.fromkeys(run.hashes)
                if not self.has_slot((shelf, h), order.slot_index)
            ]
            known += len(run.hashes) - len(picks)
            self.forest.touch([(shelf, h) for h in here if (shelf, h) in self.forest.blocks])
            own = {(shelf, h) for h in [*here, run.parent]}
            self.make_room(len(picks), own)
            got = picks[: self.room]
            self.room -= len(got)
            rejected += len(picks) - len(got)
            for hash_ in got:
                self.unsealed.setdefault((shelf, hash_), {})[order.slot_index] = False
                i = run.hashes.index(hash_)
                before = run.hashes[i - 1] if i else run.parent
                plan.parts.append((shelf, order.slot_index, hash_, before, run_index, i))
        return plan, known, rejected

    def is_here(self, key: Key) -> bool:
        return key in self.forest.blocks or key in self.unsealed

    def has_slot(self, key: Key, slot: int) -> bool:
        return key in self.forest.blocks or slot in self.unsealed.get(key, {})

    def make_room(self, count: int, own: set[Key]) -> None:
        budget = 4 * (count - self.room)
        for key in own & set(self.forest.blocks):
            self.forest.blocks[key].pins += 1
        while self.room < count and budget > 0:
            short = count - self.room
            freed = 0
            while freed < min(short, budget) and (victim := self.forest.evict()) is not None:
                freed += SHELVES[victim[0]][2]
                self.evicted += 1
            freed = freed or self.reclaim(short, own)
            if not freed:
                break
            budget -= freed
            self.room += freed
        for key in own & set(self.forest.blocks):
            self.forest.blocks[key].pins -= 1

    def leftovers(self) -> list[Key]:
        return [k for k, slots in self.unsealed.items() if slots and all(slots.values())]

    def reclaim(self, short: int, own: set[Key]) -> int:
        freed = 0
        for shelf in range(len(SHELVES)):
            for key in sorted(self.leftovers(), key=lambda k: list(self.moved).index(k)):
                if key[0] == shelf and key not in own and freed < short:
                    freed += self.drop_unsealed(key)
        return freed

    def drop_unsealed(self, key: Key) -> int:
        del self.moved[key]
        return len(self.unsealed.pop(key))

    def settle(self, plan: NaivePlan, failed: list[bool], now: float) -> list[tuple[int, int]]:
        fresh: list[tuple[Key, bytes]] = []
        sealed: list[tuple[int, int]] = []
        for (shelf, slot, hash_, before, run, i), bad in zip(plan.parts, failed, strict=True):
            key = (shelf, hash_)
            slots = self.unsealed[key]
            if bad:
                self.room += 1
                del slots[slot]
                if not slots:
                    del self.unsealed[key]
                continue
            slots[slot] = True
            self.moved.pop(key, None)
            self.moved[key] = (now, plan.instance)
            if len(slots) == SHELVES[shelf][2] and all(slots.values()):
                del self.unsealed[key]
                del self.moved[key]
                fresh.append((key, before))
                sealed.append((run, i))
        self.forest.welcome(fresh)
        return sealed


class HostMachine(RuleBasedStateMachine):
    plans = Bundle("plans")
    leases = Bundle("leases")
    loads = Bundle("loads")

    def __init__(self) -> None:
        super().__init__()
        tokens = itertools.count()
        self.gone: list[Key] = []
        self.host = Host(
            make_token=lambda: LeaseToken(b"%016d" % next(tokens)),
            lease_ttl_s=TTL,
            unsealed_ttl_s=UNSEALED_TTL,
            on_evicted=lambda space, group, hashes: self.gone.extend(
                (self.number(space, group), hash_) for hash_ in hashes
            ),
        )
        self.model = NaiveHost()
        self.held: list[NaiveLease] = []
        self.now = 0.0
        self.pool_end = 0
        self.open: list[Opened] = []
        self.looked = 0

    @staticmethod
    def number(space: str, group: int) -> int:
        return [(s, g) for s, g, _ in SHELVES].index((space, group))

    @initialize()
    def set_up(self) -> None:
        for space in ("n", "m"):
            self.host.open_namespace(Namespace(space), Manifest({"model": space}), SessionId(0))
        for space, group, slots in SHELVES:
            for slot in range(slots):
                self.host.declare_slots(Namespace(space), group, slot, slots, SIZE)
        self.grow(8)

    @rule(slots=st.integers(1, 4))
    def grow(self, slots: int) -> None:
        if self.pool_end < 24:
            self.host.add_memory(self.pool_end * SIZE, slots * SIZE)
            self.pool_end += slots
            self.model.room += slots

    @rule(
        target=plans,
        runs=st.lists(
            st.tuples(st.integers(0, 1), NAMES, st.none() | st.integers(0, 11)), max_size=3
        ),
        space=st.sampled_from("nnm"),
        slot=st.integers(0, 1),
        instance=st.sampled_from("AB"),
    )
    def begin_save(self, runs: Runs, space: str, slot: int, instance: str) -> Opened:
        if space == "m":
            runs = [(0, names, parent) for _, names, parent in runs]
        if slot:
            runs = [run for run in runs if run[0] == 1]
        order = SaveOrder(
            Namespace(space),
            InstanceId(instance),
            slot,
            [
                SaveRun(
                    group,
                    [name(i) for i in names],
                    b"" if parent is None else name(parent),
                    np.arange(len(names), dtype=np.uint32),
                )
                for group, names, parent in runs
            ],
        )
        before = self.host.statistics()
        expected = self.model.reserve(order, [self.number(space, run.group) for run in order.runs])
        stack = ExitStack()
        plan = stack.enter_context(self.host.saving(order, self.now))
        naive, known, rejected = expected
        picked = [
            (part.run_index, order.runs[part.run_index].hashes[i])
            for part in plan.parts
            for i in part.picks.tolist()
        ]
        assert picked == [(run, hash_) for _, _, hash_, _, run, _ in naive.parts]
        assert (plan.known, plan.rejected) == (known, rejected)
        assert plan.blocks + known + rejected == sum(len(run.hashes) for run in order.runs)
        after = self.host.statistics()
        assert after.known - before.known == known
        assert after.rejections - before.rejections == rejected
        assert after.evictions == self.model.evicted
        opened = (stack, plan, naive)
        self.open.append(opened)
        return opened

    @rule(opened=consumes(plans), data=st.data())
    def commit(self, opened: Opened, data: st.DataObject) -> None:
        stack, plan, naive = opened
        count = len(naive.parts)
        failed = data.draw(
            st.just([False] * count) | st.lists(st.booleans(), min_size=count, max_size=count)
        )
        sealed = self.model.settle(naive, failed, self.now)
        done = plan.commit(np.array(failed, np.bool_), self.now)
        assert done.stored == failed.count(False)
        assert done.failed == failed.count(True)
        assert done.blocks == len(sealed)
        assert [(run, i) for run, where in done.parts for i in where.tolist()] == sealed
        stack.close()
        self.open.remove(opened)

    @rule(opened=consumes(plans))
    def abort(self, opened: Opened) -> None:
        stack, _, naive = opened
        self.model.settle(naive, [True] * len(naive.parts), self.now)
        stack.close()
        self.open.remove(opened)

    @rule(
        target=leases,
        shelf=st.integers(0, 2),
        names=NAMES,
        instance=st.sampled_from("AB"),
        owner=st.integers(1, 2),
        ranks=st.integers(1, 2),
    )
    def look(
        self, shelf: int, names: list[int], instance: str, owner: int, ranks: int
    ) -> NaiveLease | None:
        space, group, _ = SHELVES[shelf]
        hashes = [name(i) for i in names]
        keys = [(shelf, bytes(hash_)) for hash_ in hashes]
        count = next(
            (i for i, k in enumerate(keys) if k not in self.model.forest.blocks), len(keys)
        )
        answer = self.host.look(
            Namespace(space),
            group,
            hashes,
            b"",
            InstanceId(instance),
            SessionId(owner),
            ranks,
            self.now,
        )
        assert isinstance(answer, Ready)
        assert answer.hit_count == count
        self.looked += len(keys)
        if not count:
            assert answer.lease == b""
            return None
        self.model.forest.touch(keys[:count])
        for key in set(keys[:count]):
            self.model.forest.blocks[key].pins += 1
        lease = NaiveLease(answer.lease, owner, instance, keys[:count], self.now + TTL, ranks)
        self.held.append(lease)
        return lease

    @rule(
        target=loads,
        lease=leases,
        rank=st.integers(0, 1),
        instance=st.sampled_from("AAB"),
        data=st.data(),
    )
    def begin_load(
        self, lease: NaiveLease | None, rank: int, instance: str, data: st.DataObject
    ) -> Load | None:
        if lease is None or rank >= lease.ranks:
            return None
        shelf = lease.keys[0][0]
        good = (
            lease.live
            and lease.expires > self.now
            and lease.instance == instance
            and rank not in lease.redeemed
        )
        slot = rank % SHELVES[shelf][2]
        picked = data.draw(st.lists(st.integers(0, len(lease.keys) - 1), max_size=4))
        stack = ExitStack()
        try:
            plan = stack.enter_context(
                self.host.loading(
                    lease.token,
                    InstanceId(instance),
                    rank,
                    slot,
                    SHELVES[shelf][1],
                    np.array(picked, np.uint32),
                    self.now,
                )
            )
        except LeaseExpired:
            assert not good
            return None
        assert good
        lease.redeemed.add(rank)
        lease.reading += 1
        assert plan.slot_bytes == SIZE
        assert self.offsets(lease, slot, picked) == plan.pool_offsets.tolist()
        return stack, lease, plan, slot, picked

    def offsets(self, lease: NaiveLease, slot: int, picked: list[int]) -> list[int]:
        shelf = self.host._order.shelves[lease.keys[0][0]]
        rows = [shelf.keys[BlockHash(lease.keys[i][1])] for i in picked]
        return [int(shelf.offsets[slot][row]) for row in rows]

    @rule(load=consumes(loads))
    def end_load(self, load: Load | None) -> None:
        if load is None:
            return
        stack, lease, plan, slot, picked = load
        # The bytes are still the leased block's, whatever happened to the lease meanwhile.
        assert self.offsets(lease, slot, picked) == plan.pool_offsets.tolist()
        stack.close()
        lease.reading -= 1
        if lease.live:
            if len(lease.redeemed) == lease.ranks and not lease.reading:
                self.end(lease)
        elif not lease.reading:
            self.unpin(lease)

    def end(self, lease: NaiveLease) -> None:
        lease.live = False
        if not lease.reading:
            self.unpin(lease)

    def unpin(self, lease: NaiveLease) -> None:
        for key in set(lease.keys):
            self.model.forest.blocks[key].pins -= 1

    @rule(lease=leases, owner=st.integers(1, 2))
    def renew(self, lease: NaiveLease | None, owner: int) -> None:
        token = lease.token if lease else LeaseToken(b"no such token ..")
        good = lease and lease.live and lease.expires > self.now and lease.owner == owner
        try:
            assert self.host.renew(token, SessionId(owner), self.now) == TTL * 1000
        except LeaseExpired:
            assert not good
        else:
            assert good
            assert lease
            lease.expires = self.now + TTL

    @rule(some=st.lists(leases, max_size=3), owner=st.integers(1, 2))
    def release(self, some: list[NaiveLease | None], owner: int) -> None:
        tokens = [lease.token if lease else LeaseToken(b"") for lease in some]
        count = 0
        for lease in some:
            if lease and lease.live and lease.owner == owner:
                self.end(lease)
                count += 1
        assert self.host.release(tokens, SessionId(owner)) == count

    @rule(seconds=st.sampled_from([1.0, 10.0, 30.0, 60.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        over = [lease for lease in self.held if lease.live and lease.expires <= self.now]
        for lease in over:
            self.end(lease)
        stale = [
            key
            for key in self.model.leftovers()
            if self.model.moved[key][0] <= self.now - UNSEALED_TTL
        ]
        for key in stale:
            self.model.room += self.model.drop_unsealed(key)
        happened = self.host.expire(self.now)
        tokens = {one.token for one in happened if isinstance(one, ExpiredLease)}
        assert tokens == {lease.token for lease in over}
        blocks = sum(one.blocks for one in happened if not isinstance(one, ExpiredLease))
        assert blocks == len(stale)
        assert self.host.expire(self.now) == []

    @rule(owner=st.integers(1, 2))
    def drop_owner(self, owner: int) -> None:
        mine = [lease for lease in self.held if lease.live and lease.owner == owner]
        for lease in mine:
            self.end(lease)
        assert self.host.drop_owner(SessionId(owner)) == len(mine)

    @rule(instance=st.sampled_from("AB"))
    def drop_instance(self, instance: str) -> None:
        mine = [k for k in self.model.leftovers() if self.model.moved[k][1] == instance]
        for key in mine:
            self.model.room += self.model.drop_unsealed(key)
        assert self.host.drop_instance(InstanceId(instance)) == len(mine)

    @rule(limit=st.integers(1, 4))
    def background(self, limit: int) -> None:
        before = set(self.model.forest.blocks)
        used = self.pool_end - self.model.room
        done = self.host.evict_to_low_watermark(limit)
        assert done.blocks <= limit
        if used <= 0.9 * self.pool_end:
            assert done.blocks == 0
        for _ in range(done.blocks):
            key = self.model.forest.evict()
            assert key is not None
            self.model.room += SHELVES[key[0]][2]
            self.model.evicted += 1
        assert len(before) - len(self.model.forest.blocks) == done.blocks
        still_over = self.pool_end - self.model.room > 0.95 * self.pool_end
        if still_over and done.blocks < limit:
            assert not self.model.forest.evictable()

    @rule(space=st.none() | st.sampled_from("nm"))
    def clear(self, space: str | None) -> None:
        mine = {i for i, (s, _, _) in enumerate(SHELVES) if space in (None, s)}
        for key in self.model.leftovers():
            if key[0] in mine:
                self.model.room += self.model.drop_unsealed(key)
        leaving = {key for key in self.model.forest.clearable() if key[0] in mine}
        for key in leaving:
            del self.model.forest.blocks[key]
            self.model.room += SHELVES[key[0]][2]
            self.model.evicted += 1
        done = self.host.clear(None if space is None else Namespace(space))
        assert done.blocks == len(leaving)
        stayed = [*self.model.forest.blocks, *self.model.unsealed]
        assert done.still_referenced == sum(key[0] in mine for key in stayed)

    @invariant()
    def agrees(self) -> None:
        self.host.validate()
        sealed = set(self.model.forest.blocks)
        here = {
            (number, hash_): bool(shelf.missing[row] == 0)
            for number, shelf in self.host._order.shelves.items()
            for hash_, row in shelf.keys.items()
        }
        assert here == {
            **dict.fromkeys(sealed, True),
            **dict.fromkeys(self.model.unsealed, False),
        }
        self.agrees_on_the_forest()
        numbers = self.host.statistics()
        assert numbers.capacity_bytes - numbers.used_bytes == self.model.room * SIZE
        assert numbers.hits + numbers.misses == self.looked
        assert numbers.blocks == len(sealed)
        assert numbers.unsealed == len(self.model.unsealed)
        pinned = [block for block in self.model.forest.blocks.values() if block.pins]
        assert numbers.pinned_blocks == len(pinned)
        assert numbers.pinned_bytes == sum(SHELVES[b.key[0]][2] * SIZE for b in pinned)
        assert numbers.leases == sum(lease.live for lease in self.held)
        assert numbers.open_saves == len(self.open)
        assert len(self.gone) == numbers.evictions == self.model.evicted
        assert numbers.insertions - numbers.evictions == len(sealed)

    def agrees_on_the_forest(self) -> None:
        """Age, pins and parents: what the next eviction depends on."""
        for (number, hash_), block in self.model.forest.blocks.items():
            shelf = self.host._order.shelves[number]
            row = shelf.keys[BlockHash(hash_)]
            up = int(shelf.parent[row])
            assert int(shelf.used[row]) == block.used
            assert int(shelf.pins[row]) == block.pins
            assert (None if up < 0 else (number, shelf.hashes[up])) == block.parent


TestHost = HostMachine.TestCase
TestHost.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class MixedSizesMachine(RuleBasedStateMachine):
    """Blocks of several sizes share one pool: nothing overlaps, nothing leaks, counts add up."""

    plans = Bundle("plans")

    def __init__(self) -> None:
        super().__init__()
        tokens = itertools.count()
        self.host = Host(make_token=lambda: LeaseToken(b"%016d" % next(tokens)))
        self.host.add_memory(0, 8192)
        self.host.add_memory(8192, 4096)
        self.host.open_namespace(Namespace("n"), Manifest({}), SessionId(0))
        for group, size in enumerate((512, 1400, 5000)):
            self.host.declare_slots(Namespace("n"), group, 0, 1, size)

    @rule(target=plans, group=st.integers(0, 2), names=NAMES)
    def begin(self, group: int, names: list[int]) -> tuple[ExitStack, SavePlan]:
        run = SaveRun(group, [name(i) for i in names], b"", np.arange(len(names), dtype=np.uint32))
        stack = ExitStack()
        before = self.host.statistics()
        order = SaveOrder(Namespace("n"), InstanceId("i"), 0, [run])
        plan = stack.enter_context(self.host.saving(order, 0.0))
        assert plan.blocks + plan.known + plan.rejected == len(names)
        after = self.host.statistics()
        lacking = -(-(512, 1400, 5000)[group] // 512) * 512 * len(names)
        assert after.evicted_bytes - before.evicted_bytes <= 4 * lacking + 5120
        return stack, plan

    @rule(opened=consumes(plans), good=st.booleans())
    def end(self, opened: tuple[ExitStack, SavePlan], good: bool) -> None:
        stack, plan = opened
        if good:
            plan.commit(np.zeros(plan.blocks, np.bool_), 0.0)
        stack.close()

    @rule(group=st.integers(0, 2), names=NAMES)
    def look(self, group: int, names: list[int]) -> None:
        hashes = [name(i) for i in names]
        self.host.look(Namespace("n"), group, hashes, b"", InstanceId("i"), SessionId(1), 1, 0.0)

    @rule()
    def drop(self) -> None:
        self.host.drop_owner(SessionId(1))

    @invariant()
    def holds(self) -> None:
        self.host.validate()


TestMixedSizes = MixedSizesMachine.TestCase
TestMixedSizes.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def small_host(slots: int = 4, **options: float) -> Host:
    tokens = itertools.count()
    host = Host(make_token=lambda: LeaseToken(b"%016d" % next(tokens)), **options)  # type: ignore[arg-type]
    host.add_memory(0, slots * SIZE)
    host.open_namespace(Namespace("n"), Manifest({"model": "m"}), SessionId(0))
    host.declare_slots(Namespace("n"), 0, 0, 1, SIZE)
    return host


def test_a_namespace_has_one_identity_while_it_is_used() -> None:
    host = small_host()
    other = Manifest({"model": "other"})
    with pytest.raises(ManifestMismatch) as error:
        host.open_namespace(Namespace("n"), other, SessionId(1))
    assert error.value.field == "model"
    host.open_namespace(Namespace("n"), Manifest({"model": "m"}), SessionId(1))
    host.drop_owner(SessionId(0))
    with pytest.raises(ManifestMismatch):
        host.open_namespace(Namespace("n"), other, SessionId(2))
    host.drop_owner(SessionId(1))
    host.open_namespace(Namespace("n"), other, SessionId(2))
    # A forgotten namespace forgot its geometry too.
    host.declare_slots(Namespace("n"), 0, 0, 2, 2 * SIZE)
    host.validate()


def test_clearing_forgets_a_namespace_that_nobody_uses_any_more() -> None:
    host = small_host()
    run = SaveRun(0, [name(0)], b"", np.zeros(1, np.uint32))
    with host.saving(SaveOrder(Namespace("n"), InstanceId("i"), 0, [run]), 0.0) as plan:
        plan.commit(np.zeros(1, np.bool_), 0.0)
    host.drop_owner(SessionId(0))
    assert list(host.statistics().namespaces) == ["n"]
    assert host.clear().blocks == 1
    assert not host.statistics().namespaces
    host.validate()


def test_a_namespace_without_owner_is_replaced_when_it_is_empty() -> None:
    host = Host(make_token=lambda: LeaseToken(b"t" * 16))
    host.open_namespace(Namespace("n"), Manifest({"model": "m"}))
    host.open_namespace(Namespace("n"), Manifest({"model": "other"}))
    host.validate()


@pytest.mark.parametrize(
    ("group", "slot", "slots", "size", "field"),
    [
        (-1, 0, 1, 1, "group"),
        (1 << 16, 0, 1, 1, "group"),
        (0, 1, 1, 1, "slot-index"),
        (0, -1, 1, 1, "slot-index"),
        (0, 0, 5000, 1, "slot-index"),
        (0, 0, 1, 0, "slot-bytes"),
    ],
)
def test_impossible_geometry_is_refused(
    group: int, slot: int, slots: int, size: int, field: str
) -> None:
    host = small_host()
    with pytest.raises(BadRequest) as error:
        host.declare_slots(Namespace("n"), group, slot, slots, size)
    assert error.value.field == field


def test_what_was_not_opened_or_declared_is_refused() -> None:
    host = small_host()
    run = SaveRun(9, [name(0)], b"", np.zeros(1, np.uint32))
    for order in (
        SaveOrder(Namespace("x"), InstanceId("i"), 0, []),
        SaveOrder(Namespace("n"), InstanceId("i"), 0, [run]),
        SaveOrder(Namespace("n"), InstanceId("i"), 1, [attrs.evolve(run, group=0)]),
    ):
        with pytest.raises(BadRequest), host.saving(order, 0.0):
            pass
    with pytest.raises(BadRequest):
        host.clear(Namespace("x"))
    host.validate()


def test_story_tells_what_is_known() -> None:
    host = small_host()
    hashes = [name(0), name(1)]
    run = SaveRun(0, hashes, b"", np.arange(2, dtype=np.uint32))
    with host.saving(SaveOrder(Namespace("n"), InstanceId("i"), 0, [run]), 0.0) as plan:
        assert "1 in flight" in host.story(Namespace("n"), 0, name(0))
        plan.commit(np.zeros(2, np.bool_), 0.0)
    assert f"parent {name(0).hex()}" in host.story(Namespace("n"), 0, name(1))
    assert "not here" in host.story(Namespace("n"), 0, name(2))
    assert "no group" in host.story(Namespace("n"), 5, name(2))
    assert "no group" in host.story(Namespace("x"), 0, name(2))


def test_a_load_that_is_malformed_leaves_the_share_alone() -> None:
    host = small_host()
    run = SaveRun(0, [name(0)], b"", np.zeros(1, np.uint32))
    with host.saving(SaveOrder(Namespace("n"), InstanceId("i"), 0, [run]), 0.0) as plan:
        plan.commit(np.zeros(1, np.bool_), 0.0)
    ready = host.look(Namespace("n"), 0, [name(0)], b"", InstanceId("i"), SessionId(1), 1, 0.0)
    assert isinstance(ready, Ready)
    for rank, slot, group, position in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
        with pytest.raises(BadRequest):
            with host.loading(
                ready.lease, InstanceId("i"), rank, slot, group, np.array([position]), 0.0
            ):
                pass
    with host.loading(ready.lease, InstanceId("i"), 0, 0, 0, np.array([0]), 0.0) as load:
        assert len(load.pool_offsets) == 1
    assert host.statistics().pinned_blocks == 0
