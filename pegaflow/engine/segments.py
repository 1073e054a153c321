"""Which bytes go where: a batch of blocks as arrays of segments, without a loop over blocks."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from pegaflow.engine.base import Copies
from pegaflow.errors import BadRequest
from pegaflow.model.layout import GroupLayout, Region

Ints = NDArray[np.int64]

_LAYOUTS_KEPT = 64
_NO_SEAMS: Ints = np.empty(0, np.int64)


@attrs.frozen(eq=False)
class RunArrays:
    """A layout as arrays, shape (runs,): neighbouring runs joined."""

    region: Ints
    base: Ints
    stride: Ints
    length: Ints
    shift: Ints
    """Where the run begins inside a slot."""

    @classmethod
    def of(cls, layout: GroupLayout) -> RunArrays:
        """Join what lies together and turn it into columns."""
        runs = layout.merged().runs
        table = np.array(
            [(r.region, r.base_bytes, r.stride_bytes, r.length_bytes) for r in runs], np.int64
        )
        region, base, stride, length = table.T.copy()
        return cls(region, base, stride, length, np.cumsum(length) - length)


@attrs.define(eq=False)
class Layouts:
    """The layouts of one attached memory: each is checked once, then known by identity."""

    regions: tuple[Region, ...]
    _known: dict[int, tuple[GroupLayout, RunArrays]] = attrs.field(init=False, factory=dict)

    def arrays(self, layout: GroupLayout) -> RunArrays:
        """Raises :exc:`BadRequest` when a run leaves its region.  Device threads may share it."""
        found = self._known.get(id(layout))
        if found is not None:
            return found[1]
        layout.check(self.regions)
        arrays = RunArrays.of(layout)
        if len(self._known) >= _LAYOUTS_KEPT:  # somebody makes a new layout a call: stay small
            self._known.clear()
        self._known[id(layout)] = (layout, arrays)  # holds it, so the identity stays taken
        return arrays


@attrs.frozen(eq=False)
class Segments:
    """Pieces that are one range on both sides, in the order to be moved; shape (segments,).

    ``block`` counts over all batches of the call.  ``part`` numbers stretches of at most
    ``part_bytes``; blocks are completed part by part, so that a deadline in the middle costs
    the blocks that are left and not all of them.
    """

    region: Ints
    memory: Ints
    pool: Ints
    length: Ints
    block: Ints
    part: Ints


@attrs.frozen(eq=False)
class Merged:
    """Neighbouring segments joined where both sides go on; shape (ranges,).

    Range ``i`` is ``segments[first[i]:first[i + 1]]`` (``first`` has one entry more).
    """

    first: NDArray[np.intp]
    region: Ints
    memory: Ints
    pool: Ints
    length: Ints
    part: Ints


def count_blocks(batches: Sequence[Copies]) -> int:
    """Blocks over all batches."""
    return sum(int(copies.block_ids.size) for copies in batches)


def lay_out(
    layouts: Layouts, batches: Sequence[Copies], part_bytes: int, pool_bytes: int
) -> Segments:
    """Segments of all batches.  Raises :exc:`BadRequest` for a block that does not exist."""
    columns: list[tuple[Ints, ...]] = []
    first_block = 0
    for copies in batches:
        if copies.block_ids.size:
            check_batch(copies, pool_bytes)
            runs = layouts.arrays(copies.layout)
            columns.append(_one_batch(copies, runs, first_block, part_bytes))
        first_block += int(copies.block_ids.size)
    region, memory, pool, length, block = (np.concatenate(c) for c in zip(*columns, strict=True))
    part = (np.cumsum(length) - 1) // part_bytes
    return Segments(region, memory, pool, length, block, part)


def merge(segments: Segments, seams: Ints = _NO_SEAMS) -> Merged:
    """Join neighbours of one part that go on in memory and in the pool.

    ``seams`` are rising offsets in the pool that no range may cross; no segment does.
    """
    s = segments
    goes_on = (
        (s.region[1:] == s.region[:-1])
        & (s.part[1:] == s.part[:-1])
        & (s.memory[1:] == s.memory[:-1] + s.length[:-1])
        & (s.pool[1:] == s.pool[:-1] + s.length[:-1])
    )
    if seams.size:
        slab = np.searchsorted(seams, s.pool, "right")
        goes_on &= slab[1:] == slab[:-1]
    starts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
    first = np.append(starts, s.length.size)
    length = np.add.reduceat(s.length, starts)
    return Merged(first, s.region[starts], s.memory[starts], s.pool[starts], length, s.part[starts])


def check_batch(copies: Copies, pool_bytes: int) -> None:
    """Raise :exc:`BadRequest` for a block that does not exist."""
    if not copies.block_ids.size:
        return
    ids, offsets = copies.block_ids, copies.pool_offsets
    assert ids.shape == offsets.shape == (ids.size,), (ids.shape, offsets.shape)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= copies.layout.block_count:
        wrong = low if low < 0 else high
        raise BadRequest(
            f"block {wrong} is not in 0..{copies.layout.block_count - 1}", "runs.blockIds"
        )
    end = int(offsets.max()) + copies.layout.slot_bytes
    assert int(offsets.min()) >= 0, offsets.min()
    assert end <= pool_bytes, (end, pool_bytes)


def _one_batch(
    copies: Copies, runs: RunArrays, first_block: int, part_bytes: int
) -> tuple[Ints, ...]:
    """Columns region, memory, pool, length, block: by part, then run, then block id.

    With ids in order each run is a rising sequence of offsets, which is all the sorting that
    merging needs.
    """
    ids = copies.block_ids
    slot_bytes = int(runs.length.sum())
    per_part = max(1, min(ids.size, part_bytes // slot_bytes))
    parts = -(-ids.size // per_part)
    padded = np.full(parts * per_part, -1, np.int64)
    padded[: ids.size] = np.argsort(ids, kind="stable")
    shape = (parts, runs.length.size, per_part)
    at = np.broadcast_to(padded.reshape(parts, 1, per_part), shape).ravel()
    run = np.broadcast_to(np.arange(runs.length.size)[None, :, None], shape).ravel()
    if padded.size > ids.size:
        at, run = at[at >= 0], run[at >= 0]
    columns = (
        runs.region[run],
        runs.base[run] + runs.stride[run] * ids[at],
        copies.pool_offsets[at] + runs.shift[run],
        runs.length[run],
        at + first_block,
    )
    return _cut(columns, part_bytes) if int(runs.length.max()) > part_bytes else columns


def _cut(columns: tuple[Ints, ...], part_bytes: int) -> tuple[Ints, ...]:
    """Split what is longer than a part."""
    region, memory, pool, length, block = columns
    pieces = -(-length // part_bytes)
    whole = np.repeat(np.arange(length.size), pieces)
    skip = (np.arange(whole.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * part_bytes
    return (
        region[whole],
        memory[whole] + skip,
        pool[whole] + skip,
        np.minimum(length[whole] - skip, part_bytes),
        block[whole],
    )
