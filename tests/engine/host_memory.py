"""A memfd as an engine has it, for tests."""

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import attrs
import numpy as np
from numpy.typing import NDArray

from pegaflow.engine.host import open_host_engine
from pegaflow.model.layout import HandedOver, Region
from pegaflow.testing.contract import POOL_BYTES, Bench

Bytes = NDArray[np.uint8]


@attrs.define(eq=False)
class MemfdMemory:
    regions: tuple[Region, ...]
    fds: tuple[int, ...]
    offset_bytes: int

    def read(self, region: int) -> Bytes:
        data = os.pread(self.fds[region], self.regions[region].size_bytes, self.offset_bytes)
        return np.frombuffer(data, np.uint8).copy()

    def write(self, region: int, content: Bytes) -> None:
        assert os.pwrite(self.fds[region], content.tobytes(), self.offset_bytes) == content.size

    def shrink(self, region: int, size_bytes: int) -> bool:
        os.ftruncate(self.fds[region], self.offset_bytes + size_bytes)
        return True


@contextmanager
def make_memory(sizes: Sequence[int], offset_bytes: int) -> Iterator[MemfdMemory]:
    fds = tuple(os.memfd_create("kv") for _ in sizes)
    try:
        for fd, size in zip(fds, sizes, strict=True):
            os.ftruncate(fd, offset_bytes + size)
        regions = tuple(
            Region(size, HandedOver(bytes(16), i, offset_bytes)) for i, size in enumerate(sizes)
        )
        yield MemfdMemory(regions, fds, offset_bytes)
    finally:
        for fd in fds:
            os.close(fd)


def plain_pool(size_bytes: int = POOL_BYTES) -> memoryview:
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@asynccontextmanager
async def open_engine(queue_capacity: int) -> AsyncIterator[Bench]:
    pool = plain_pool()
    async with open_host_engine(pool, queue_capacity=queue_capacity) as engine:
        yield Bench(engine, np.frombuffer(pool, np.uint8))
