"""What a device promises: one contract for host memory, CUDA and the simulated engine.

An engine gets memory, offsets and block ids, never keys: it cannot form an opinion.
``pegaflow.testing.contract.check_copy_engine`` tests the promise on each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from pegaflow.model.layout import GroupLayout, Region

Direction = Literal["save", "load"]
"""``save`` reads engine memory into the pool, ``load`` writes engine memory from the pool."""


@attrs.frozen(eq=False)
class Copies:
    """One batch for one rank: block ``block_ids[i]`` <-> ``slot_bytes`` at ``pool_offsets[i]``.

    Shapes (n,), both int64.  In the pool a slot is its runs back to back, in layout order.
    The caller owns both memories and keeps them alive and unchanged until the call returns.
    """

    layout: GroupLayout
    block_ids: NDArray[np.int64]
    pool_offsets: NDArray[np.int64]


class AttachedMemory(Protocol):
    """One rank's KV memory, opened by an engine; closed by :meth:`CopyEngine.detach`."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """What was attached."""


@attrs.frozen
class EngineStatistics:
    """Totals since start, and what waits now.

    ``batches`` counts calls that ended, ``blocks`` and ``bytes_copied`` what arrived, and
    ``failed_blocks`` what did not: blocks + failed_blocks is what was asked for.
    """

    batches: dict[Direction, int]
    blocks: dict[Direction, int]
    bytes_copied: dict[Direction, int]
    failed_blocks: dict[Direction, int]
    queued: dict[Direction, int]
    busy_seconds: dict[Direction, float]
    wait_seconds: dict[Direction, float]
    method_bytes: dict[tuple[Direction, str], int]
    """How the bytes went: by direction and method."""
    staged_below_bytes: dict[Direction, int] = attrs.field(factory=dict)
    """Blocks whose ranges are shorter on average are gathered on the GPU first; see cuda_copy."""


class CopyEngine(Protocol):
    """Moves blocks between engine memory and the pool, in batches, on threads of its own."""

    async def attach(self, regions: Sequence[Region], fds: Sequence[int]) -> AttachedMemory:
        """Open a rank's memory.

        ``fds[i]`` backs ``regions[i]`` where its source is handed over, else -1; the engine
        duplicates what it keeps and the caller closes its own.  Raises :exc:`BadRequest` when a
        region is not as large as claimed, or :exc:`MemoryGone` when it can't be opened.
        """

    async def detach(self, memory: AttachedMemory) -> None:
        """Close it.  Waits for copies that still use it; afterwards they fail with MemoryGone."""

    async def copy(
        self,
        direction: Direction,
        memory: AttachedMemory,
        batches: Sequence[Copies],
        *,
        deadline: float,
    ) -> NDArray[np.bool_]:
        """Copy all; return which blocks failed, in order, one flag a block over all batches.

        Returns only when the device has let go of both memories, also when cancelled: the
        caller is then cancelled at its next checkpoint.  No part is begun after ``deadline``
        (``time.monotonic()`` seconds); what is left over counts as failed.  Loads overtake
        saves that have not begun.  A queue that is full raises :exc:`Overloaded` at once.
        Raises :exc:`MemoryGone` when this rank's memory is unusable, :exc:`DeviceLost` when the
        device is.
        """

    def statistics(self) -> EngineStatistics:
        """A snapshot; callable from any thread."""
