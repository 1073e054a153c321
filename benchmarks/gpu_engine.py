"""A mock engine on a GPU, and a process that computes beside it."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

from pegaflow.client.blocking import BlockingSession
from pegaflow.client.memory import cuda_ipc_handle
from pegaflow.client.mock import MANIFEST
from pegaflow.model.keys import BlockHash, InstanceId, LeaseToken, Namespace
from pegaflow.model.layout import CudaIpc, GroupLayout, Region, Run
from pegaflow.model.messages import (
    LoadRequest,
    QueryRequest,
    Ready,
    RegisterRequest,
    Saved,
    SaveRequest,
    SaveRun,
)

TIMEOUT_S = 20.0


def fresh_hashes(count: int) -> list[BlockHash]:
    """Names that nobody has used."""
    noise = os.urandom(32 * count)
    return [BlockHash(noise[i : i + 32]) for i in range(0, 32 * count, 32)]


def planes(slot_bytes: int, range_bytes: int, blocks: int) -> GroupLayout:
    """A block in ranges of one size, each in a plane of its own, as K and V of each layer lie."""
    step = blocks * range_bytes
    runs = tuple(
        Run(0, i * step, range_bytes, range_bytes) for i in range(slot_bytes // range_bytes)
    )
    return GroupLayout(0, blocks, runs)


@attrs.define(eq=False)
class DeviceMemory:
    """One allocation on GPU 0 that other processes may open."""

    size_bytes: int
    array: object = attrs.field(init=False)
    """A CuPy array of bytes."""
    region: Region = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        import cupy

        # cudaMalloc itself: an allocation of CuPy's pool would export its neighbours too.
        pointer = cupy.cuda.runtime.malloc(self.size_bytes)
        memory = cupy.cuda.UnownedMemory(pointer, self.size_bytes, None)
        self.array = cupy.ndarray(
            (self.size_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0)
        )
        uuid = bytes(cupy.cuda.runtime.getDeviceProperties(0)["uuid"])[:16].hex()
        handle, offset = cuda_ipc_handle(pointer)
        self.region = Region(self.size_bytes, CudaIpc(handle, uuid, offset))


class GpuRank:
    """A session of its own with one layout over device memory; used in the thread that made it."""

    def __init__(
        self,
        address: str,
        memory: DeviceMemory,
        layout: GroupLayout,
        name: str,
        *,
        namespace: str = "",
        join: bool = False,
    ) -> None:
        """``join``: another session of a rank that this process has registered before."""
        self.layout = layout
        self.session = BlockingSession(
            address,
            instance=InstanceId(name),
            namespace=Namespace(namespace or name),
            manifest=MANIFEST,
            world_size=1,
            timeout_s=TIMEOUT_S,
        )
        if not join:
            request = RegisterRequest(0, 0, 1, (memory.region,), (layout,))
            self.session.register(request, TIMEOUT_S)

    def save(self, hashes: list[BlockHash], ids: NDArray[np.uint32]) -> Saved:
        run = SaveRun(0, hashes, b"", ids)
        return self.session.save(SaveRequest(0, (run,), _deadline_ns()), TIMEOUT_S)

    def lease(self, hashes: list[BlockHash]) -> LeaseToken:
        """Query; all must be there."""
        reply = self.session.query(QueryRequest(0, hashes, b"", "bench"), TIMEOUT_S)
        assert isinstance(reply, Ready)
        assert reply.hit_count == len(hashes), (reply.hit_count, len(hashes))
        return reply.lease

    def load(self, lease: LeaseToken, ids: NDArray[np.uint32]) -> None:
        """All must arrive."""
        positions = np.arange(ids.size, dtype=np.uint32)
        request = LoadRequest(0, lease, 0, positions, ids, _deadline_ns())
        assert not self.session.load(request, TIMEOUT_S).failed.size


def _deadline_ns() -> int:
    return time.monotonic_ns() + int(TIMEOUT_S * 1e9)


class Model:
    """Another process that multiplies matrices without pause; tells how many it has done."""

    def __init__(self, file: mmap.mmap) -> None:
        self._file = file

    @property
    def products(self) -> int:
        return int(struct.unpack_from("<q", self._file, 0)[0])

    def run(self, on: bool) -> None:
        """Compute, or pause."""
        struct.pack_into("<q", self._file, 8, int(on))

    def rate(self, seconds: float) -> float:
        """Products a second over a while."""
        began, before = time.monotonic(), self.products
        time.sleep(seconds)
        return (self.products - before) / (time.monotonic() - began)


@contextlib.contextmanager
def computing() -> Iterator[Model]:
    """The model's process for the length of a ``with`` block; paused at first."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        shared = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu_engine",
            f"/proc/{os.getpid()}/fd/{file.fileno()}",
        ]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            try:
                model = Model(shared)
                model.run(True)
                while not model.products and process.poll() is None:
                    time.sleep(0.05)
                model.run(False)
                yield model
            finally:
                process.kill()


def compute(path: str) -> None:
    """The other process: bf16 products of 4096 x 4096, ten between two looks at the switch."""
    import torch

    with Path(path).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    done = 0
    while True:
        if not struct.unpack_from("<q", shared, 8)[0]:
            time.sleep(0.002)
            continue
        for _ in range(10):
            a @ b
        torch.cuda.synchronize()
        done += 10
        struct.pack_into("<q", shared, 0, done)


def ids_of(count: int, blocks: int, order: str, seed: int = 0) -> NDArray[np.uint32]:
    """``random`` or ``contiguous`` block ids."""
    if order == "contiguous":
        return np.arange(count, dtype=np.uint32)
    return np.random.default_rng(seed).permutation(blocks)[:count].astype(np.uint32)


def median(values: Sequence[float]) -> float:
    return float(np.median(np.array(values)))


def traffic(address: str) -> None:
    """Save and load 1.2 GiB in turn, without pause, until killed."""
    blocks, moved = 2000, 625
    memory = DeviceMemory(blocks * (2 << 20))
    rank = GpuRank(address, memory, planes(2 << 20, 2 << 20, blocks), "traffic")
    ids = ids_of(moved, blocks, "random")
    while True:
        names = fresh_hashes(moved)
        rank.save(names, ids)
        print("moving", flush=True)
        rank.load(rank.lease(names), ids)


if __name__ == "__main__":
    if sys.argv[1] == "traffic":
        traffic(sys.argv[2])
    else:
        compute(sys.argv[1])
