"""A pretended GPU: CuPy's few calls and the driver's two, over NumPy memory.

It shows that our half is right (who is asked what, what is closed when).  What the real half
does is shown by tests/device/ on a GPU machine.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType, SimpleNamespace
from typing import cast

import attrs
import host_memory
import numpy as np
from numpy.typing import NDArray

from pegaflow.engine.cuda import Addresses, CudaDevices
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


class FakeCuda:
    """Device, runtime and driver in one."""

    def __init__(self, batched: bool = True) -> None:
        self.batched = batched
        self.exported: dict[bytes, Bytes] = {}
        self.open_handles: list[int] = []
        self.open_events: set[int] = set()
        self.fail_copy = 0
        self.fail_wait = 0
        self._numbers = itertools.count(1)
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

    def free(self, pointer: int) -> None:
        assert pointer == 0

    def memcpyAsync(self, target: int, origin: int, length: int, kind: int, stream: int) -> None:
        assert stream in {1, 2}, stream
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
        def stream(*, non_blocking: bool, priority: int) -> SimpleNamespace:
            assert non_blocking
            return SimpleNamespace(ptr=1 if priority == 0 else 2)

        cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=self, Stream=stream))
        return CudaDevices(cast(ModuleType, cupy), self, {0: f"GPU-{UUID.hex()}"})

    @asynccontextmanager
    async def open_engine(self, queue_capacity: int) -> AsyncIterator[Bench]:
        pool = host_memory.plain_pool()
        async with self.devices().open(
            pool, queue_capacity=queue_capacity, part_bytes=1 << 20
        ) as engine:
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
