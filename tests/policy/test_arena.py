"""The arena beside a naive model: one list of pages, each free or lent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from pegaflow.policy.arena import Arena

PAGE = 512


class ArenaMachine(RuleBasedStateMachine):
    extents = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(align_bytes=PAGE)
        self.free: set[int] = set()
        self.lent: dict[int, int] = {}
        self.seams: set[int] = set()
        self.next_page = 0

    @rule(pages=st.integers(1, 24), gap=st.integers(0, 2), adjacent=st.booleans())
    def grow(self, pages: int, gap: int, adjacent: bool) -> None:
        start = self.next_page + gap
        self.arena.add_memory(start * PAGE, pages * PAGE, adjacent=adjacent)
        if not (adjacent and gap == 0):
            self.seams.add(start)
        self.free.update(range(start, start + pages))
        self.next_page = start + pages

    @rule(target=extents, count=st.integers(0, 12), size=st.integers(1, 5 * PAGE))
    def allocate(self, count: int, size: int) -> MultipleResults[tuple[int, int]]:
        pages = -(-size // PAGE)
        could = self._longest_run()
        offsets = self.arena.allocate(count, size)
        got = offsets.tolist()
        assert len(got) <= count
        for offset in got:
            assert offset % PAGE == 0
            mine = set(range(offset // PAGE, offset // PAGE + pages))
            assert mine <= self.free
            assert not any(page in self.seams for page in mine if page != offset // PAGE)
            self.free -= mine
            self.lent[offset] = size
        if len(got) < count:
            assert self._longest_run() < pages, "room was left although fewer were lent"
        if got and could >= pages * count:
            assert got == list(range(got[0], got[0] + count * pages * PAGE, pages * PAGE))
        return multiple(*((offset, size) for offset in got))

    @rule(one=consumes(extents))
    def free_one(self, one: tuple[int, int]) -> None:
        self._give_back([one])

    @rule(some=st.lists(consumes(extents), max_size=8))
    def free_some(self, some: list[tuple[int, int]]) -> None:
        for size in {size for _, size in some}:
            self._give_back([one for one in some if one[1] == size])

    def _give_back(self, some: list[tuple[int, int]]) -> None:
        self.arena.free(np.array([offset for offset, _ in some], np.int64), some[0][1])
        for offset, size in some:
            assert self.lent.pop(offset) == size
            self.free.update(range(offset // PAGE, offset // PAGE + -(-size // PAGE)))

    def _longest_run(self) -> int:
        best = length = 0
        for page in range(self.next_page):
            if page not in self.free or page in self.seams:
                length = 0
            length += page in self.free
            best = max(best, length)
        return best

    @invariant()
    def agrees(self) -> None:
        self.arena.validate(self.lent.items())
        assert self.arena.free_bytes == len(self.free) * PAGE
        assert self.arena.largest_free_bytes == self._longest_run() * PAGE
        assert self.arena.capacity_bytes == self.arena.free_bytes + self.arena.used_bytes


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_an_extent_never_crosses_a_seam_but_may_cross_an_adjacent_border() -> None:
    seamed, joined = Arena(), Arena()
    for arena, adjacent in ((seamed, False), (joined, True)):
        arena.add_memory(0, 1024)
        arena.add_memory(1024, 1024, adjacent=adjacent)
    assert len(seamed.allocate(1, 2048)) == 0
    assert len(joined.allocate(1, 2048)) == 1
    both = seamed.allocate(2, 1024)
    seamed.free(both, 1024)  # one gapless stretch over the seam
    assert seamed.largest_free_bytes == 1024
    seamed.validate([])


def test_what_is_wrong_is_refused() -> None:
    arena = Arena()
    arena.add_memory(0, 4096)
    with pytest.raises(AssertionError, match="overlap"):
        arena.add_memory(2048, 4096)
    taken = arena.allocate(2, 512)
    with pytest.raises(AssertionError, match="twice"):
        arena.free(np.array([taken[0], taken[0]]), 512)
    arena.free(taken, 512)
    with pytest.raises(AssertionError):
        arena.free(taken, 512)
    with pytest.raises(AssertionError):
        Arena(align_bytes=500)


def test_validate_sees_a_leak_and_an_overlap() -> None:
    arena = Arena()
    arena.add_memory(0, 4096)
    arena.validate()
    taken = arena.allocate(2, 1024).tolist()
    arena.validate([(offset, 1024) for offset in taken])
    with pytest.raises(AssertionError, match="leaked"):
        arena.validate([(taken[0], 1024)])
    with pytest.raises(AssertionError, match="overlaps"):
        arena.validate([(taken[0], 1024), (taken[0], 1024)])
