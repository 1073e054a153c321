"""How do slots from several ranks become one block?

A rank *claims* the slots that it will copy, then *settles* them: committed or failed, each exactly
once.  A block seals when its last slot was committed.  Between the two its row is marked in flight,
so whoever saves the same slot meanwhile is told that it is known, and nothing takes the row away.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from pegaflow.model.keys import BlockHash, InstanceId
from pegaflow.policy.index import ABSENT, IN_FLIGHT, SEALED, Partial, Rows, Shelf

Mask = NDArray[np.bool_]


def wanted(shelf: Shelf, slot_index: int, hashes: Sequence[BlockHash]) -> tuple[Rows, Rows]:
    """Which of these blocks lack the slot?  (row of each, NO_ROW for new ones; positions wanted).

    A block that is named twice is wanted once.
    """
    rows = shelf.find(hashes)
    lacks = rows < 0
    here = np.flatnonzero(~lacks)
    lacks[here] = shelf.offsets[slot_index][rows[here]] == ABSENT
    picks = np.flatnonzero(lacks)
    first = {hashes[i]: i for i in reversed(picks.tolist())}
    if len(first) < len(picks):
        picks = np.array(sorted(first.values()), np.int64)
    return rows, picks


def claim(
    shelf: Shelf, slot_index: int, hashes: Sequence[BlockHash], rows: Rows, picks: Rows
) -> Rows:
    """Mark the slot of the picked blocks as in flight; returns their rows."""
    new = np.flatnonzero(rows[picks] < 0)
    taken = rows[picks]
    if len(new):
        taken[new] = shelf.add([hashes[i] for i in picks[new].tolist()])
    shelf.offsets[slot_index][taken] = IN_FLIGHT
    shelf.filling[taken] += 1
    return taken


@attrs.frozen(eq=False)
class Settled:
    """What became of one part of a save."""

    sealed: Rows
    """Indices into the part's rows, ascending."""
    committed_count: int


def settle(
    shelf: Shelf, slot_index: int, rows: Rows, offsets: Rows, failed: Mask, stamp: Partial
) -> Settled:
    """End claims: ``offsets[i]`` now holds the slot of ``rows[i]`` unless ``failed[i]``.

    The caller frees the extents of failed ones, and stamps, links and offers the sealed ones.
    """
    column = shelf.offsets[slot_index]
    assert bool((column[rows] == IN_FLIGHT).all()), "a slot was settled twice"
    column[rows] = np.where(failed, ABSENT, offsets)
    shelf.filling[rows] -= 1
    shelf.missing[rows] -= ~failed
    missing = shelf.missing[rows]
    sealed = np.flatnonzero(missing == SEALED)
    shelf.sealed_count += len(sealed)
    if shelf.slot_count > 1:
        _note_partial(shelf, rows, failed, missing, stamp)
    if failed.any():
        empty = (missing == shelf.slot_count) & (shelf.filling[rows] == 0)
        shelf.forget(rows[empty].tolist())
    return Settled(sealed, len(rows) - int(np.count_nonzero(failed)))


def _note_partial(
    shelf: Shelf, rows: Rows, failed: Mask, missing: NDArray[np.int32], stamp: Partial
) -> None:
    """Keep ``partial`` in the order of the last commit."""
    for row, bad, lacks in zip(rows.tolist(), failed.tolist(), missing.tolist(), strict=True):
        if not bad:
            shelf.partial.pop(row, None)
            if lacks:
                shelf.partial[row] = stamp


def reclaimable(shelf: Shelf, *, since: float | None, instance: InstanceId | None) -> list[int]:
    """Unsealed rows that nobody is copying, the longest unmoved first.

    Of those: last moved at or before ``since`` (None: any), by that instance (None: any).
    """
    found: list[int] = []
    for row, partial in shelf.partial.items():
        if since is not None and partial.since > since:
            break
        if instance in (None, partial.instance) and not shelf.filling[row]:
            found.append(row)
    return found
