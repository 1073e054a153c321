"""One direction of one GPU: which bytes go over which stream, and by which method.

``direct`` gives all ranges to the copy engines in batches, spread over a few streams.  ``staged``
lets a kernel gather small ranges in device memory first (or scatter them at the end), so that the
copy engines see large ones: twice as fast where ranges are small, but a kernel takes turns with
the model's.  Measurements: benchmarks/NOTES.md; the choice: :class:`Choice`.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Final, Literal, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from pegaflow.engine.base import Copies, Direction
from pegaflow.engine.cuda_driver import Addresses, Driver
from pegaflow.engine.lanes import Pace
from pegaflow.engine.segments import (
    Ints,
    Layouts,
    Merged,
    check_batch,
    count_blocks,
    lay_out,
    merge,
)
from pegaflow.model.layout import GroupLayout

Method = Literal["direct", "staged"]
METHODS: Final[tuple[Method, Method]] = ("direct", "staged")

PART_BYTES: Final = 16 << 20
"""Queued at once; also the grain of deadlines."""
CHUNK_BYTES: Final = 64 << 20
"""Laid out at once: the GPU copies one chunk while NumPy describes the next."""
STREAMS: Final = 8
PARTS_IN_FLIGHT: Final = 8
STAGES: Final = 2
STAGE_BYTES_MIN: Final = 16 << 20
STAGE_BYTES_MAX: Final = 256 << 20
"""The larger, the less often a kernel takes turns with the model's."""
STAGE_SHARE: Final = 64
"""One stage takes at most this part of the GPU memory that is free when it is made."""
RANGES_MAX: Final = 1 << 16
"""In one stage."""
TABLE_WORDS: Final = 3 * RANGES_MAX

_KIND: Final[dict[Direction, int]] = {"save": 2, "load": 1}  # cudaMemcpyKind: D2H, H2D
_PRIORITY: Final[dict[Direction, int]] = {"save": 0, "load": -5}  # lower goes first; CUDA clamps
_GRID_MAX, _THREADS = 264, 512

KERNELS: Final = """
#define MOVE(NAME, T)                                                                       \\
  extern "C" __global__ void NAME(const unsigned long long* table, unsigned int n) {         \\
    for (unsigned int i = blockIdx.x; i < n; i += gridDim.x) {                               \\
      const T* from = (const T*)table[i];                                                    \\
      T* to = (T*)table[(unsigned long long)n + i];                                          \\
      unsigned long long count = table[2ull * n + i] / sizeof(T);                            \\
      for (unsigned long long j = threadIdx.x; j < count; j += blockDim.x) to[j] = from[j];  \\
    }                                                                                        \\
  }
MOVE(move16, uint4)
MOVE(move4, unsigned int)
MOVE(move1, unsigned char)
"""
"""The table: n addresses to read, n to write, n lengths in bytes."""


class Mapped(Protocol):
    """A rank's memory on this device."""

    @property
    def layouts(self) -> Layouts: ...
    @property
    def pointers(self) -> Ints:
        """Where each region begins, shape (regions,)."""


class Kernel(Protocol):
    """A compiled kernel, launched on CuPy's current stream."""

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[object, ...]
    ) -> None: ...


class Stream(Protocol):
    """CuPy's: ``with`` makes it current."""

    ptr: int

    def __enter__(self) -> object: ...
    def __exit__(self, *exc: object) -> None: ...


@attrs.define(eq=False)
class Choice:
    """Ranges shorter than this on average are staged; 0 switches staging off."""

    staged_below_bytes: dict[Direction, int] = attrs.field(
        factory=lambda: {"save": 48 << 10, "load": 48 << 10}
    )
    measured_gbps: dict[tuple[Direction, Method, int], float] = attrs.field(factory=dict)
    """By range size, when it was measured: see :func:`pegaflow.engine.cuda.calibrate`."""

    def method(self, direction: Direction, range_bytes: Ints) -> Method:
        """For blocks that consist of ranges of these lengths."""
        small = int(range_bytes.sum()) < self.staged_below_bytes[direction] * range_bytes.size
        return "staged" if small else "direct"


@attrs.define(eq=False)
class _Stage:
    """Device memory between two copies, with the table of the kernel's ranges."""

    stream: Stream
    address: int = 0
    table_device: int = 0
    table_host: int = 0
    table: Addresses = attrs.field(factory=lambda: np.empty(0, np.uint64))
    """Pinned memory at ``table_host``, shape (TABLE_WORDS,)."""


@attrs.frozen(eq=False)
class _Group:
    """Blocks of one layout, out of all batches of a call."""

    layout: GroupLayout
    index: NDArray[np.intp]
    ids: Ints
    offsets: Ints


@attrs.define(eq=False, kw_only=True)
class Copier:
    """Used on the thread of its direction alone.  Nothing is in flight between two calls."""

    cupy: ModuleType
    driver: Driver
    direction: Direction
    pool_address: int
    pool_bytes: int
    seams: Ints
    part_bytes: int
    pace: Pace
    choice: Choice
    method_bytes: dict[Method, int] = attrs.field(factory=lambda: dict.fromkeys(METHODS, 0))
    staging_trouble: str = ""
    """Why staging is not to be had here, once it was tried."""
    _streams: list[Stream] = attrs.field(init=False, factory=list)
    _stages: list[_Stage] = attrs.field(init=False, factory=list)
    _stage_bytes: int = attrs.field(init=False, default=0)
    _kernels: dict[int, Kernel] = attrs.field(init=False, factory=dict)
    _in_flight: deque[int] = attrs.field(init=False, factory=deque)
    """Events, in the order of their parts."""
    _turn: int = attrs.field(init=False, default=0)

    def move(
        self,
        memory: Mapped,
        batches: Sequence[Copies],
        deadline: float,
        method: Method | None = None,
    ) -> NDArray[np.bool_]:
        """Queue part by part; return which blocks failed when the GPU is done with all.

        Waits for the GPU in any case, also before raising.
        """
        failed = np.ones(count_blocks(batches), np.bool_)
        for copies in batches:
            check_batch(copies, self.pool_bytes)
            memory.layouts.arrays(copies.layout)
        try:
            for group in _by_layout(batches):
                ranges = memory.layouts.arrays(group.layout).length
                chosen = method or self.choice.method(self.direction, ranges)
                if chosen == "staged" and not self._can_stage(group.layout.slot_bytes):
                    chosen = "direct"
                queue = self._queue_staged if chosen == "staged" else self._queue_direct
                done = queue(memory, group, deadline)
                failed[group.index[done]] = False
                self.method_bytes[chosen] += int(done.sum()) * group.layout.slot_bytes
                if not done.all():
                    break
        finally:
            self._drain()
        return failed

    def close(self) -> None:
        """On the thread: give device memory back."""
        runtime = self.cupy.cuda.runtime
        for stage in self._stages:
            for address in (stage.address, stage.table_device):
                if address:
                    runtime.free(address)
            if stage.table_host:
                runtime.freeHost(stage.table_host)
        self._stages.clear()
        self._streams.clear()

    # ---- direct

    def _queue_direct(self, memory: Mapped, group: _Group, deadline: float) -> NDArray[np.bool_]:
        """Which blocks were queued whole."""
        queued = np.zeros(group.ids.size, np.bool_)
        order = np.argsort(group.ids, kind="stable")  # neighbours in memory may become one range
        step = max(1, CHUNK_BYTES // group.layout.slot_bytes)
        for begin in range(0, order.size, step):
            at = order[begin : begin + step]
            copies = Copies(group.layout, group.ids[at], group.offsets[at])
            segments = lay_out(memory.layouts, [copies], self.part_bytes, self.pool_bytes)
            parts = int(segments.part[-1]) + 1
            done = self._queue_ranges(memory, merge(segments, self.seams), parts, deadline)
            queued[at] = True
            if done < parts:
                queued[at[segments.block[segments.part >= done]]] = False
                break
        return queued

    def _queue_ranges(self, memory: Mapped, ranges: Merged, parts: int, deadline: float) -> int:
        """How many parts were queued."""
        device = (ranges.memory + memory.pointers[ranges.region]).astype(np.uint64)
        host = (ranges.pool + self.pool_address).astype(np.uint64)
        length = ranges.length.astype(np.uint64)
        target, origin = (host, device) if self.direction == "save" else (device, host)
        edges = np.searchsorted(ranges.part, np.arange(parts + 1)).tolist()
        for part in range(parts):
            piece = slice(edges[part], edges[part + 1])
            if not self._admit(int(ranges.length[piece].sum()), deadline):
                return part
            stream = self._next_stream()
            self._copy(target[piece], origin[piece], length[piece], stream.ptr)
            self._record(stream)
        return parts

    # ---- staged

    def _queue_staged(self, memory: Mapped, group: _Group, deadline: float) -> NDArray[np.bool_]:
        """Which blocks were queued."""
        queued = np.zeros(group.ids.size, np.bool_)
        runs = memory.layouts.arrays(group.layout)
        slot_bytes, runs_count = group.layout.slot_bytes, runs.length.size
        order = np.argsort(group.offsets, kind="stable")  # neighbours in the pool are one range
        step = max(1, min(self._stage_bytes // slot_bytes, RANGES_MAX // runs_count))
        base = memory.pointers[runs.region] + runs.base
        for begin in range(0, order.size, step):
            at = order[begin : begin + step]
            if not self._admit(at.size * slot_bytes, deadline, in_flight_max=STAGES):
                break
            self._turn += 1
            stage = self._stages[self._turn % STAGES]  # free: fewer parts than that are in flight
            shape = (at.size, runs_count)
            kv = base + group.ids[at][:, None] * runs.stride
            staged = stage.address + np.arange(at.size)[:, None] * slot_bytes + runs.shift
            length = np.broadcast_to(runs.length, shape)
            pool = self._pool_ranges(group.offsets[at], slot_bytes)
            with stage.stream:
                if self.direction == "save":
                    self._launch(stage, kv, staged, length)
                    self._copy(
                        pool[0], pool[1] + np.uint64(stage.address), pool[2], stage.stream.ptr
                    )
                else:
                    self._copy(
                        pool[1] + np.uint64(stage.address), pool[0], pool[2], stage.stream.ptr
                    )
                    self._launch(stage, staged, kv, length)
            self._record(stage.stream)
            queued[at] = True
        return queued

    def _pool_ranges(
        self, offsets: Ints, slot_bytes: int
    ) -> tuple[Addresses, Addresses, Addresses]:
        """(addresses in the pool, offsets in the stage, lengths) of rising slots, joined."""
        breaks = np.ones(offsets.size, np.bool_)
        breaks[1:] = offsets[1:] != offsets[:-1] + slot_bytes
        if self.seams.size:
            slab = np.searchsorted(self.seams, offsets, "right")
            breaks[1:] |= slab[1:] != slab[:-1]
        first = np.flatnonzero(breaks)
        length = np.diff(np.append(first, offsets.size)) * slot_bytes
        return (
            (offsets[first] + self.pool_address).astype(np.uint64),
            (first * slot_bytes).astype(np.uint64),
            length.astype(np.uint64),
        )

    def _launch(self, stage: _Stage, origin: Ints, target: Ints, length: Ints) -> None:
        """Copy within the device, on the current stream."""
        n = origin.size
        table = stage.table[: 3 * n].reshape(3, n)
        table[0], table[1], table[2] = origin.ravel(), target.ravel(), length.ravel()
        unit = math.gcd(16, int(np.bitwise_or.reduce(table, axis=None)))
        kernel = self._kernels[16 if unit == 16 else 4 if unit >= 4 else 1]
        self.cupy.cuda.runtime.memcpyAsync(
            stage.table_device, stage.table_host, 24 * n, _KIND["load"], stage.stream.ptr
        )
        arguments = (np.uint64(stage.table_device), np.uint32(n))
        kernel((min(n, _GRID_MAX),), (_THREADS,), arguments)

    def _can_stage(self, slot_bytes: int) -> bool:
        """Make the stages on first use; without room or a compiler copies stay direct."""
        if not self._stages and not self.staging_trouble:
            try:
                self._make_stages()
            except Exception as exc:
                self.staging_trouble = f"{type(exc).__name__}: {exc}"[:300]
                self.close()
        return bool(self._stages) and slot_bytes <= self._stage_bytes

    def _make_stages(self) -> None:
        runtime = self.cupy.cuda.runtime
        share_bytes = runtime.memGetInfo()[0] // STAGE_SHARE // STAGE_BYTES_MIN * STAGE_BYTES_MIN
        self._stage_bytes = max(STAGE_BYTES_MIN, min(share_bytes, STAGE_BYTES_MAX))
        module = self.cupy.RawModule(code=KERNELS)
        self._kernels = {unit: module.get_function(f"move{unit}") for unit in (16, 4, 1)}
        for _ in range(STAGES):
            stage = _Stage(self._new_stream())
            self._stages.append(stage)  # at once, so that close() finds what was allocated
            stage.address = runtime.malloc(self._stage_bytes)
            stage.table_device = runtime.malloc(8 * TABLE_WORDS)
            stage.table_host = runtime.hostAlloc(8 * TABLE_WORDS, 0)
            words = (ctypes.c_uint64 * TABLE_WORDS).from_address(stage.table_host)
            stage.table = np.ctypeslib.as_array(words)

    # ---- both

    def _admit(self, size_bytes: int, deadline: float, in_flight_max: int | None = None) -> bool:
        """Wait until one more part may be queued; False when it is too late for it."""
        self.pace.wait(size_bytes, deadline)
        limit = PARTS_IN_FLIGHT if in_flight_max is None else in_flight_max
        while len(self._in_flight) > limit - 1:
            self._wait_for_oldest()
        return time.monotonic() < deadline

    def _copy(
        self, targets: Addresses, origins: Addresses, lengths: Addresses, stream: int
    ) -> None:
        if self.driver.batched:
            self.driver.copy_batch(targets, origins, lengths, stream)
            return
        copy, kind = self.cupy.cuda.runtime.memcpyAsync, _KIND[self.direction]
        triples = zip(targets.tolist(), origins.tolist(), lengths.tolist(), strict=True)
        for target, origin, length in triples:
            copy(target, origin, length, kind, stream)

    def _next_stream(self) -> Stream:
        if not self._streams:
            self._streams = [self._new_stream() for _ in range(STREAMS)]
        self._turn += 1
        return self._streams[self._turn % STREAMS]

    def _new_stream(self) -> Stream:
        stream: Stream = self.cupy.cuda.Stream(
            non_blocking=True, priority=_PRIORITY[self.direction]
        )
        return stream

    def _record(self, stream: Stream) -> None:
        """An event behind everything queued so far; who waits for it sleeps and does not spin."""
        runtime = self.cupy.cuda.runtime
        flags = runtime.eventBlockingSync | runtime.eventDisableTiming
        event = runtime.eventCreateWithFlags(flags)
        self._in_flight.append(event)
        runtime.eventRecord(event, stream.ptr)

    def _wait_for_oldest(self) -> None:
        event = self._in_flight[0]
        try:
            self.cupy.cuda.runtime.eventSynchronize(event)
        finally:
            self._in_flight.popleft()
            self.cupy.cuda.runtime.eventDestroy(event)

    def _drain(self) -> None:
        """Wait until the GPU has let go of both memories: also of what no event stands behind."""
        runtime = self.cupy.cuda.runtime
        try:
            for stream in (*self._streams, *(stage.stream for stage in self._stages)):
                self._record(stream)
            while self._in_flight:
                self._wait_for_oldest()
        finally:
            while self._in_flight:
                runtime.eventDestroy(self._in_flight.popleft())


def _by_layout(batches: Sequence[Copies]) -> Iterator[_Group]:
    """Batches of one layout as one: a step's saves are many runs of a few blocks."""
    members: dict[int, list[tuple[int, Copies]]] = {}
    first = 0
    for copies in batches:
        if copies.block_ids.size:
            members.setdefault(id(copies.layout), []).append((first, copies))
        first += int(copies.block_ids.size)
    for group in members.values():
        yield _Group(
            group[0][1].layout,
            np.concatenate([np.arange(at, at + c.block_ids.size) for at, c in group]),
            np.concatenate([c.block_ids for _, c in group]),
            np.concatenate([c.pool_offsets for _, c in group]),
        )
