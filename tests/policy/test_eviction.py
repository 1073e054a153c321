"""Leaf-first LRU beside a naive forest that sorts everything each time."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pegaflow.model.keys import BlockHash, InstanceId, Namespace
from pegaflow.policy import sealing
from pegaflow.policy.eviction import Fresh, LeafFirst
from pegaflow.policy.index import Partial, Shelf
from pegaflow.testing.naive import Key, NaiveForest

BLOCK_BYTES = (512, 1024)
NAMES = st.integers(0, 15)
STAMP = Partial(0.0, InstanceId("i"))


def name(number: int) -> BlockHash:
    return BlockHash(b"%016d" % number)


def seal(order: LeafFirst, runs: list[tuple[Shelf, list[BlockHash], bytes]]) -> list[Key]:
    """What a save does, without an arena; returns what was new, in order."""
    fresh: list[Fresh] = []
    keys: list[Key] = []
    for shelf, hashes, parent in runs:
        rows, picks = sealing.wanted(shelf, 0, hashes)
        taken = sealing.claim(shelf, 0, hashes, rows, picks)
        none = np.zeros(len(taken), np.bool_)
        done = sealing.settle(shelf, 0, taken, np.arange(len(taken)), none, STAMP)
        assert len(done.sealed) == len(picks)
        before = [hashes[i - 1] if i else parent for i in picks.tolist()]
        fresh.append((shelf, taken, [bytes(hash_) for hash_ in before]))
        keys += [(shelf.number, hashes[i]) for i in picks.tolist()]
    order.welcome(fresh)
    return keys


class EvictionMachine(RuleBasedStateMachine):
    pinned = Bundle("pinned")

    def __init__(self) -> None:
        super().__init__()
        self.order = LeafFirst()
        self.model = NaiveForest()
        for number, size in enumerate(BLOCK_BYTES):
            shelf = Shelf(number, Namespace("n"), number, 1)
            shelf.declare(0, 1, size, size)
            self.order.shelves[number] = shelf

    @rule(
        runs=st.lists(
            st.tuples(
                st.integers(0, 1),
                st.lists(NAMES, min_size=1, max_size=6),
                st.none() | NAMES,
            ),
            min_size=1,
            max_size=3,
        )
    )
    def save(self, runs: list[tuple[int, list[int], int | None]]) -> None:
        """Any graph of parents that a client can claim, rings and forks included."""
        asked = [
            (
                self.order.shelves[number],
                [name(i) for i in names],
                b"" if parent is None else name(parent),
            )
            for number, names, parent in runs
        ]
        expected: list[tuple[Key, bytes]] = []
        for shelf, hashes, parent in asked:
            for i, hash_ in enumerate(hashes):
                key = (shelf.number, hash_)
                if key not in self.model.blocks and key not in [k for k, _ in expected]:
                    expected.append((key, hashes[i - 1] if i else parent))
        assert seal(self.order, asked) == [key for key, _ in expected]
        self.model.welcome(expected)

    @rule(data=st.data(), number=st.integers(0, 1))
    def touch(self, data: st.DataObject, number: int) -> None:
        shelf = self.order.shelves[number]
        if shelf.keys:
            hashes = data.draw(st.lists(st.sampled_from(sorted(shelf.keys)), max_size=5))
            distinct = self.order.touch(shelf, shelf.find(hashes))
            assert distinct == (len(set(hashes)) == len(hashes))
            self.model.touch([(number, hash_) for hash_ in hashes])

    @rule(target=pinned, data=st.data(), number=st.integers(0, 1))
    def pin(self, data: st.DataObject, number: int) -> list[Key]:
        shelf = self.order.shelves[number]
        if not shelf.keys:
            return []
        hashes = data.draw(
            st.lists(st.sampled_from(sorted(shelf.keys)), unique=True, min_size=1, max_size=3)
        )
        self.order.pin(shelf, shelf.find(hashes))
        keys = [(number, bytes(hash_)) for hash_ in hashes]
        for key in keys:
            self.model.blocks[key].pins += 1
        return keys

    @rule(keys=consumes(pinned))
    def unpin(self, keys: list[Key]) -> None:
        if keys:
            shelf = self.order.shelves[keys[0][0]]
            self.order.unpin(shelf, shelf.find([BlockHash(hash_) for _, hash_ in keys]))
            for key in keys:
                self.model.blocks[key].pins -= 1

    @rule(need=st.integers(0, 6000), limit=st.integers(1, 12), keep=st.booleans())
    def evict(self, need: int, limit: int, keep: bool) -> None:
        forest = copy.deepcopy(self.model)
        expected: list[Key] = []
        freed = 0
        while freed < need and len(expected) < limit and (key := forest.evict()) is not None:
            expected.append(key)
            freed += BLOCK_BYTES[key[0]]
        victims, size = self.order.choose(need, limit)
        assert [(shelf.number, shelf.hashes[row]) for shelf, row in victims] == expected
        assert size == freed
        if keep:
            self.order.restore(victims)
            return
        self.model = forest
        for shelf, row in victims:
            shelf.sealed_count -= 1
            shelf.forget([row])

    @invariant()
    def agrees(self) -> None:
        self.order.validate()
        for shelf in self.order.shelves.values():
            shelf.validate()
        keys = {(s.number, hash_) for s in self.order.shelves.values() for hash_ in s.keys}
        assert keys == set(self.model.blocks)
        for (number, hash_), block in self.model.blocks.items():
            shelf = self.order.shelves[number]
            row = shelf.keys[BlockHash(hash_)]
            up = int(shelf.parent[row])
            assert (None if up < 0 else (number, shelf.hashes[up])) == block.parent
            assert int(shelf.used[row]) == block.used


TestEviction = EvictionMachine.TestCase
TestEviction.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


def one_shelf() -> tuple[LeafFirst, Shelf]:
    order, shelf = LeafFirst(), Shelf(7, Namespace("n"), 0, 1)
    shelf.declare(0, 1, 512, 512)
    order.shelves[7] = shelf
    return order, shelf


def chosen(order: LeafFirst, count: int) -> list[BlockHash]:
    return [shelf.hashes[row] for shelf, row in order.choose(1 << 60, count)[0]]


def test_a_tail_leaves_before_its_head_even_if_the_tail_was_used_later() -> None:
    order, shelf = one_shelf()
    chain = [name(i) for i in range(5)]
    seal(order, [(shelf, chain, b"")])
    order.touch(shelf, shelf.find([chain[4]]))
    assert chosen(order, 5) == chain[::-1]


def test_a_tail_that_came_before_its_head_still_leaves_before_it() -> None:
    order, shelf = one_shelf()
    seal(order, [(shelf, [name(1)], name(0))])
    seal(order, [(shelf, [name(0)], b"")])
    order.touch(shelf, shelf.find([name(1)]))
    assert chosen(order, 2) == [name(1), name(0)]


def test_a_ring_of_parents_can_still_be_evicted() -> None:
    order, shelf = one_shelf()
    seal(order, [(shelf, [name(0)], name(1)), (shelf, [name(1)], name(0))])
    seal(order, [(shelf, [name(2)], name(2))])
    shelf.validate()
    assert sorted(chosen(order, 9)) == [name(0), name(1), name(2)]


def test_adoption_gives_up_behind_a_long_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegaflow.policy.index.ADOPTION_WALK_MAX", 3)
    order, shelf = one_shelf()
    seal(order, [(shelf, [name(i) for i in range(8)], b"")])
    seal(order, [(shelf, [name(20)], name(10))])
    seal(order, [(shelf, [name(10)], name(7))])
    assert int(shelf.parent[shelf.keys[name(20)]]) == -1
    assert not shelf.waits_for
    shelf.validate()
    assert len(chosen(order, 99)) == 10


def test_entries_of_a_forgotten_shelf_are_skipped() -> None:
    order, shelf = one_shelf()
    seal(order, [(shelf, [name(0)], b"")])
    del order.shelves[7]
    assert order.choose(512, 9) == ([], 0)


def test_a_pin_that_is_given_back_twice_is_a_bug() -> None:
    order, shelf = one_shelf()
    seal(order, [(shelf, [name(0)], b"")])
    rows = shelf.find([name(0)])
    order.pin(shelf, rows)
    order.unpin(shelf, rows)
    with pytest.raises(AssertionError, match="twice"):
        order.unpin(shelf, rows)


@pytest.mark.parametrize("resident", [1_000, 30_000])
def test_heap_work_is_the_same_for_each_victim_whatever_is_resident(resident: int) -> None:
    """T19: counted steps, not time.  Every prefix is touched once, so every entry is stale."""
    order, shelf = one_shelf()
    chains = [[name(c * 10 + i) for i in range(10)] for c in range(resident // 10)]
    for chain in chains:
        seal(order, [(shelf, chain, b"")])
    for chain in chains:
        order.touch(shelf, shelf.find(chain))
    victims, _ = order.choose(1 << 60, resident // 2)
    assert len(victims) == resident // 2
    # One stale entry put back and one real one for each chain of ten, and no more.
    assert order.heap_steps <= 2 * len(chains)
