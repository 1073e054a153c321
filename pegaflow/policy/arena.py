"""Which bytes of the pool are free?  Extents of any size, each freed alone.

Free runs are kept by start, by end and by size.  A request is cut out of the smallest run that
holds all of it, else out of the largest runs in turn, so that the blocks of one save lie side by
side when they can.  Distinct run sizes are few: with n extents of one size in the pool there can be
at most sqrt(2n) of them (their sum is bounded), 1,400 for a million, so a sorted list with
``bisect`` finds the best fit without the misses of power-of-two bins.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from itertools import pairwise

import attrs
import numpy as np
from numpy.typing import NDArray

NOTHING: NDArray[np.int64] = np.empty(0, np.int64)
NOTHING.flags.writeable = False


@attrs.define(eq=False, kw_only=True)
class Arena:
    """Extents of one pool, in multiples of the alignment."""

    align_bytes: int = 512
    capacity_bytes: int = attrs.field(default=0, init=False)
    free_bytes: int = attrs.field(default=0, init=False)
    _size_of: dict[int, int] = attrs.field(factory=dict, init=False)
    """Free run: start -> size.  Runs of one range are maximal: never two side by side."""
    _start_of: dict[int, int] = attrs.field(factory=dict, init=False)
    """Free run: end -> start; the mirror of ``_size_of``."""
    _starts: dict[int, dict[int, None]] = attrs.field(factory=dict, init=False)
    """Size -> starts of the free runs of that size, oldest first."""
    _sizes: list[int] = attrs.field(factory=list, init=False)
    """The keys of ``_starts``, ascending."""
    _seams: list[int] = attrs.field(factory=list, init=False)
    """Offsets that no run and no extent may cross, ascending."""
    _ranges: list[tuple[int, int]] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        """The alignment is a power of two."""
        assert self.align_bytes > 0
        assert self.align_bytes & (self.align_bytes - 1) == 0

    def add_memory(self, offset_bytes: int, size_bytes: int, *, adjacent: bool = False) -> None:
        """Make a range usable; aligned at both ends, and nothing of it was added before.

        With ``adjacent`` an extent may cross from the range that ends where this one begins.
        """
        assert offset_bytes % self.align_bytes == 0, offset_bytes
        assert size_bytes % self.align_bytes == 0, size_bytes
        assert size_bytes > 0, size_bytes
        end = offset_bytes + size_bytes
        assert all(end <= a or offset_bytes >= b for a, b in self._ranges), "ranges overlap"
        if not adjacent:
            insort(self._seams, offset_bytes)
        # A range that was added earlier right behind this one has its own seam at its start.
        self._ranges.append((offset_bytes, end))
        self.capacity_bytes += size_bytes
        self.free_bytes += size_bytes
        self._insert(offset_bytes, size_bytes)

    def padded(self, size_bytes: int) -> int:
        """What an extent of that size really takes."""
        return -(-size_bytes // self.align_bytes) * self.align_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes lent out, padding included."""
        return self.capacity_bytes - self.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The longest extent that could be lent now."""
        return self._sizes[-1] if self._sizes else 0

    def allocate(self, count: int, size_bytes: int) -> NDArray[np.int64]:
        """Lend up to ``count`` extents; fewer only when no free run holds one more.

        Offsets come in the order in which a batch should use them, ascending within a run.
        """
        assert size_bytes > 0, size_bytes
        size = self.padded(size_bytes)
        parts: list[NDArray[np.int64]] = []
        missing = count
        while missing > 0 and self._sizes:
            at = bisect_left(self._sizes, missing * size)
            run = self._sizes[at] if at < len(self._sizes) else self._sizes[-1]
            take = min(missing, run // size)
            if take == 0:
                break
            start = next(iter(self._starts[run]))
            self._remove(start, run)
            parts.append(np.arange(start, start + take * size, size, dtype=np.int64))
            if run > take * size:
                self._insert_whole(start + take * size, run - take * size)
            self.free_bytes -= take * size
            missing -= take
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else NOTHING

    def free(self, offsets: NDArray[np.int64], size_bytes: int) -> None:
        """Take back extents that were lent with that size, in any order and any selection."""
        if not len(offsets):
            return
        size = self.padded(size_bytes)
        order = np.sort(offsets)
        steps = np.diff(order)
        assert not len(steps) or int(steps.min()) >= size, "an extent was given back twice"
        cuts = np.flatnonzero(steps != size) + 1
        for part in np.split(order, cuts) if len(cuts) else (order,):
            self._give_back(int(part[0]), len(part) * size)
        self.free_bytes += len(order) * size
        assert self.free_bytes <= self.capacity_bytes

    def _give_back(self, start: int, size: int) -> None:
        """One gapless stretch; it is cut where it crosses a seam."""
        end = start + size
        at = bisect_right(self._seams, start)
        while at < len(self._seams) and self._seams[at] < end:
            self._insert(start, self._seams[at] - start)
            start = self._seams[at]
            at += 1
        self._insert(start, end - start)

    def _insert(self, start: int, size: int) -> None:
        """Add a free run, joined with its free neighbours unless a seam lies between."""
        assert start not in self._size_of, f"{start} is free already"
        end = start + size
        if not self._is_seam(start) and (before := self._start_of.get(start)) is not None:
            self._remove(before, start - before)
            start = before
        if not self._is_seam(end) and (after := self._size_of.get(end)) is not None:
            self._remove(end, after)
            end += after
        self._insert_whole(start, end - start)

    def _is_seam(self, offset: int) -> bool:
        at = bisect_left(self._seams, offset)
        return at < len(self._seams) and self._seams[at] == offset

    def _insert_whole(self, start: int, size: int) -> None:
        self._size_of[start] = size
        self._start_of[start + size] = start
        starts = self._starts.get(size)
        if starts is None:
            self._starts[size] = {start: None}
            insort(self._sizes, size)
        else:
            starts[start] = None

    def _remove(self, start: int, size: int) -> None:
        del self._size_of[start]
        del self._start_of[start + size]
        starts = self._starts[size]
        del starts[start]
        if not starts:
            del self._starts[size]
            del self._sizes[bisect_left(self._sizes, size)]

    def validate(self, lent: Iterable[tuple[int, int]] | None = None) -> None:
        """Assert the invariants; with ``lent`` (offset, size) also that nothing leaked."""
        runs = sorted(self._size_of.items())
        assert sum(size for _, size in runs) == self.free_bytes
        assert {start + size: start for start, size in runs} == self._start_of
        by_size: dict[int, set[int]] = {}
        for start, size in runs:
            by_size.setdefault(size, set()).add(start)
        assert {size: set(starts) for size, starts in self._starts.items()} == by_size
        assert self._sizes == sorted(by_size)
        assert self._seams == sorted(set(self._seams))
        for (a, size), (b, _) in pairwise(runs):
            assert a + size < b or (a + size == b and b in self._seams), (
                "neighbours were not joined"
            )
        if lent is None:
            return
        taken = [(offset, self.padded(size)) for offset, size in lent]
        assert sum(size for _, size in taken) == self.used_bytes, "bytes leaked or lent twice"
        everything = sorted([*runs, *taken])
        for (a, size), (b, _) in pairwise(everything):
            assert a + size <= b, f"{a}+{size} overlaps {b}"
        for offset, size in everything:
            inside = (min(b, offset + size) - max(a, offset) for a, b in self._ranges)
            assert sum(part for part in inside if part > 0) == size, "outside of the pool"
            assert not any(offset < seam < offset + size for seam in self._seams)
