"""Merging: as few ranges as possible, and none across the seam of two registrations."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pegaflow.engine.base import Copies
from pegaflow.engine.segments import Layouts, lay_out, merge
from pegaflow.model.layout import GroupLayout, HandedOver, Region, Run

SLOT, BLOCKS = 512, 64


@given(
    ids=st.permutations(range(BLOCKS)).map(lambda ids: ids[:40]),
    seams=st.sets(st.integers(0, 40)).map(sorted),
)
def test_ranges_cover_the_segments_and_stop_at_seams(ids: list[int], seams: list[int]) -> None:
    layouts = Layouts((Region(SLOT * BLOCKS, HandedOver(b"", 0, 0)),))
    layout = GroupLayout(0, BLOCKS, (Run(0, 0, SLOT, SLOT),))
    offsets = np.arange(40, dtype=np.int64) * SLOT
    copies = [Copies(layout, np.array(sorted(ids), np.int64), offsets)]
    segments = lay_out(layouts, copies, 1 << 20, SLOT * BLOCKS)
    ranges = merge(segments, np.array(seams, np.int64) * SLOT)
    covered = []
    for memory, pool, length in zip(
        ranges.memory.tolist(), ranges.pool.tolist(), ranges.length.tolist(), strict=True
    ):
        assert not any(pool < seam * SLOT < pool + length for seam in seams)
        covered += [(memory + at, pool + at) for at in range(0, length, SLOT)]
    assert covered == [(block * SLOT, i * SLOT) for i, block in enumerate(sorted(ids))]
    joints = sum(b == a + 1 for a, b in zip(sorted(ids), sorted(ids)[1:], strict=False))
    cut = sum(
        seam in seams and sorted(ids)[seam] == sorted(ids)[seam - 1] + 1 for seam in range(1, 40)
    )
    assert ranges.length.size == 40 - joints + cut
