"""A thread a direction: what the host and the CUDA engine have in common."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import attrs
import numpy as np
import trio
from numpy.typing import NDArray

from pegaflow.engine.base import Copies, Direction, EngineStatistics
from pegaflow.engine.device_thread import DeviceThread
from pegaflow.engine.segments import Layouts, count_blocks
from pegaflow.errors import DeviceTrouble, MemoryGone
from pegaflow.model.layout import Region

DIRECTIONS: Final[tuple[Direction, Direction]] = ("save", "load")


@attrs.define(eq=False)
class Held:
    """Attached memory and who uses it.  Touched on the Trio thread only, except ``layouts``."""

    regions: tuple[Region, ...]
    layouts: Layouts = attrs.field(init=False)
    _users: int = attrs.field(init=False, default=0)
    _detached: bool = attrs.field(init=False, default=False)
    _idle: trio.Event = attrs.field(init=False, factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self.layouts = Layouts(self.regions)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep it open for the block.  Raises :exc:`MemoryGone` when it is detached."""
        if self._detached:
            raise MemoryGone("this memory was detached")
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._last_use_ended()

    def _last_use_ended(self) -> None:
        if self._detached:
            self._idle.set()

    async def retire(self) -> None:
        """Let no new copy begin; return when the last one has ended, also when cancelled.

        The wait is shielded: copies end by their deadlines, and memory that is forgotten half
        closed would never be closed.
        """
        assert not self._detached, "memory is detached twice"
        self._detached = True
        if self._users:
            with trio.CancelScope(shield=True):
                await self._idle.wait()


class LoadsFirst:
    """Lets saves step aside while loads wait, for devices on which both share one resource.

    A save pauses before each of its parts while a load waits or runs, but for ``patience``
    seconds at most: somebody waits for a load, nobody waits for a save, yet a save that never
    ends holds the engine's blocks.
    """

    def __init__(self, patience_seconds: float = 0.02) -> None:
        self._patience_seconds = patience_seconds
        self._loads = 0
        self._none = threading.Condition()

    @contextmanager
    def load(self) -> Iterator[None]:
        """A load waits or runs."""
        with self._none:
            self._loads += 1
        try:
            yield
        finally:
            with self._none:
                self._loads -= 1
                if not self._loads:
                    self._none.notify_all()

    def step_aside(self) -> None:
        """Called on the save thread between parts."""
        if self._loads:
            with self._none:
                self._none.wait_for(lambda: not self._loads, self._patience_seconds)


class Pace:
    """At most so many bytes a second for all that share it (``--save-bandwidth``); None: no cap.

    It delays what would be too early and never catches up: an idle minute allows no burst.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, size_bytes: int, deadline: float) -> None:
        """Sleep until ``size_bytes`` more are due, but not past ``deadline``.  Any thread."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            if begin >= deadline:
                begin = deadline  # too late for this one, which takes nobody's turn
            else:
                self._free_at = begin + size_bytes / self._rate
        time.sleep(max(0.0, begin - now))


@attrs.define(eq=False)
class _Totals:
    batches: int = 0
    blocks: int = 0
    bytes_copied: int = 0
    failed_blocks: int = 0


def _per_direction() -> dict[Direction, _Totals]:
    return {direction: _Totals() for direction in DIRECTIONS}


@attrs.define(eq=False)
class Lanes:
    """The two threads of one device and what went through them.

    A load never waits behind a save: each direction has its own queue and its own thread.
    """

    name: str
    queue_capacity: int = 64
    setup: Callable[[], None] | None = None
    save_pace: Pace = attrs.field(factory=Pace)
    loads_first: LoadsFirst = attrs.field(init=False, factory=LoadsFirst)
    threads: dict[Direction, DeviceThread] = attrs.field(init=False)
    _totals: dict[Direction, _Totals] = attrs.field(init=False, factory=_per_direction)

    def __attrs_post_init__(self) -> None:
        self.threads = {
            direction: DeviceThread(f"{self.name}-{direction}", self.queue_capacity, self.setup)
            for direction in DIRECTIONS
        }

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; returns when both threads have ended."""
        async with trio.open_nursery() as nursery:
            for thread in self.threads.values():
                await nursery.start(thread.run)
            task_status.started()

    async def copy(
        self,
        direction: Direction,
        memory: Held,
        batches: Sequence[Copies],
        work: Callable[[], NDArray[np.bool_]],
    ) -> NDArray[np.bool_]:
        """Run ``work`` on the direction's thread and count what came of it."""
        blocks = count_blocks(batches)
        if not blocks:
            await trio.lowlevel.checkpoint()
            return np.zeros(0, np.bool_)
        with memory.used():
            try:
                failed = await self._call(direction, work)
            except DeviceTrouble:
                self._count(direction, batches, np.ones(blocks, np.bool_))
                raise
        assert failed.shape == (blocks,), (failed.shape, blocks)
        self._count(direction, batches, failed)
        return failed

    def statistics(self) -> EngineStatistics:
        """A snapshot; callable from any thread."""
        totals, threads = self._totals, self.threads
        return EngineStatistics(
            batches={d: totals[d].batches for d in DIRECTIONS},
            blocks={d: totals[d].blocks for d in DIRECTIONS},
            bytes_copied={d: totals[d].bytes_copied for d in DIRECTIONS},
            failed_blocks={d: totals[d].failed_blocks for d in DIRECTIONS},
            queued={d: threads[d].queued for d in DIRECTIONS},
            busy_seconds={d: threads[d].busy_seconds for d in DIRECTIONS},
            wait_seconds={d: threads[d].wait_seconds for d in DIRECTIONS},
            method_bytes={},
        )

    async def _call(
        self, direction: Direction, work: Callable[[], NDArray[np.bool_]]
    ) -> NDArray[np.bool_]:
        if direction == "save":
            return await self.threads[direction].call(work)
        with self.loads_first.load():
            return await self.threads[direction].call(work)

    def _count(
        self, direction: Direction, batches: Sequence[Copies], failed: NDArray[np.bool_]
    ) -> None:
        total = self._totals[direction]
        total.batches += 1
        begin = 0
        for copies in batches:
            end = begin + int(copies.block_ids.size)
            lost = int(np.count_nonzero(failed[begin:end]))
            total.blocks += end - begin - lost
            total.failed_blocks += lost
            total.bytes_copied += (end - begin - lost) * copies.layout.slot_bytes
            begin = end


def add_up(parts: Sequence[EngineStatistics]) -> EngineStatistics:
    """Sum over engines or devices."""

    def ints(name: str) -> dict[Direction, int]:
        return {d: sum(getattr(part, name)[d] for part in parts) for d in DIRECTIONS}

    def floats(name: str) -> dict[Direction, float]:
        return {d: sum((getattr(part, name)[d] for part in parts), 0.0) for d in DIRECTIONS}

    method_bytes: dict[tuple[Direction, str], int] = {}
    for part in parts:
        for key, size in part.method_bytes.items():
            method_bytes[key] = method_bytes.get(key, 0) + size
    return EngineStatistics(
        batches=ints("batches"),
        blocks=ints("blocks"),
        bytes_copied=ints("bytes_copied"),
        failed_blocks=ints("failed_blocks"),
        queued=ints("queued"),
        busy_seconds=floats("busy_seconds"),
        wait_seconds=floats("wait_seconds"),
        method_bytes=method_bytes,
        staged_below_bytes={
            d: max((part.staged_below_bytes.get(d, 0) for part in parts), default=0)
            for d in DIRECTIONS
        },
    )
