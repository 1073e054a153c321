"""Who leaves when room is short?  The least recently used leaf of the prefix trees.

A block can leave when it is sealed, nobody has pinned it and no resident block continues its
prefix: a tail leaves before its head, because a head without its tail still gives hits and a tail
without its head never does.  A pinned block thereby protects everything before it.

The heap holds at most one entry for a row and only has to know leaves.  A touch is a write into the
``used`` column; the entry learns of it when it comes up (it is then put back further down), so a
hit costs the heap nothing.  An entry whose row is pinned, inside a prefix or gone is dropped: the
row is offered again when its last pin or child goes.
"""

from __future__ import annotations

from heapq import heappop, heappush

import attrs
import numpy as np

from pegaflow.policy.index import LEAVING, NO_ROW, ROW_BITS, SEALED, Rows, Shelf

ROW_MASK = (1 << ROW_BITS) - 1
Victim = tuple[Shelf, int]
Fresh = tuple[Shelf, Rows, list[bytes]]
"""Rows of one run that have just been sealed, in prefix order, and the hash before each."""


@attrs.define(eq=False)
class LeafFirst:
    """The order of eviction over all shelves."""

    shelves: dict[int, Shelf] = attrs.field(factory=dict, init=False)
    """By number; the owner of the shelves keeps it."""
    tick: int = attrs.field(default=0, init=False)
    """Counts uses; the largest value in any ``used`` column."""
    heap_steps: int = attrs.field(default=0, init=False)
    """Entries that were taken off the heap: what eviction costs."""
    _heap: list[tuple[int, int]] = attrs.field(factory=list, init=False)
    """(tick at most ``used`` of the row, shelf number << ROW_BITS | row)."""

    def touch(self, shelf: Shelf, rows: Rows) -> bool:
        """The rows, in prefix order, were used now: the head counts as used last.

        Returns whether they are distinct.
        """
        stamps = np.arange(self.tick + len(rows), self.tick, -1)
        shelf.used[rows] = stamps
        self.tick += len(rows)
        return bool((shelf.used[rows] == stamps).all())

    def welcome(self, fresh: list[Fresh]) -> int:
        """Stamp, link and queue blocks that have just been sealed; returns how many.

        First all stamps, then all links: the order of a save decides who may be whose parent.
        """
        base = self.tick
        blocks = sum(len(rows) for _, rows, _ in fresh)
        self.tick = at = base + blocks
        for shelf, rows, _ in fresh:
            shelf.used[rows] = np.arange(at, at - len(rows), -1)
            at -= len(rows)
        for shelf, rows, parents in fresh:
            shelf.link(rows, parents, base)
        for shelf, rows, _ in fresh:
            shelf.adopt(rows)
        for shelf, rows, _ in fresh:
            self.offer(shelf, rows)
        return blocks

    def pin(self, shelf: Shelf, rows: Rows) -> None:
        """Forbid that the rows (each once, sealed) leave, until :meth:`unpin`."""
        pins = shelf.pins[rows]
        shelf.pinned_count += len(rows) - int(np.count_nonzero(pins))
        shelf.pins[rows] = pins + 1

    def unpin(self, shelf: Shelf, rows: Rows) -> None:
        """Take one pin off each row."""
        pins = shelf.pins[rows] - 1
        assert not len(rows) or int(pins.min()) >= 0, "a pin was given back twice"
        shelf.pins[rows] = pins
        loose = rows[pins == 0]
        shelf.pinned_count -= len(loose)
        self.offer(shelf, loose)

    def offer(self, shelf: Shelf, rows: Rows) -> None:
        """Queue those of the rows that are evictable and not queued."""
        leaves = rows[(shelf.children[rows] == 0) & (shelf.pins[rows] == 0) & ~shelf.queued[rows]]
        for row in leaves.tolist():
            self._push(shelf, row)

    def choose(self, need_bytes: int, limit: int) -> tuple[list[Victim], int]:
        """Take victims, the oldest first, until they have ``need_bytes`` or there are no more.

        Returns them with their bytes.  Each must be removed by the caller, or all given back
        with :meth:`restore`.
        """
        victims: list[Victim] = []
        freed = 0
        heap = self._heap
        while heap and freed < need_bytes and len(victims) < limit:
            _, code = heappop(heap)
            self.heap_steps += 1
            shelf = self.shelves.get(code >> ROW_BITS)
            if shelf is None:
                continue
            row = code & ROW_MASK
            missing, children, pins, used, parent = shelf.cells
            shelf.queued[row] = False
            # The tail first, then up the prefix as long as the blocks there are next in age.
            while not (missing[row] or children[row] or pins[row]):
                enough = freed >= need_bytes or len(victims) >= limit
                if enough or (heap and heap[0][0] < used[row]):
                    if not shelf.queued[row]:
                        self._push(shelf, row)
                    break
                shelf.missing[row] = LEAVING
                victims.append((shelf, row))
                freed += shelf.block_bytes
                row = parent[row]
                if row == NO_ROW:
                    break
                shelf.children[row] -= 1
        return victims, freed

    def restore(self, victims: list[Victim]) -> None:
        """Undo :meth:`choose`: nobody leaves."""
        for shelf, row in victims:
            shelf.missing[row] = SEALED
            up = int(shelf.parent[row])
            if up != NO_ROW:
                shelf.children[up] += 1
        for shelf, row in victims:
            self.offer(shelf, np.array([row], np.int64))

    def _push(self, shelf: Shelf, row: int) -> None:
        shelf.queued[row] = True
        heappush(self._heap, (int(shelf.used[row]), shelf.number << ROW_BITS | row))

    def validate(self) -> None:
        """Assert that every evictable row is queued once, with an entry that is not too late."""
        queued: dict[int, int] = {}
        for stamp, code in self._heap:
            assert code not in queued, "two entries for one row"
            queued[code] = stamp
        for number, shelf in self.shelves.items():
            assert number == shelf.number
            marked = np.flatnonzero(shelf.queued).tolist()
            in_heap = {code & ROW_MASK for code in queued if code >> ROW_BITS == number}
            assert set(marked) == in_heap
            assert all(queued[number << ROW_BITS | row] <= shelf.used[row] for row in marked)
            assert not (shelf.missing == LEAVING).any()
            evictable = np.flatnonzero(
                (shelf.missing == SEALED) & (shelf.children == 0) & (shelf.pins == 0)
            )
            assert shelf.queued[evictable].all(), "an evictable block can't be found"
            assert int(shelf.used.max(initial=0)) <= self.tick
