"""Slots become blocks: a shelf beside a dict of dicts."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pegaflow.errors import BadRequest, ManifestMismatch
from pegaflow.model.keys import BlockHash, InstanceId, Namespace
from pegaflow.policy import sealing
from pegaflow.policy.index import Partial, Rows, Shelf

SLOTS = 3
NAMES = st.integers(0, 9)


def name(number: int) -> BlockHash:
    return BlockHash(b"%016d" % number)


@attrs.define
class Claim:
    slot: int
    hashes: list[BlockHash]
    rows: Rows
    offsets: Rows


class SealingMachine(RuleBasedStateMachine):
    """Model: hash -> slot -> offset, or None while it is being copied."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(0, Namespace("n"), 0, SLOTS)
        for slot in range(SLOTS):
            self.shelf.declare(slot, SLOTS, 512, 512)
        self.model: dict[BlockHash, dict[int, int | None]] = {}
        self.moved: dict[BlockHash, tuple[float, str]] = {}
        self.clock = 0.0
        self.next_offset = 0

    @rule(target=claims, slot=st.integers(0, SLOTS - 1), names=st.lists(NAMES, max_size=6))
    def begin(self, slot: int, names: list[int]) -> Claim:
        hashes = [name(i) for i in names]
        expected = [h for h in dict.fromkeys(hashes) if slot not in self.model.get(h, {})]
        rows, picks = sealing.wanted(self.shelf, slot, hashes)
        assert [hashes[i] for i in picks] == expected
        assert sorted(picks) == list(picks)
        taken = sealing.claim(self.shelf, slot, hashes, rows, picks)
        for hash_ in expected:
            self.model.setdefault(hash_, {})[slot] = None
        offsets = np.arange(self.next_offset, self.next_offset + len(picks))
        self.next_offset += len(picks)
        return Claim(slot, expected, taken, offsets)

    @rule(claim=consumes(claims), data=st.data(), who=st.sampled_from("AB"))
    def settle(self, claim: Claim, data: st.DataObject, who: str) -> None:
        """All, some or none failed: complete and abort are the same step with another mask."""
        count = len(claim.hashes)
        failed = data.draw(
            st.just([False] * count)
            | st.just([True] * count)
            | st.lists(st.booleans(), min_size=count, max_size=count)
        )
        self.clock += 1
        done = sealing.settle(
            self.shelf,
            claim.slot,
            claim.rows,
            claim.offsets,
            np.array(failed, np.bool_),
            Partial(self.clock, InstanceId(who)),
        )
        sealed = []
        for i, hash_ in enumerate(claim.hashes):
            slots = self.model[hash_]
            assert slots[claim.slot] is None
            if failed[i]:
                del slots[claim.slot]
                if not slots:
                    del self.model[hash_]
                continue
            slots[claim.slot] = int(claim.offsets[i])
            self.moved.pop(hash_, None)
            self.moved[hash_] = (self.clock, who)
            if self.is_sealed(hash_):
                sealed.append(i)
        assert done.sealed.tolist() == sealed
        assert done.committed_count == failed.count(False)

    def is_sealed(self, hash_: BlockHash) -> bool:
        slots = self.model.get(hash_, {})
        return len(slots) == SLOTS and None not in slots.values()

    @rule(back=st.none() | st.integers(0, 6), who=st.none() | st.sampled_from("AB"))
    def reclaim(self, back: int | None, who: str | None) -> None:
        since = None if back is None else self.clock - back
        rows = sealing.reclaimable(
            self.shelf, since=since, instance=None if who is None else InstanceId(who)
        )
        expected = [
            hash_
            for hash_, (moved, by) in self.moved.items()
            if self.is_leftover(hash_) and (since is None or moved <= since) and who in (None, by)
        ]
        assert [self.shelf.hashes[row] for row in rows] == expected
        self.shelf.forget(rows)
        for hash_ in expected:
            del self.model[hash_]
            del self.moved[hash_]

    def is_leftover(self, hash_: BlockHash) -> bool:
        slots = self.model.get(hash_, {})
        return bool(slots) and None not in slots.values() and len(slots) < SLOTS

    @rule(names=st.lists(NAMES, max_size=6))
    def look(self, names: list[int]) -> None:
        hashes = [name(i) for i in names]
        count = next((i for i, h in enumerate(hashes) if not self.is_sealed(h)), len(hashes))
        rows = self.shelf.sealed_prefix(hashes)
        assert [self.shelf.hashes[row] for row in rows] == hashes[:count]

    @invariant()
    def agrees(self) -> None:
        self.shelf.validate()
        assert set(self.shelf.keys) == set(self.model)
        for hash_, slots in self.model.items():
            row = self.shelf.keys[hash_]
            for slot in range(SLOTS):
                here = int(self.shelf.offsets[slot][row])
                expected = slots.get(slot, -1)
                assert here == (-2 if expected is None else expected)


TestSealing = SealingMachine.TestCase
TestSealing.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_slot_is_settled_once() -> None:
    shelf = Shelf(0, Namespace("n"), 0, 1)
    shelf.declare(0, 1, 512, 512)
    hashes = [name(0)]
    rows = sealing.claim(shelf, 0, hashes, *sealing.wanted(shelf, 0, hashes))
    none = np.zeros(1, np.bool_)
    sealing.settle(shelf, 0, rows, np.zeros(1, np.int64), none, Partial(0.0, InstanceId("i")))
    with pytest.raises(AssertionError, match="twice"):
        sealing.settle(shelf, 0, rows, np.ones(1, np.int64), none, Partial(0.0, InstanceId("i")))
    assert shelf.offsets[0][rows].tolist() == [0]


def test_geometry_is_fixed_by_the_first_who_declares_it() -> None:
    shelf = Shelf(0, Namespace("n"), 0, 2)
    shelf.declare(0, 2, 500, 512)
    shelf.declare(0, 2, 500, 512)
    assert shelf.block_bytes == 512
    with pytest.raises(ManifestMismatch) as count:
        shelf.declare(0, 3, 500, 512)
    assert count.value.field == "slot-count"
    with pytest.raises(ManifestMismatch) as size:
        shelf.declare(0, 2, 501, 512)
    assert size.value.field == "slot-bytes"
    with pytest.raises(BadRequest):
        shelf.check_slot(1)
    with pytest.raises(BadRequest):
        shelf.check_slot(-1)
    assert shelf.check_slot(0) == 500


def test_rows_are_used_again_and_columns_grow() -> None:
    shelf = Shelf(0, Namespace("n"), 0, 1)
    first = shelf.add([name(i) for i in range(300)])
    assert sorted(first.tolist()) == list(range(300))
    shelf.forget(first.tolist())
    again = shelf.add([name(i) for i in range(1000, 1300)])
    assert len(shelf.missing) == 300
    assert len(set(again.tolist())) == 300
    shelf.add([name(i) for i in range(2000, 2010)])
    assert len(shelf.missing) == 600
