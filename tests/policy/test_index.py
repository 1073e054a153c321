"""The shelf beside a dict of names: rows, prefixes and the prefix tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pegaflow.errors import BadRequest, ManifestMismatch
from pegaflow.model.keys import BlockHash, Namespace
from pegaflow.policy.index import NO_ROW, SEALED, Shelf

NAMES = 24


def name(number: int) -> BlockHash:
    return BlockHash(b"%016d" % number)


class ShelfMachine(RuleBasedStateMachine):
    """Blocks arrive whole and in any order, each naming a smaller one as its parent (or none)."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(0, Namespace("n"), 0, 1)
        self.shelf.declare(0, 1, 512, 512)
        self.parents: dict[int, int | None] = {}
        self.tick = 0

    @rule(data=st.data(), numbers=st.sets(st.integers(0, NAMES - 1), min_size=1, max_size=6))
    def arrive(self, data: st.DataObject, numbers: set[int]) -> None:
        order = data.draw(st.permutations(sorted(numbers - self.parents.keys())))
        parents = [data.draw(st.none() | st.integers(0, n - 1)) if n else None for n in order]
        if not order:
            return
        shelf = self.shelf
        rows = shelf.add([name(n) for n in order])
        shelf.missing[rows] = SEALED
        shelf.offsets[0][rows] = 512 * rows
        shelf.sealed_count += len(rows)
        base = self.tick
        self.tick += len(rows)
        shelf.used[rows] = base + np.arange(len(rows), 0, -1)  # a head is younger than its tail
        shelf.link(rows, [b"" if p is None else name(p) for p in parents], base)
        shelf.adopt(rows)
        self.parents.update(zip(order, parents, strict=True))

    def has_child(self, number: int) -> bool:
        return number in self.parents.values()

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def leaf_leaves(self, data: st.DataObject) -> None:
        leaves = sorted(n for n in self.parents if not self.has_child(n))
        number = data.draw(st.sampled_from(leaves))
        (row,) = self.shelf.find([name(number)]).tolist()
        up = int(self.shelf.parent[row])
        if up != NO_ROW:
            self.shelf.children[up] -= 1
        self.shelf.sealed_count -= 1
        self.shelf.forget([row])
        del self.parents[number]

    @rule(asked=st.lists(st.integers(0, NAMES - 1), max_size=8, unique=True))
    def look(self, asked: list[int]) -> None:
        hits = next((i for i, n in enumerate(asked) if n not in self.parents), len(asked))
        rows = self.shelf.sealed_prefix([name(n) for n in asked])
        assert [self.shelf.hashes[row] for row in rows] == [name(n) for n in asked[:hits]]

    @invariant()
    def tree_is_the_models(self) -> None:
        shelf = self.shelf
        assert set(shelf.keys) == {name(n) for n in self.parents}
        for number, parent in self.parents.items():
            up = int(shelf.parent[shelf.keys[name(number)]])
            if parent is None or parent not in self.parents:
                assert up == NO_ROW
            else:
                assert shelf.hashes[up] == name(parent)

    @invariant()
    def holds_together(self) -> None:
        self.shelf.validate()


TestShelf = ShelfMachine.TestCase
TestShelf.settings = settings(stateful_step_count=25)


def test_a_slot_has_one_size() -> None:
    shelf = Shelf(0, Namespace("n"), 0, 2)
    shelf.declare(0, 2, 512, 512)
    shelf.declare(0, 2, 512, 512)
    assert shelf.block_bytes == 512
    with pytest.raises(ManifestMismatch) as trouble:
        shelf.declare(0, 2, 1024, 1024)
    assert trouble.value.field == "slot-bytes"
    with pytest.raises(ManifestMismatch) as trouble:
        shelf.declare(1, 3, 512, 512)
    assert trouble.value.field == "slot-count"
    with pytest.raises(BadRequest):
        shelf.check_slot(1)


def test_blocks_that_name_each_other_form_no_ring() -> None:
    """Only a lying client has them; a ring could never be evicted."""
    shelf = Shelf(0, Namespace("n"), 0, 1)
    shelf.declare(0, 1, 512, 512)
    rows = shelf.add([name(1), name(2)])
    shelf.missing[rows] = SEALED
    shelf.offsets[0][rows] = 512 * rows
    shelf.sealed_count = 2
    shelf.used[rows] = [2, 1]
    shelf.link(rows, [name(2), name(1)], 0)
    shelf.adopt(rows)
    shelf.validate()
    assert sorted(shelf.parent[rows].tolist()) != sorted(rows.tolist())
