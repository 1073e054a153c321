"""Which blocks are here, and where do their bytes lie?

A :class:`Shelf` holds the blocks of one (namespace, group).  A block is a row: one dict leads from
its hash to the row, everything else is a column.  Columns instead of objects because the work comes
in batches of hundreds (one NumPy operation each) and because a full pass of the garbage collector
over a million objects stops the daemon for 0.2 s; a dict from bytes to int is not tracked by it at
all.

Life of a row: free -> filling (slots are being copied) -> sealed (all slots are here) -> free.
``missing`` tells: -1 free, 0 sealed, else the slots that are not committed yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from pegaflow.errors import BadRequest, ManifestMismatch
from pegaflow.model.keys import BlockHash, InstanceId, Namespace

ABSENT, IN_FLIGHT = -1, -2
"""In a column of offsets: the slot is not here; a plan is filling it."""
FREE, SEALED, LEAVING = -1, 0, -2
"""In ``missing``, besides the count of slots: no block, whole, chosen as a victim."""
NO_ROW = -1
ROW_BITS = 32
ROWS_AT_FIRST = 256
ADOPTION_WALK_MAX = 4096

Rows = NDArray[np.int64]
Cell = TypeVar("Cell", np.int32, np.int64, np.bool_)


@attrs.frozen
class Partial:
    """Since when, and through whom, an unsealed block has not moved on."""

    since: float
    instance: InstanceId


@attrs.define(eq=False)
class Shelf:
    """Blocks of one (namespace, group), their slots and their prefix tree."""

    number: int
    """Never used again for another shelf, so that an old entry of a heap can't mean a new one."""
    namespace: Namespace
    group: int
    slot_count: int
    slot_bytes: list[int] = attrs.field(init=False)
    """A slot index: what was declared, 0 while undeclared."""
    block_bytes: int = attrs.field(default=0, init=False)
    """What the declared slots of one block take in the pool, padding included."""
    keys: dict[BlockHash, int] = attrs.field(factory=dict, init=False)
    hashes: list[BlockHash] = attrs.field(factory=list, init=False)
    """A row: its hash; stale where the row is free."""
    partial: dict[int, Partial] = attrs.field(factory=dict, init=False)
    """Rows with some slots committed and others missing, the longest unmoved first."""
    orphans: dict[BlockHash, list[int]] = attrs.field(factory=dict, init=False)
    """Absent parent -> sealed rows that wait for it."""
    waits_for: dict[int, BlockHash] = attrs.field(factory=dict, init=False)
    """The inverse: row -> absent parent."""
    free_rows: list[int] = attrs.field(factory=list, init=False)
    sealed_count: int = attrs.field(default=0, init=False)
    pinned_count: int = attrs.field(default=0, init=False)
    offsets: list[NDArray[np.int64]] = attrs.field(init=False)
    """A slot index: column of pool offsets."""
    missing: NDArray[np.int32] = attrs.field(init=False)
    filling: NDArray[np.int32] = attrs.field(init=False)
    """Slots that a plan is copying now."""
    pins: NDArray[np.int32] = attrs.field(init=False)
    used: NDArray[np.int64] = attrs.field(init=False)
    """Tick of the last use."""
    parent: NDArray[np.int64] = attrs.field(init=False)
    children: NDArray[np.int64] = attrs.field(init=False)
    """Resident children; a block with one is not evictable."""
    queued: NDArray[np.bool_] = attrs.field(init=False)
    """The eviction heap has an entry for this row (kept when the row is freed and used again)."""

    cells: tuple[memoryview, ...] = attrs.field(init=False)
    """``missing, children, pins, used, parent`` for reading: eviction goes from cell to cell, and a
    memoryview gives one in half the time."""

    def __attrs_post_init__(self) -> None:
        """Begin with columns that have no rows."""
        self.slot_bytes = [0] * self.slot_count
        self.offsets = [np.empty(0, np.int64) for _ in range(self.slot_count)]
        self.missing = np.empty(0, np.int32)
        self.filling = np.empty(0, np.int32)
        self.pins = np.empty(0, np.int32)
        self.used = np.empty(0, np.int64)
        self.parent = np.empty(0, np.int64)
        self.children = np.empty(0, np.int64)
        self.queued = np.empty(0, np.bool_)
        self._view_cells()

    def _view_cells(self) -> None:
        columns = (self.missing, self.children, self.pins, self.used, self.parent)
        self.cells = tuple(column.data for column in columns)

    # ---- geometry

    def declare(self, slot_index: int, slot_count: int, slot_bytes: int, padded_bytes: int) -> None:
        """Fix the size of a slot, or check it.  Raises :exc:`ManifestMismatch`."""
        where = f"namespace {self.namespace!r}, group {self.group}"
        if slot_count != self.slot_count:
            raise ManifestMismatch(
                f"{where}: blocks have {self.slot_count} slots, not {slot_count}", "slot-count"
            )
        known = self.slot_bytes[slot_index]
        if known not in (0, slot_bytes):
            raise ManifestMismatch(
                f"{where}: slot {slot_index} has {known} bytes, not {slot_bytes}", "slot-bytes"
            )
        if not known:
            self.slot_bytes[slot_index] = slot_bytes
            self.block_bytes += padded_bytes

    def check_slot(self, slot_index: int) -> int:
        """Bytes of a declared slot.  Raises :exc:`BadRequest`."""
        if not 0 <= slot_index < self.slot_count or not self.slot_bytes[slot_index]:
            raise BadRequest(
                f"slot {slot_index} of group {self.group} was not declared by any rank",
                "slot-index",
            )
        return self.slot_bytes[slot_index]

    # ---- look-up

    def find(self, hashes: Sequence[BlockHash]) -> Rows:
        """Rows in order, NO_ROW where there is none."""
        return np.fromiter(map(self.keys.get, hashes, repeat(NO_ROW)), np.int64, len(hashes))

    def sealed_prefix(self, hashes: Sequence[BlockHash]) -> Rows:
        """Rows of the longest prefix of sealed blocks."""
        rows = self.find(hashes)
        if not len(self.missing):
            return rows[:0]
        here = (rows >= 0) & (self.missing[rows] == SEALED)
        return rows if here.all() else rows[: int(here.argmin())]

    # ---- rows

    def add(self, hashes: Sequence[BlockHash]) -> Rows:
        """Rows for new blocks, all slots missing.  The hashes are distinct and not here."""
        count = len(hashes)
        free = self.free_rows
        if len(free) < count:
            self._grow(count - len(free))
        taken = free[-count:]
        del free[-count:]
        self.keys.update(zip(hashes, taken, strict=True))
        for row, key in zip(taken, hashes, strict=True):
            self.hashes[row] = key
        rows = np.array(taken, np.int64)
        self.missing[rows] = self.slot_count
        return rows

    def _grow(self, least: int) -> None:
        """Make room for at least that many more rows; doubles, so a row costs O(1)."""
        old = len(self.missing)
        more = max(least, old, ROWS_AT_FIRST)
        assert old + more < 1 << ROW_BITS
        self.offsets = [_longer(column, more, ABSENT) for column in self.offsets]
        self.missing = _longer(self.missing, more, FREE)
        self.filling = _longer(self.filling, more, 0)
        self.pins = _longer(self.pins, more, 0)
        self.used = _longer(self.used, more, 0)
        self.parent = _longer(self.parent, more, NO_ROW)
        self.children = _longer(self.children, more, 0)
        self.queued = _longer(self.queued, more, 0)
        self._view_cells()
        self.hashes.extend(repeat(BlockHash(b""), more))
        # Popped from the end: a fresh save takes ascending rows, which keeps its columns together.
        self.free_rows[:0] = range(old + more - 1, old - 1, -1)

    def forget(self, rows: Iterable[int]) -> None:
        """Free rows whose extents were given back.  They have no children, pins or copies.

        The parents' counts of children are the caller's business.
        """
        keys, hashes = self.keys, self.hashes
        freed = list(rows)
        for row in freed:
            del keys[hashes[row]]
        if self.waits_for:
            for row in freed:
                self._stop_waiting(row)
        if self.partial:
            for row in freed:
                self.partial.pop(row, None)
        at = np.array(freed, np.int64)
        self.missing[at] = FREE
        self.parent[at] = NO_ROW
        for column in self.offsets:
            column[at] = ABSENT
        self.free_rows.extend(freed)

    # ---- prefix tree

    def link(self, rows: Rows, parent_hashes: Sequence[bytes], base: int) -> None:
        """Hang newly sealed rows under their parents; those without one wait for it.

        ``used`` of the new rows falls in the order of the save and is above ``base``, that of all
        others is not: so a parent that comes later in the same save is told apart, and two blocks
        that name each other as parent can't form a ring that nobody may evict.
        """
        up = self.find([BlockHash(parent) for parent in parent_hashes])
        stamp = self.used[up]
        good = (
            (up >= 0) & (self.missing[up] == SEALED) & ((stamp <= base) | (stamp > self.used[rows]))
        )
        if good.all():
            self.parent[rows] = up
            np.add.at(self.children, up, 1)
            return
        self.parent[rows[good]] = up[good]
        np.add.at(self.children, up[good], 1)
        for i in np.flatnonzero(~good).tolist():
            if parent_hashes[i]:
                key, row = BlockHash(parent_hashes[i]), int(rows[i])
                self.orphans.setdefault(key, []).append(row)
                self.waits_for[row] = key

    def adopt(self, rows: Rows) -> None:
        """Give newly sealed rows the children that waited for them."""
        if not self.orphans:
            return
        for row in rows.tolist():
            waiting = self.orphans.pop(self.hashes[row], None)
            if waiting is None:
                continue
            for child in waiting:
                del self.waits_for[child]
            ring = self._ancestors_among(row, set(waiting))
            for child in waiting:
                if child not in ring:
                    self.parent[child] = row
                    self.children[row] += 1

    def _ancestors_among(self, row: int, candidates: set[int]) -> set[int]:
        """Candidates that ``row`` hangs under: they can't become its children.

        Only lying clients have any.  Behind a walk of bounded length all are refused; an orphan
        that is never adopted only loses its place behind its parent in the order of eviction.
        """
        met: set[int] = set()
        for _ in range(ADOPTION_WALK_MAX):
            if row in candidates:
                met.add(row)
            row = int(self.parent[row])
            if row == NO_ROW:
                return met
        return candidates

    def _stop_waiting(self, row: int) -> None:
        key = self.waits_for.pop(row, None)
        if key is not None:
            waiting = self.orphans[key]
            waiting.remove(row)
            if not waiting:
                del self.orphans[key]

    # ---- invariants

    def validate(self) -> None:
        """Assert what is always true of one shelf."""
        rows = self.find(list(self.keys))
        assert sorted([*rows.tolist(), *self.free_rows]) == list(range(len(self.missing)))
        assert [self.hashes[row] for row in rows] == list(self.keys)
        self._validate_columns(rows)
        sealed = rows[self.missing[rows] == SEALED]
        assert len(sealed) == self.sealed_count
        assert int((self.pins[sealed] > 0).sum()) == self.pinned_count
        children = np.zeros(len(self.missing), np.int64)
        for row in sealed.tolist():
            up = int(self.parent[row])
            if up != NO_ROW:
                assert self.missing[up] == SEALED
                children[up] += 1
            self._assert_no_ring(row)
        assert (children == self.children).all()
        waiting = {row: key for key, rows_ in self.orphans.items() for row in rows_}
        assert waiting == self.waits_for
        assert all(self.missing[row] == SEALED and self.parent[row] == NO_ROW for row in waiting)
        assert all(self.orphans.values())

    def _validate_columns(self, rows: Rows) -> None:
        table = np.array([column[rows] for column in self.offsets]).reshape(self.slot_count, -1)
        assert ((table == ABSENT) | (table == IN_FLIGHT)).sum(0).tolist() == self.missing[
            rows
        ].tolist()
        assert (table == IN_FLIGHT).sum(0).tolist() == self.filling[rows].tolist()
        assert (self.missing[rows] >= 0).all()
        assert (self.pins >= 0).all()
        unsealed = rows[self.missing[rows] > 0]
        assert not self.pins[unsealed].any()
        assert not self.children[unsealed].any()
        assert (self.parent[unsealed] == NO_ROW).all()
        begun = [row for row in unsealed.tolist() if self.missing[row] < self.slot_count]
        assert set(begun) == set(self.partial)
        assert all(self.filling[row] for row in unsealed.tolist() if row not in self.partial)
        free = np.array(self.free_rows, np.int64)
        assert (self.missing[free] == FREE).all()
        for column in (self.filling, self.pins, self.children):
            assert not column[free].any()
        assert all((column[free] == ABSENT).all() for column in self.offsets)

    def _assert_no_ring(self, row: int) -> None:
        start, steps = row, 0
        while row != NO_ROW:
            row = int(self.parent[row])
            steps += 1
            assert row != start, "a block is its own ancestor"
            assert steps <= self.sealed_count


def _longer(column: NDArray[Cell], more: int, fill: int) -> NDArray[Cell]:
    return np.concatenate([column, np.full(more, fill, column.dtype)])
