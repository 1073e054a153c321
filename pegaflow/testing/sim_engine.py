"""A copy engine without a device: bytearrays, virtual time, seeded faults.

What may happen here: a block fails; a batch is slow; memory goes away before, during or between
batches, for ever; a queue is full; the second half of a block moves long after its first half, so
that room that changed hands meanwhile shows as torn bytes.  What never happens: bytes that were
copied and are wrong, a copy that is begun after its deadline, a buffer that is touched after the
call returned.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import trio
from numpy.typing import NDArray

from pegaflow.engine.base import AttachedMemory, Copies, Direction, EngineStatistics
from pegaflow.errors import BadRequest, MemoryGone, Overloaded
from pegaflow.model.layout import CudaIpc, GroupLayout, Region

Bytes = NDArray[np.uint8]
DIRECTIONS: tuple[Direction, Direction] = ("load", "save")


@attrs.define(eq=False)
class Faults:
    """Chances of what may happen, and how often it did.  All zero: a perfect device."""

    dice: random.Random
    block_fails: float = 0.0
    """Of each block."""
    memory_goes: float = 0.0
    """Of each chunk."""
    attach_fails: float = 0.0
    slow: float = 0.0
    """Of each chunk: ``SLOW_FACTOR`` times as long."""
    injected: Counter[str] = attrs.field(factory=Counter)

    def happens(self, what: str, chance: float) -> bool:
        """Roll, and count it."""
        hit = chance > 0 and self.dice.random() < chance
        if hit:
            self.injected[what] += 1
        return hit


SLOW_FACTOR = 20.0


@attrs.define(eq=False)
class SimMemory:
    """One rank's memory as attached."""

    regions: tuple[Region, ...]
    arrays: tuple[Bytes, ...]
    users: int = 0
    gone: bool = False
    detached: bool = False
    idle: trio.Event = attrs.field(factory=trio.Event)


@attrs.define(eq=False)
class _Lane:
    """Calls that wait for one direction."""

    waiting: deque[trio.Event] = attrs.field(factory=deque)


@attrs.define(eq=False, kw_only=True)
class SimCopyEngine:
    """Fulfils ``engine.base.CopyEngine``.  One device: batches run one after another, loads first.

    Engine memory is exported by :meth:`export` and named by the handle of a CUDA region.
    """

    pool: Bytes
    faults: Faults
    clock: Callable[[], float] = trio.current_time
    chunk_blocks: int = 3
    chunk_seconds: float = 0.01
    """The largest time that one chunk takes when it is not slow."""
    queue_max: int = 8
    attached: set[SimMemory] = attrs.field(factory=set, init=False)
    _exported: dict[bytes, Bytes] = attrs.field(factory=dict, init=False)
    _lanes: dict[Direction, _Lane] = attrs.field(init=False)
    _busy: bool = attrs.field(default=False, init=False)
    _totals: Counter[tuple[str, Direction]] = attrs.field(factory=Counter, init=False)
    _seconds: defaultdict[tuple[str, Direction], float] = attrs.field(
        factory=lambda: defaultdict(float), init=False
    )

    def __attrs_post_init__(self) -> None:
        """Two empty lanes."""
        self._lanes = {direction: _Lane() for direction in DIRECTIONS}

    @property
    def worst_chunk_seconds(self) -> float:
        """How long after its deadline a call may still move bytes."""
        return self.chunk_seconds * (SLOW_FACTOR if self.faults.slow else 1.0)

    # ---- the engine process's side

    def export(self, handle: bytes, array: Bytes) -> Region:
        """Make memory attachable, as cudaIpcGetMemHandle does."""
        self._exported[handle] = array
        return Region(len(array), CudaIpc(handle, "SIM-0", 0))

    def vanish(self, handle: bytes) -> None:
        """The exporting process has died and took its memory along."""
        array = self._exported.pop(handle, None)
        for memory in self.attached:
            memory.gone |= any(mine is array for mine in memory.arrays)

    # ---- the contract

    async def attach(self, regions: Sequence[Region], fds: Sequence[int]) -> SimMemory:
        """Open exported memory; like a thread's work, sometimes not to be cancelled."""
        dice = self.faults.dice
        with trio.CancelScope(shield=dice.random() < 0.5):
            await trio.sleep(dice.random() * self.chunk_seconds)
        arrays: list[Bytes] = []
        for region in regions:
            source = region.source
            array = self._exported.get(source.handle) if isinstance(source, CudaIpc) else None
            if array is None or self.faults.happens("attach_fails", self.faults.attach_fails):
                raise MemoryGone("nobody exports this memory")
            if region.size_bytes > len(array):
                raise BadRequest("the region is larger than its memory", "regions.sizeBytes")
            arrays.append(array)
        memory = SimMemory(tuple(regions), tuple(arrays))
        self.attached.add(memory)
        return memory

    async def detach(self, memory: AttachedMemory) -> None:
        """Close it, when the last copy has let go."""
        mine = self._mine(memory)
        assert not mine.detached, "detached twice"
        mine.detached = True
        with trio.CancelScope(shield=True):
            if mine.users:
                await mine.idle.wait()
        self.attached.remove(mine)
        await trio.lowlevel.checkpoint()

    async def copy(
        self,
        direction: Direction,
        memory: AttachedMemory,
        batches: Sequence[Copies],
        *,
        deadline: float,
    ) -> NDArray[np.bool_]:
        """Move blocks; see the contract."""
        mine = self._mine(memory)
        if mine.gone or mine.detached:
            raise MemoryGone("this memory is not attached any more")
        if len(self._lanes[direction].waiting) >= self.queue_max:
            self.faults.injected["queue_full"] += 1
            raise Overloaded(f"{self.queue_max} batches wait already")
        mine.users += 1
        began = self.clock()
        try:
            with trio.CancelScope(shield=True):
                await self._turn(direction)
                try:
                    self._seconds["wait", direction] += self.clock() - began
                    failed = await self._run(direction, mine, batches, deadline)
                finally:
                    self._next_turn()
        finally:
            mine.users -= 1
            if not mine.users:
                mine.idle.set()
                if not mine.detached:
                    mine.idle = trio.Event()
        lost = int(np.count_nonzero(failed))
        self._totals["batches", direction] += 1
        self._totals["failed", direction] += lost
        self._totals["blocks", direction] += len(failed) - lost
        return failed

    def statistics(self) -> EngineStatistics:
        """Totals."""

        def totals(what: str) -> dict[Direction, int]:
            return {direction: self._totals[what, direction] for direction in DIRECTIONS}

        def seconds(what: str) -> dict[Direction, float]:
            return {direction: self._seconds[what, direction] for direction in DIRECTIONS}

        return EngineStatistics(
            batches=totals("batches"),
            blocks=totals("blocks"),
            bytes_copied=totals("bytes"),
            failed_blocks=totals("failed"),
            queued={direction: len(self._lanes[direction].waiting) for direction in DIRECTIONS},
            busy_seconds=seconds("busy"),
            method_bytes={},
            wait_seconds=seconds("wait"),
        )

    # ---- the device

    def _mine(self, memory: AttachedMemory) -> SimMemory:
        assert isinstance(memory, SimMemory)
        return memory

    async def _turn(self, direction: Direction) -> None:
        if not self._busy:
            self._busy = True
            return
        turn = trio.Event()
        self._lanes[direction].waiting.append(turn)
        await turn.wait()

    def _next_turn(self) -> None:
        for direction in DIRECTIONS:
            if self._lanes[direction].waiting:
                self._lanes[direction].waiting.popleft().set()
                return
        self._busy = False

    async def _run(
        self, direction: Direction, memory: SimMemory, batches: Sequence[Copies], deadline: float
    ) -> NDArray[np.bool_]:
        work = [
            (batch.layout, int(block), int(offset))
            for batch in batches
            for block, offset in zip(batch.block_ids, batch.pool_offsets, strict=True)
        ]
        failed = np.ones(len(work), np.bool_)
        for at in range(0, len(work), self.chunk_blocks):
            if self.clock() >= deadline:
                self.faults.injected["deadline_passed"] += 1
                break
            chunk = work[at : at + self.chunk_blocks]
            failed[at : at + len(chunk)] = await self._chunk(direction, memory, chunk)
        return failed

    async def _chunk(
        self, direction: Direction, memory: SimMemory, chunk: list[tuple[GroupLayout, int, int]]
    ) -> list[bool]:
        faults = self.faults
        memory.gone |= faults.happens("memory_goes", faults.memory_goes)
        if memory.gone:
            raise MemoryGone("the memory went away")
        bad = [faults.happens("block_fails", faults.block_fails) for _ in chunk]
        good = [block for block, fails in zip(chunk, bad, strict=True) if not fails]
        for block in good:
            self._move(direction, memory, *block, first_half=True)
        seconds = faults.dice.random() * self.chunk_seconds
        seconds *= SLOW_FACTOR if faults.happens("slow", faults.slow) else 1.0
        await trio.sleep(seconds)
        self._seconds["busy", direction] += seconds
        if memory.gone:
            raise MemoryGone("the memory went away during the copy")
        for block in good:
            self._move(direction, memory, *block, first_half=False)
            self._totals["bytes", direction] += block[0].slot_bytes
        return bad

    def _move(
        self,
        direction: Direction,
        memory: SimMemory,
        layout: GroupLayout,
        block: int,
        offset: int,
        *,
        first_half: bool,
    ) -> None:
        for run in layout.runs:
            middle = run.length_bytes // 2
            low, high = (0, middle) if first_half else (middle, run.length_bytes)
            start = run.base_bytes + block * run.stride_bytes
            engine = memory.arrays[run.region][start + low : start + high]
            pool = self.pool[offset + low : offset + high]
            assert len(engine) == len(pool) == high - low, "outside of a memory"
            if direction == "save":
                pool[:] = engine
            else:
                engine[:] = pool
            offset += run.length_bytes
