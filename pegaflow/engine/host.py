"""Copies between a CPU engine's memory (a file descriptor) and the pool, by preadv and pwritev.

The daemon never maps the engine's memory.  A file that its owner truncates is then a short
read, and a mapping of it would have been a SIGBUS that ends the daemon (ADR 0007).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs
import numpy as np
import trio
from numpy.typing import NDArray

from pegaflow.engine.base import AttachedMemory, Copies, Direction, EngineStatistics
from pegaflow.engine.lanes import Held, Lanes, Pace
from pegaflow.engine.segments import Ints, Merged, Segments, count_blocks, lay_out, merge
from pegaflow.errors import BadRequest, MemoryGone, Overloaded
from pegaflow.model.layout import HandedOver, Region

PART_BYTES: Final = 4 << 20
_VECTOR_MAX: Final = 1024  # IOV_MAX of Linux, by its system call interface

_libc = ctypes.CDLL(None, use_errno=True)
_SYSCALLS = {"save": _libc.preadv, "load": _libc.pwritev}
for _function in _SYSCALLS.values():
    _function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    _function.restype = ctypes.c_ssize_t


@attrs.define(eq=False)
class HostMemory(Held):
    """File descriptors of our own, one a region."""

    fds: tuple[int, ...]
    starts: tuple[int, ...]
    """Where each region begins in its file."""

    def close(self) -> None:
        """Give the descriptors back."""
        for fd in self.fds:
            os.close(fd)


@attrs.frozen(eq=False)
class _Calls:
    """System calls: call ``i`` moves ``ranges[first[i]:first[i + 1]]``, one range of the file.

    The lists are as long as there are calls, ``first`` has one entry more.
    """

    vectors: NDArray[np.uint64]
    first: list[int]
    region: list[int]
    offset: list[int]
    length: list[int]
    part: list[int]


@attrs.define(eq=False)
class HostCopyEngine:
    """The contract of :mod:`pegaflow.engine.base` for memory behind file descriptors.

    ``pool`` is a writable buffer that outlives the engine.  Open it with
    :func:`open_host_engine`.
    """

    pool: memoryview
    lanes: Lanes
    part_bytes: int = PART_BYTES
    _address: int = attrs.field(init=False)
    _attached: set[HostMemory] = attrs.field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        self._address = np.frombuffer(self.pool, np.uint8).ctypes.data

    async def attach(self, regions: Sequence[Region], fds: Sequence[int]) -> AttachedMemory:
        """Duplicate the descriptors; see :class:`pegaflow.engine.base.CopyEngine`."""
        await trio.lowlevel.checkpoint()
        own: list[int] = []
        try:
            for region, fd in zip(regions, fds, strict=True):
                own.append(_duplicate(fd, region))
                _check_file(own[-1], region)
        except BaseException:
            for fd in own:
                os.close(fd)
            raise
        memory = HostMemory(tuple(regions), tuple(own), tuple(map(_start, regions)))
        self._attached.add(memory)
        return memory

    async def detach(self, memory: AttachedMemory) -> None:
        """Close the descriptors after the last copy that uses them."""
        assert isinstance(memory, HostMemory), memory
        try:
            await memory.retire()
        finally:
            self._attached.remove(memory)
            memory.close()
        await trio.lowlevel.checkpoint()

    async def copy(
        self,
        direction: Direction,
        memory: AttachedMemory,
        batches: Sequence[Copies],
        *,
        deadline: float,
    ) -> NDArray[np.bool_]:
        """Copy on the direction's thread; see :class:`pegaflow.engine.base.CopyEngine`."""
        assert isinstance(memory, HostMemory), memory
        return await self.lanes.copy(
            direction, memory, batches, lambda: self._move(direction, memory, batches, deadline)
        )

    def statistics(self) -> EngineStatistics:
        """A snapshot; callable from any thread."""
        found = self.lanes.statistics()
        by_method = {(d, "system-call"): size for d, size in found.bytes_copied.items()}
        return attrs.evolve(found, method_bytes=by_method)

    def close(self) -> None:
        """Close what is still attached, once the threads have ended."""
        while self._attached:
            self._attached.pop().close()

    def _move(
        self,
        direction: Direction,
        memory: HostMemory,
        batches: Sequence[Copies],
        deadline: float,
    ) -> NDArray[np.bool_]:
        """On the device thread: which blocks failed."""
        if time.monotonic() >= deadline:
            return np.ones(count_blocks(batches), np.bool_)
        segments = lay_out(memory.layouts, batches, self.part_bytes, self.pool.nbytes)
        ranges = merge(segments)
        calls = _group(ranges, memory, self._address)
        moved = self._run(direction, memory, calls, deadline)
        failed = np.zeros(count_blocks(batches), np.bool_)
        expected = np.array(calls.length, np.int64)
        for i in np.flatnonzero(moved != expected).tolist():
            first = int(ranges.first[calls.first[i]])
            behind = int(ranges.first[calls.first[i + 1]])
            _mark(failed, segments, first, behind, int(moved[i]))
        return failed

    def _run(
        self, direction: Direction, memory: HostMemory, calls: _Calls, deadline: float
    ) -> Ints:
        """Bytes moved, one number a call."""
        moved = np.zeros(len(calls.length), np.int64)
        vectors = calls.vectors.ctypes.data
        part = -1
        for i, length in enumerate(calls.length):
            if calls.part[i] != part:
                part = calls.part[i]
                if direction == "save":
                    self.lanes.loads_first.step_aside()
                    self.lanes.save_pace.wait(self.part_bytes, deadline)
                if time.monotonic() >= deadline:
                    break
            fd, offset = memory.fds[calls.region[i]], calls.offset[i]
            # A write behind the end would make the file grow again instead of failing.
            if direction == "load" and offset + length > os.fstat(fd).st_size:
                continue
            first, count = calls.first[i], calls.first[i + 1] - calls.first[i]
            moved[i] = _transfer(direction, fd, vectors + 16 * first, count, offset)
        return moved


@asynccontextmanager
async def open_host_engine(
    pool: memoryview,
    *,
    queue_capacity: int = 64,
    part_bytes: int = PART_BYTES,
    save_pace: Pace | None = None,
) -> AsyncIterator[HostCopyEngine]:
    """A host engine whose two threads end with the block, after the copies they have taken."""
    lanes = Lanes("host", queue_capacity, save_pace=save_pace or Pace())
    engine = HostCopyEngine(pool, lanes, part_bytes)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.lanes.run)
            yield engine
            nursery.cancel_scope.cancel()
    finally:
        engine.close()


def _group(ranges: Merged, memory: HostMemory, pool_address: int) -> _Calls:
    """Ranges that follow each other in a file become one call with many vectors."""
    starts = np.array(memory.starts, np.int64)
    offset = ranges.memory + starts[ranges.region]
    # By file and not by region: regions of one file may well be neighbours.
    breaks = np.ones(offset.size, np.bool_)
    breaks[1:] = (
        (ranges.region[1:] != ranges.region[:-1])
        | (ranges.part[1:] != ranges.part[:-1])
        | (offset[1:] != offset[:-1] + ranges.length[:-1])
    )
    index = np.arange(offset.size)
    within = index - np.maximum.accumulate(np.where(breaks, index, 0))
    first = np.flatnonzero(within % _VECTOR_MAX == 0)
    vectors = np.empty((offset.size, 2), np.uint64)
    vectors[:, 0] = ranges.pool + pool_address
    vectors[:, 1] = ranges.length
    return _Calls(
        vectors,
        [*first.tolist(), offset.size],
        ranges.region[first].tolist(),
        offset[first].tolist(),
        np.add.reduceat(ranges.length, first).tolist(),
        ranges.part[first].tolist(),
    )


def _mark(
    failed: NDArray[np.bool_], segments: Segments, first: int, behind: int, moved: int
) -> None:
    """Fail the blocks of segments ``first:behind`` that end after the first ``moved`` bytes."""
    ends = np.cumsum(segments.length[first:behind])
    failed[segments.block[first:behind][ends > moved]] = True


def _transfer(direction: Direction, fd: int, vectors: int, count: int, offset: int) -> int:
    """One system call, without the GIL.  Raises :exc:`MemoryGone` when the file is unusable."""
    function = _SYSCALLS[direction]
    while (done := int(function(fd, vectors, count, offset))) < 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        assert code not in {errno.EFAULT, errno.EINVAL}, (direction, count, offset, code)
        raise MemoryGone(f"{function.__name__} of handed-over memory: {os.strerror(code)}")
    return done


def _duplicate(fd: int, region: Region) -> int:
    if not isinstance(region.source, HandedOver):
        raise BadRequest("GPU memory, but this daemon serves no GPU", "regions")
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            raise Overloaded("no file descriptor is left for handed-over memory") from error
        raise MemoryGone(f"descriptor {fd} can't be opened: {error.strerror}") from error


def _check_file(fd: int, region: Region) -> None:
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        raise BadRequest("handed-over memory must be a memfd or a file", "source")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise BadRequest("handed-over memory must be readable and writable", "source")
    end = _start(region) + region.size_bytes
    if region.size_bytes <= 0 or _start(region) < 0 or end > about.st_size:
        raise BadRequest(
            f"a region ends at {end} of a file of {about.st_size} bytes", "regions.sizeBytes"
        )


def _start(region: Region) -> int:
    if not isinstance(region.source, HandedOver):
        raise BadRequest("this engine takes memory that was handed over", "source")
    return region.source.offset_bytes
