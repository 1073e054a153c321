"""A pretended GPU: CuPy's few calls and the driver's two, over NumPy memory.

It shows that our half is right (who is asked what, what is closed when).  What the real half
does is shown by tests/device/ on a GPU machine.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType, SimpleNamespace
from typing import cast

import attrs
import host_memory
import numpy as np
from numpy.typing import NDArray

from pegaflow.engine.cuda import CudaDevices
from pegaflow.engine.cuda_driver import Addresses
from pegaflow.engine.lanes import DIRECTIONS
from pegaflow.model.layout import CudaIpc, Region
from pegaflow.testing.contract import Bench

Bytes = NDArray[np.uint8]
UUID = bytes(range(16))


class FakeError(RuntimeError):
    """As cupy.cuda.runtime.CUDARuntimeError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"pretended CUDA error {status}")
        self.status = status


@attrs.define(eq=False)
class CudaArrays:
    regions: tuple[Region, ...]
    fds: tuple[int, ...]
    arrays: list[Bytes]
    offset_bytes: int

    def read(self, region: int) -> Bytes:
        return self.arrays[region][self.offset_bytes :].copy()

    def write(self, region: int, content: Bytes) -> None:
        self.arrays[region][self.offset_bytes :] = content

    def shrink(self, region: int, size_bytes: int) -> bool:
        return False


@attrs.define
class FakeStream:
    ptr: int

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


@attrs.define(eq=False)
class FakeModule:
    """The three kernels: they copy what the table says."""

    cuda: FakeCuda

    def get_function(
        self, name: str
    ) -> Callable[[tuple[int], tuple[int], tuple[np.uint64, np.uint32]], None]:
        unit = int(name.removeprefix("move"))

        def launch(grid: tuple[int], block: tuple[int], args: tuple[np.uint64, np.uint32]) -> None:
            assert 0 < grid[0] <= 264
            assert 0 < block[0] <= 1024
            address, n = int(args[0]), int(args[1])
            words = (ctypes.c_uint64 * (3 * n)).from_address(address)
            table = np.ctypeslib.as_array(words).reshape(3, n).tolist()
            for origin, target, length in zip(*table, strict=True):
                assert not (origin | target | length) % unit
                ctypes.memmove(target, origin, length)
            self.cuda.launches += 1

        return launch


class FakeCuda:
    """Device, runtime and driver in one."""

    def __init__(self, batched: bool = True, staged_below: int = 0) -> None:
        self.batched, self.staged_below = batched, staged_below
        self.exported: dict[bytes, Bytes] = {}
        self.open_handles: list[int] = []
        self.open_events: set[int] = set()
        self.fail_copy = 0
        self.fail_wait = 0
        self.fail_malloc = 0
        self.launches = 0
        self.allocated: dict[int, Bytes] = {}
        self._numbers = itertools.count(1)
        self._streams = itertools.count(100)
        self.CUDARuntimeError = FakeError
        self.eventBlockingSync, self.eventDisableTiming = 1, 2

    # ---- the driver

    def allocation(self, pointer: int) -> tuple[int, int]:
        for array in self.exported.values():
            if array.ctypes.data <= pointer < array.ctypes.data + array.size:
                return array.ctypes.data, array.size
        raise AssertionError(pointer)

    def copy_batch(
        self, targets: Addresses, origins: Addresses, lengths: Addresses, stream: int
    ) -> None:
        assert self.batched
        for target, origin, length in zip(
            targets.tolist(), origins.tolist(), lengths.tolist(), strict=True
        ):
            self.memcpyAsync(target, origin, length, 0, stream)

    # ---- the runtime, in CUDA's spelling

    def setDevice(self, index: int) -> None:
        assert index == 0

    def memGetInfo(self) -> tuple[int, int]:
        return 1 << 30, 2 << 30

    def malloc(self, size: int) -> int:
        if self.fail_malloc:
            raise FakeError(self.fail_malloc)
        array = np.full(size, 0xEE, np.uint8)
        self.allocated[array.ctypes.data] = array
        return array.ctypes.data

    def hostAlloc(self, size: int, flags: int) -> int:
        return self.malloc(size)

    def free(self, pointer: int) -> None:
        if pointer:
            del self.allocated[pointer]

    freeHost = free

    def memcpyAsync(self, target: int, origin: int, length: int, kind: int, stream: int) -> None:
        assert stream >= 100, stream
        if self.fail_copy:
            raise FakeError(self.fail_copy)
        ctypes.memmove(target, origin, length)

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        if handle not in self.exported:
            raise FakeError(400)
        self.open_handles.append(self.exported[handle].ctypes.data)
        return self.open_handles[-1]

    def ipcCloseMemHandle(self, pointer: int) -> None:
        self.open_handles.remove(pointer)

    def eventCreateWithFlags(self, flags: int) -> int:
        assert flags == 3
        event = next(self._numbers)
        self.open_events.add(event)
        return event

    def eventRecord(self, event: int, stream: int) -> None:
        assert event in self.open_events

    def eventSynchronize(self, event: int) -> None:
        assert event in self.open_events
        if self.fail_wait:
            raise FakeError(self.fail_wait)

    def eventDestroy(self, event: int) -> None:
        self.open_events.remove(event)

    # ---- what tests use

    def devices(self) -> CudaDevices:
        cuda = SimpleNamespace(runtime=self, Stream=lambda **_: FakeStream(next(self._streams)))
        cupy = SimpleNamespace(cuda=cuda, RawModule=lambda code: FakeModule(self))
        return CudaDevices(cast(ModuleType, cupy), self, {0: f"GPU-{UUID.hex()}"})

    @asynccontextmanager
    async def open_engine(self, queue_capacity: int) -> AsyncIterator[Bench]:
        pool = host_memory.plain_pool()
        async with self.devices().open(
            pool, queue_capacity=queue_capacity, part_bytes=1 << 20, measured=False
        ) as engine:
            for device in engine.devices.values():
                device.choice.staged_below_bytes = dict.fromkeys(DIRECTIONS, self.staged_below)
            yield Bench(engine, np.frombuffer(pool, np.uint8))

    @contextmanager
    def make_memory(self, sizes: Sequence[int], offset_bytes: int) -> Iterator[CudaArrays]:
        arrays = [np.zeros(offset_bytes + size, np.uint8) for size in sizes]
        handles = [next(self._numbers).to_bytes(64, "little") for _ in sizes]
        self.exported.update(zip(handles, arrays, strict=True))
        regions = tuple(
            Region(size, CudaIpc(handle, UUID.hex(), offset_bytes))
            for size, handle in zip(sizes, handles, strict=True)
        )
        yield CudaArrays(regions, (-1,) * len(sizes), arrays, offset_bytes)
        for handle in handles:
            del self.exported[handle]
