"""Faults seen in the field (T numbers of the catalogue), as far as policy decides them."""

from __future__ import annotations

import itertools
import random
from contextlib import AbstractContextManager, ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegaflow.errors import LeaseExpired, ManifestMismatch
from pegaflow.model.keys import (
    BlockHash,
    InstanceId,
    LeaseToken,
    Manifest,
    Namespace,
    SessionId,
)
from pegaflow.model.messages import Ready, SaveRun
from pegaflow.policy.figures import Evicted, StaleBlocks
from pegaflow.policy.host import Host, LoadPlan, SaveOrder, Sealed

SIZE = 4096
SPACE, ENGINE = Namespace("n"), InstanceId("engine")
SCHEDULER = SessionId(1)
MANIFEST = Manifest({"model": "m", "dtype": "bfloat16"})


def name(number: int) -> BlockHash:
    return BlockHash(b"%016d" % number)


def chain(start: int, count: int) -> list[BlockHash]:
    return [name(start + i) for i in range(count)]


def open_host(blocks: int, *, slots: int = 1, boot: int = 0, **options: object) -> Host:
    tokens = itertools.count()
    host = Host(
        make_token=lambda: LeaseToken(b"%08d%08d" % (boot, next(tokens))),
        lease_ttl_s=60.0,
        **options,  # type: ignore[arg-type]
    )
    host.add_memory(0, blocks * slots * SIZE)
    host.open_namespace(SPACE, MANIFEST, SessionId(0))
    for slot in range(slots):
        host.declare_slots(SPACE, 0, slot, slots, SIZE)
    return host


def order(hashes: list[BlockHash], *, slot: int = 0, parent: bytes = b"") -> SaveOrder:
    run = SaveRun(0, hashes, parent, np.arange(len(hashes), dtype=np.uint32))
    return SaveOrder(SPACE, ENGINE, slot, [run])


def save(host: Host, hashes: list[BlockHash], *, slot: int = 0, parent: bytes = b"") -> Sealed:
    with host.saving(order(hashes, slot=slot, parent=parent), 0.0) as plan:
        return plan.commit(np.zeros(plan.blocks, np.bool_), 0.0)


def look(host: Host, hashes: list[BlockHash], *, now: float = 0.0, ranks: int = 1) -> Ready:
    answer = host.look(SPACE, 0, hashes, b"", ENGINE, SCHEDULER, ranks, now)
    assert isinstance(answer, Ready)
    return answer


def load(
    host: Host, lease: LeaseToken, count: int, *, now: float = 0.0, rank: int = 0, slot: int = 0
) -> AbstractContextManager[LoadPlan]:
    return host.loading(lease, ENGINE, rank, slot, 0, np.arange(count), now)


def test_t4_another_identity_never_hits_and_is_refused_by_name() -> None:
    host = open_host(8)
    save(host, chain(0, 4))
    with pytest.raises(ManifestMismatch) as error:
        host.open_namespace(SPACE, Manifest({**MANIFEST.fields, "dtype": "float16"}), SessionId(2))
    assert error.value.field == "dtype"
    with pytest.raises(ManifestMismatch) as error:
        host.declare_slots(SPACE, 0, 0, 1, 2 * SIZE)
    assert error.value.field == "slot-bytes"
    with pytest.raises(ManifestMismatch) as error:
        host.declare_slots(SPACE, 0, 0, 2, SIZE)
    assert error.value.field == "slot-count"
    host.open_namespace(Namespace("salted"), MANIFEST, SessionId(2))
    host.declare_slots(Namespace("salted"), 0, 0, 1, SIZE)
    host.declare_slots(SPACE, 1, 0, 1, SIZE)
    for space, group in ((Namespace("salted"), 0), (SPACE, 1)):
        answer = host.look(space, group, chain(0, 4), b"", ENGINE, SCHEDULER, 1, 0.0)
        assert answer == Ready(0, LeaseToken(b""), 0)
    host.validate()


@pytest.mark.parametrize("renewed", [False, True])
def test_t5_a_reader_that_stalls_past_its_lease_is_told_and_never_reads_other_bytes(
    renewed: bool,
) -> None:
    host = open_host(4)
    save(host, chain(0, 4))
    ready = look(host, chain(0, 4))
    if renewed:
        host.renew(ready.lease, SCHEDULER, 59.0)
    host.expire(61.0)
    save(host, chain(100, 4))  # writers want the space
    if renewed:
        with load(host, ready.lease, 4, now=61.0) as plan:
            assert len(plan.pool_offsets) == 4
    else:
        with pytest.raises(LeaseExpired), load(host, ready.lease, 4, now=61.0):
            pass
    assert look(host, chain(100, 4)).hit_count == (0 if renewed else 4)
    host.validate()


def test_t5_an_expired_lease_is_refused_even_before_the_janitor_came() -> None:
    host = open_host(4)
    save(host, chain(0, 4))
    ready = look(host, chain(0, 4))
    with pytest.raises(LeaseExpired), load(host, ready.lease, 4, now=60.0):
        pass
    with pytest.raises(LeaseExpired):
        host.renew(ready.lease, SCHEDULER, 60.0)


def test_t5_a_copy_that_began_in_time_keeps_its_blocks_past_the_lease() -> None:
    host = open_host(4)
    save(host, chain(0, 4))
    ready = look(host, chain(0, 4))
    with load(host, ready.lease, 4, now=59.0) as plan:
        assert len(host.expire(100.0)) == 1
        host.drop_owner(SCHEDULER)
        stored = save(host, chain(100, 4))
        assert stored.stored == 0
        assert host.clear().still_referenced == 4
        assert len(plan.pool_offsets) == 4
        host.validate()
    assert save(host, chain(100, 4)).stored == 4
    host.validate()


def test_t6_sixty_four_writers_of_one_key_leave_one_copy_that_can_be_read() -> None:
    host = open_host(200)
    dice = random.Random(6)
    with ExitStack() as stack:
        plans = [stack.enter_context(host.saving(order(chain(0, 3)), 0.0)) for _ in range(64)]
        assert [plan.blocks for plan in plans] == [3] + [0] * 63
        assert all(plan.known == 3 for plan in plans[1:])
        assert look(host, chain(0, 3)).hit_count == 0, "visible before it was whole"
        dice.shuffle(plans)
        for plan in plans[:32]:
            plan.abort(0.0)
        again = stack.enter_context(host.saving(order(chain(0, 3)), 0.0))
        for plan in [*plans[32:], again]:
            plan.commit(np.zeros(plan.blocks, np.bool_), 0.0)
    assert host.statistics().used_bytes == 3 * SIZE
    ready = look(host, chain(0, 3))
    assert ready.hit_count == 3
    with load(host, ready.lease, 3) as readable:
        assert (readable.pool_offsets >= 0).all()
    host.validate()


def test_t6_two_plans_for_the_same_slot_and_the_first_one_dies() -> None:
    host = open_host(8)
    with host.saving(order(chain(0, 2)), 0.0) as first:
        with host.saving(order(chain(0, 2)), 0.0) as second:
            assert (first.blocks, second.blocks, second.known) == (2, 0, 2)
        first.abort(0.0)
    assert host.statistics().used_bytes == 0
    assert save(host, chain(0, 2)).blocks == 2


@given(
    hashes=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    saved=st.lists(st.integers(0, 20), max_size=20),
    evicted=st.integers(0, 20),
)
def test_t7_what_look_says_is_what_load_finds(
    hashes: list[int], saved: list[int], evicted: int
) -> None:
    host = open_host(64)
    save(host, [name(i) for i in saved])
    victims, _ = host._order.choose(1 << 60, evicted) if evicted else ([], 0)
    host._remove(victims)
    asked = [name(i) for i in hashes]
    ready = look(host, asked)
    here = [look(host, [hash_]).hit_count for hash_ in asked]
    assert ready.hit_count == next((i for i, hit in enumerate(here) if not hit), len(asked))
    if ready.hit_count:
        with load(host, ready.lease, ready.hit_count) as plan:
            assert (plan.pool_offsets >= 0).all()
            assert (plan.pool_offsets < 64 * SIZE).all()
    host.drop_owner(SCHEDULER)
    host.validate()
    assert host.statistics().pinned_blocks == 0
    assert host.statistics().leases == 0


def test_t7_pins_return_to_zero_however_leases_end() -> None:
    host = open_host(8)
    save(host, chain(0, 8))
    used, released, expired, dropped = (look(host, chain(0, 8), ranks=2) for _ in range(4))
    for rank in range(2):
        with load(host, used.lease, 8, rank=rank):
            pass
    with pytest.raises(LeaseExpired), load(host, used.lease, 8, rank=0):
        pass
    assert host.release([released.lease, released.lease, used.lease], SCHEDULER) == 1
    assert host.release([dropped.lease], SessionId(99)) == 0
    assert host.drop_owner(SCHEDULER) == 2
    assert host.expire(1000.0) == []
    assert host.statistics().pinned_bytes == 0
    assert host.release([expired.lease], SCHEDULER) == 0
    host.validate()


def test_t7_a_rank_redeems_once_and_only_for_its_instance() -> None:
    host = open_host(8)
    save(host, chain(0, 8))
    ready = look(host, chain(0, 8), ranks=2)
    with load(host, ready.lease, 8, rank=0):
        with pytest.raises(LeaseExpired), load(host, ready.lease, 8, rank=0):
            pass
    stranger = host.loading(ready.lease, InstanceId("other"), 1, 0, 0, np.arange(8), 0.0)
    with pytest.raises(LeaseExpired, match="another instance"), stranger:
        pass
    with load(host, ready.lease, 8, rank=1):
        pass
    assert host.statistics().pinned_blocks == 0


@pytest.mark.parametrize("stage", ["saving", "loading", "leased"])
def test_t13_whatever_stage_is_cancelled_resources_return(stage: str) -> None:
    host = open_host(8)
    save(host, chain(0, 4))
    baseline = host.statistics()
    if stage == "saving":
        with pytest.raises(KeyboardInterrupt), host.saving(order(chain(0, 8)), 0.0):
            raise KeyboardInterrupt
    else:
        ready = look(host, chain(0, 4))
        if stage == "loading":
            with pytest.raises(KeyboardInterrupt), load(host, ready.lease, 4):
                raise KeyboardInterrupt
        else:
            host.release([ready.lease], SCHEDULER)
    after = host.statistics()
    for field in ("used_bytes", "blocks", "unsealed", "pinned_blocks", "leases", "open_saves"):
        assert getattr(after, field) == getattr(baseline, field), field
    host.validate()


def test_t13_a_late_second_completion_is_a_bug_and_a_late_abort_is_ignored() -> None:
    host = open_host(8)
    with host.saving(order(chain(0, 4)), 0.0) as plan:
        plan.commit(np.zeros(4, np.bool_), 0.0)
        plan.abort(0.0)
        with pytest.raises(AssertionError, match="twice"):
            plan.commit(np.zeros(4, np.bool_), 0.0)
    assert look(host, chain(0, 4)).hit_count == 4


def test_t15_a_token_of_an_earlier_boot_is_refused() -> None:
    before, after = open_host(8, boot=1), open_host(8, boot=2)
    for host in (before, after):
        save(host, chain(0, 4))
    old, new = look(before, chain(0, 4)), look(after, chain(0, 4))
    assert old.lease != new.lease
    with pytest.raises(LeaseExpired), load(after, old.lease, 4):
        pass
    with pytest.raises(LeaseExpired):
        after.renew(old.lease, SCHEDULER, 0.0)
    assert after.release([old.lease], SCHEDULER) == 0


def test_t19_writes_go_on_with_ninety_per_cent_pinned() -> None:
    blocks = 1000
    host = open_host(blocks)
    for start in range(0, 900, 90):
        save(host, chain(start, 90))
        assert look(host, chain(start, 90)).hit_count == 90
    stored = rejected = 0
    for i in range(500):  # five times the capacity
        with host.saving(order(chain(10_000 + 10 * i, 10)), 0.0) as plan:
            rejected += plan.rejected
            stored += plan.commit(np.zeros(plan.blocks, np.bool_), 0.0).stored
    assert (stored, rejected) == (5000, 0)
    with host.saving(order(chain(90_000, 150)), 0.0) as plan:
        assert (plan.blocks, plan.rejected) == (100, 50)
        assert plan.parts[0].picks.tolist() == list(range(100)), "not the first in prefix order"
        plan.commit(np.zeros(100, np.bool_), 0.0)
    assert host.statistics().rejections == 50
    host.validate()


def test_t19_nothing_leaves_when_it_would_not_help() -> None:
    host = open_host(8)
    host.declare_slots(SPACE, 1, 0, 1, 9 * SIZE)
    save(host, chain(0, 8))
    big = SaveRun(1, [name(100)], b"", np.zeros(1, np.uint32))
    with host.saving(SaveOrder(SPACE, ENGINE, 0, [big]), 0.0) as plan:
        assert (plan.blocks, plan.rejected) == (0, 1)
    assert look(host, chain(0, 8)).hit_count == 8
    assert host.statistics().evictions == 0
    host.validate()


def test_t19_a_prompt_does_not_evict_its_own_head() -> None:
    host = open_host(4)
    save(host, chain(0, 3))
    done = save(host, chain(0, 8))
    assert done.stored == 1
    assert look(host, chain(0, 8)).hit_count == 4
    # The same when the head is only named as the parent.
    other = open_host(2)
    save(other, [name(0)])
    assert save(other, chain(1, 4), parent=name(0)).stored == 1
    assert look(other, chain(0, 5)).hit_count == 2


@pytest.mark.slow
def test_t19_eviction_of_a_million_entries_costs_the_same_each() -> None:
    """Counted in steps of the heap; the time of a step is a logarithm's."""
    host = open_host(1_000_000)
    for start in range(0, 1_000_000, 500):
        save(host, chain(start, 500))
    costs = []
    for start in range(1_000_000, 1_300_000, 100_000):
        steps = host._order.heap_steps
        for i in range(0, 100_000, 500):
            assert save(host, chain(start + i, 500)).stored == 500
        costs.append((host._order.heap_steps - steps) / 100_000)
    assert host.statistics().evictions == 300_000
    assert max(costs) <= 2 / 500, costs


def test_t20_what_dead_clients_held_comes_back() -> None:
    host = open_host(16, slots=2)
    save(host, chain(0, 4), slot=0)
    save(host, chain(0, 4), slot=1)
    save(host, chain(50, 4), slot=0)  # half puts
    assert look(host, chain(0, 4), ranks=2).hit_count == 4
    assert host.statistics().pinned_bytes == 8 * SIZE
    assert host.drop_owner(SCHEDULER) == 1
    assert host.drop_instance(ENGINE) == 4
    numbers = host.statistics()
    assert (numbers.pinned_bytes, numbers.unsealed, numbers.leases) == (0, 0, 0)
    assert numbers.used_bytes == 8 * SIZE
    host.validate()


def test_t20_without_any_notice_time_alone_brings_it_back() -> None:
    host = open_host(16, slots=2)
    save(host, chain(0, 4), slot=0)
    save(host, chain(0, 4), slot=1)
    save(host, chain(50, 4), slot=0)
    look(host, chain(0, 4), ranks=2)
    assert host.expire(59.0) == []
    assert len(host.expire(60.0)) == 1
    assert host.statistics().pinned_bytes == 0
    assert host.expire(300.0) == [StaleBlocks(SPACE, 0, 4)]
    assert host.statistics().unsealed == 0
    host.validate()


def test_t21_a_listener_that_throws_stops_neither_eviction_nor_accounting() -> None:
    heard: list[int] = []

    def listener(space: Namespace, group: int, hashes: object) -> None:
        heard.append(group)
        if group == 0:
            raise OSError("cannot delete")

    host = open_host(8, on_evicted=listener)
    host.declare_slots(SPACE, 1, 0, 1, SIZE)
    save(host, chain(0, 4))
    other = SaveRun(1, chain(100, 4), b"", np.arange(4, dtype=np.uint32))
    with host.saving(SaveOrder(SPACE, ENGINE, 0, [other]), 0.0) as plan:
        plan.commit(np.zeros(4, np.bool_), 0.0)
    assert save(host, chain(200, 8)).stored == 8
    assert sorted(heard) == [0, 1]
    numbers = host.statistics()
    assert (numbers.evictions, numbers.callback_failures, numbers.blocks) == (8, 1, 8)
    host.validate()


def test_t21_a_bug_in_a_listener_is_not_swallowed() -> None:
    def listener(space: Namespace, group: int, hashes: object) -> None:
        raise AssertionError("bug")

    host = open_host(4, on_evicted=listener)
    save(host, chain(0, 4))
    with pytest.raises(AssertionError, match="bug"):
        host.clear()
    assert host.statistics().used_bytes == 0


def test_slots_of_two_ranks_seal_a_block_and_a_failed_one_may_be_saved_again() -> None:
    host = open_host(8, slots=2)
    save(host, chain(0, 3), slot=0)
    assert look(host, chain(0, 3)).hit_count == 0
    with host.saving(order(chain(0, 3), slot=1), 0.0) as plan:
        done = plan.commit(np.array([False, True, False]), 0.0)
    assert (done.stored, done.failed, done.blocks) == (2, 1, 2)
    assert look(host, chain(0, 3)).hit_count == 1
    duplicate = save(host, chain(0, 3), slot=0)
    assert (duplicate.stored, duplicate.blocks) == (0, 0)
    assert save(host, chain(0, 3), slot=1).blocks == 1
    assert look(host, chain(0, 3)).hit_count == 3
    host.validate()


def test_under_pressure_unsealed_leftovers_go_but_not_those_being_completed() -> None:
    host = open_host(4, slots=2)
    save(host, chain(0, 4), slot=0)
    save(host, chain(10, 4), slot=0)
    assert host.statistics().unsealed == 8
    done = save(host, chain(10, 4), slot=1)
    assert done.blocks == 4
    assert host.statistics().unsealed_reclaimed == 4
    assert look(host, chain(10, 4)).hit_count == 4
    host.validate()


def test_background_eviction_works_between_the_two_marks() -> None:
    host = open_host(100)
    save(host, chain(0, 95))
    assert host.evict_to_low_watermark(100) == Evicted()
    save(host, chain(1000, 1))
    assert host.evict_to_low_watermark(4).blocks == 4
    assert host.evict_to_low_watermark(4).blocks == 2
    assert host.evict_to_low_watermark(4).blocks == 0
    assert host.statistics().used_bytes == 90 * SIZE


def test_clear_respects_leases_and_reports_them() -> None:
    host = open_host(16)
    save(host, chain(0, 4))
    save(host, chain(100, 4))
    ready = look(host, chain(0, 2))
    done = host.clear(SPACE)
    assert (done.blocks, done.still_referenced) == (6, 2)
    with load(host, ready.lease, 2):
        pass
    assert host.clear() == Evicted(2, 2 * SIZE)
    host.validate()


def test_reclaiming_nothing_helps_when_it_is_too_little() -> None:
    host = open_host(4, slots=2)
    host.declare_slots(SPACE, 1, 0, 1, 20 * SIZE)
    save(host, chain(0, 2), slot=0)
    big = SaveRun(1, [name(100)], b"", np.zeros(1, np.uint32))
    with host.saving(SaveOrder(SPACE, ENGINE, 0, [big]), 0.0) as plan:
        assert plan.rejected == 1
    assert host.statistics().unsealed == 2


def test_t19_one_allocation_evicts_a_bounded_amount_of_its_neighbours() -> None:
    """Two sizes in one pool: no hole for the large block appears before a whole slab is empty."""
    host = Host(make_token=lambda: LeaseToken(b"t" * 16), align_bytes=SIZE)
    for slab in range(64):
        host.add_memory(slab * 2 * SIZE, 2 * SIZE)
    host.open_namespace(SPACE, MANIFEST, SessionId(0))
    host.declare_slots(SPACE, 0, 0, 1, SIZE)
    host.declare_slots(SPACE, 1, 0, 1, 2 * SIZE)
    # Saved apart, so that the older half of every slab is older than every younger half.
    for start in (0, 64):
        for i in range(64):
            save(host, [name(start + i)])
    owners: dict[int, list[int]] = {}
    shelf = host._order.shelves[0]
    for key, row in shelf.keys.items():
        owners.setdefault(int(shelf.offsets[0][row]) // (2 * SIZE), []).append(int(key))
    first_of_each = [BlockHash(b"%016d" % min(both)) for both in owners.values()]
    for key in first_of_each:
        look(host, [key])
        host.drop_leases(SCHEDULER)
    big = SaveRun(1, [name(1000)], b"", np.zeros(1, np.uint32))
    with host.saving(SaveOrder(SPACE, ENGINE, 0, [big]), 0.0) as plan:
        assert (plan.blocks, plan.rejected) == (0, 1)
    assert 2 <= host.statistics().evictions <= 4 * 2
    host.validate()


def test_a_save_counts_as_a_use_of_what_it_finds() -> None:
    host = open_host(4)
    save(host, chain(0, 2))
    save(host, chain(100, 2))
    assert save(host, chain(0, 2)).stored == 0
    save(host, chain(200, 2))
    assert look(host, chain(0, 2)).hit_count == 2
    assert look(host, chain(100, 2)).hit_count == 0


def test_a_hash_that_is_repeated_in_a_query_is_pinned_once() -> None:
    host = open_host(4)
    save(host, chain(0, 2))
    ready = look(host, [name(0), name(1), name(0), name(1)])
    assert ready.hit_count == 4
    assert host.statistics().pinned_blocks == 2
    with load(host, ready.lease, 4) as plan:
        assert plan.pool_offsets.tolist()[:2] == plan.pool_offsets.tolist()[2:]
        host.validate()
    assert host.statistics().pinned_blocks == 0
    host.validate()


def test_clear_keeps_the_head_of_a_leased_tail() -> None:
    host = open_host(8)
    save(host, chain(0, 4))
    answer = host.look(SPACE, 0, [name(2)], name(1), ENGINE, SCHEDULER, 1, 0.0)
    assert isinstance(answer, Ready)
    assert host.clear() == Evicted(1, SIZE, 0, 3)
    host.release([answer.lease], SCHEDULER)
    assert look(host, chain(0, 4)).hit_count == 3
    host.validate()


def test_a_renewed_lease_expires_after_its_new_time() -> None:
    host = open_host(4)
    save(host, chain(0, 4))
    ready = look(host, chain(0, 4))
    host.renew(ready.lease, SCHEDULER, 50.0)
    assert host.expire(60.0) == []
    host.validate()
    assert host.expire(109.0) == []
    assert len(host.expire(110.0)) == 1
    assert host.statistics().pinned_blocks == 0


def test_only_as_many_leftovers_are_given_up_as_room_is_needed_the_oldest_first() -> None:
    host = open_host(8, slots=2)
    save(host, chain(0, 8))
    save(host, chain(10, 8))
    assert save(host, chain(20, 3)).stored == 3
    assert host.statistics().unsealed_reclaimed == 3
    shelf = host._order.shelves[0]
    assert set(shelf.keys) == {*chain(3, 5), *chain(10, 8), *chain(20, 3)}
