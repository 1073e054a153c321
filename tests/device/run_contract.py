"""The copy engine's contract on a real GPU by both methods; a killed engine beside a living one.

    PYTHONPATH=. python3 tests/device/run_contract.py --commit COMMIT --out FILE

Needs CuPy, NumPy, trio, attrs and pytest; ends within three minutes; the result is one JSON line,
kept in tests/device/results/.  CI has no GPU: this is run by hand on a machine that has one.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import mmap
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import attrs
import numpy as np
import trio
from numpy.typing import NDArray

from pegaflow.engine.base import Copies
from pegaflow.engine.cuda import CudaDevices, find_devices
from pegaflow.engine.lanes import DIRECTIONS
from pegaflow.engine.pinned import Pool
from pegaflow.errors import DeviceTrouble
from pegaflow.model.layout import CudaIpc, GroupLayout, Region, Run
from pegaflow.testing.contract import CASES, POOL_BYTES, Bench, World

HERE = Path(__file__).parent
Bytes = NDArray[np.uint8]

LAYERS, SEGMENT_BYTES, POOL_BLOCKS, MOVED_BLOCKS = 32, 32 << 10, 2000, 625
SLOT_BYTES = LAYERS * 2 * SEGMENT_BYTES


def progress(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Engine:
    """The other process, which owns the GPU memory."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "cuda_child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, content: bytes = b"", /, **command: object) -> dict[str, object]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n" + content)
        self.process.stdin.flush()
        answer: dict[str, object] = json.loads(self.process.stdout.readline())
        return answer

    def allocate(self, size_bytes: int, offset_bytes: int = 0) -> tuple[int, Region]:
        answer = self.ask(do="allocate", size=size_bytes + offset_bytes)
        handle = bytes.fromhex(str(answer["handle"]))
        number = answer["number"]
        assert isinstance(number, int)
        return number, Region(size_bytes, CudaIpc(handle, str(answer["uuid"]), offset_bytes))

    def read(self, number: int, begin: int, **count: int) -> Bytes:
        size = self.ask(do="read", number=number, begin=begin, **count)["size"]
        assert isinstance(size, int)
        assert self.process.stdout is not None
        return np.frombuffer(self.process.stdout.read(size), np.uint8).copy()

    def write(self, number: int, begin: int, content: Bytes) -> None:
        self.ask(content.tobytes(), do="write", number=number, begin=begin, size=content.size)

    def kill(self) -> None:
        """Does not wait: the driver may keep the process until nobody maps its memory."""
        self.process.send_signal(signal.SIGKILL)


@attrs.define(eq=False)
class GpuMemory:
    """Regions of the engine's process."""

    engine: Engine
    numbers: list[int]
    regions: tuple[Region, ...]
    fds: tuple[int, ...]
    offset_bytes: int

    def read(self, region: int) -> Bytes:
        return self.engine.read(self.numbers[region], self.offset_bytes)

    def write(self, region: int, content: Bytes) -> None:
        self.engine.write(self.numbers[region], self.offset_bytes, content)

    def shrink(self, region: int, size_bytes: int) -> bool:
        return False


def contract_world(devices: CudaDevices, engine: Engine, staged_below: int) -> World:
    @asynccontextmanager
    async def open_engine(queue_capacity: int) -> AsyncIterator[Bench]:
        pool = memoryview(mmap.mmap(-1, POOL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        view = np.frombuffer(pool, np.uint8)
        view[:] = 0
        devices.register_slab(view.ctypes.data, POOL_BYTES)
        try:
            async with devices.open(pool, queue_capacity=queue_capacity, measured=False) as opened:
                for device in opened.devices.values():
                    device.choice.staged_below_bytes = dict.fromkeys(DIRECTIONS, staged_below)
                yield Bench(opened, view)
        finally:
            devices.unregister_slab(view.ctypes.data, POOL_BYTES)

    @contextmanager
    def make_memory(sizes: Sequence[int], offset_bytes: int) -> Iterator[GpuMemory]:
        made = [engine.allocate(size, offset_bytes) for size in sizes]
        numbers = [number for number, _ in made]
        try:
            regions = tuple(region for _, region in made)
            yield GpuMemory(engine, numbers, regions, (-1,) * len(made), offset_bytes)
        finally:
            for number in numbers:
                engine.ask(do="free", number=number)

    return World(open_engine, make_memory)


async def run_cases(devices: CudaDevices) -> dict[str, str]:
    """Each case of the contract: "ok" or what went wrong."""
    out: dict[str, str] = {}
    for method, staged_below in (("direct", 0), ("staged", 1 << 40)):
        engine = Engine()
        world = contract_world(devices, engine, staged_below)
        for case in CASES:
            name = f"{case.__name__} ({method})"
            try:
                with trio.fail_after(100):
                    await case(world)
                out[name] = "ok"
            except BaseException as exc:
                out[name] = repr(exc)[:500]
            progress(f"{name} {out[name]}")
        engine.kill()
    return out


def kv_layout(kind: str) -> GroupLayout:
    """Llama-3.1-8B's 16-token blocks in one region: K and V apart, or a block in one piece."""
    if kind == "one range":
        return GroupLayout(0, POOL_BLOCKS, (Run(0, 0, SLOT_BYTES, SLOT_BYTES),))
    plane = POOL_BLOCKS * SEGMENT_BYTES
    runs = tuple(Run(0, i * plane, SEGMENT_BYTES, SEGMENT_BYTES) for i in range(2 * LAYERS))
    return GroupLayout(0, POOL_BLOCKS, runs)


async def killed_beside_living(devices: CudaDevices) -> dict[str, object]:
    """One of two engines is killed in the middle of its copies; the other's bytes stay right."""
    doomed, living = Engine(), Engine()
    _, doomed_region = doomed.allocate(POOL_BLOCKS * SLOT_BYTES)
    number, region = living.allocate(64 << 20)
    living.ask(do="fill", number=number, seed=2)
    blocks = (64 << 20) // SLOT_BYTES
    small = GroupLayout(0, blocks, (Run(0, 0, SLOT_BYTES, SLOT_BYTES),))
    ids = np.arange(MOVED_BLOCKS, dtype=np.int64)
    saves = outcome = 0
    troubles: list[str] = []
    pool_bytes = MOVED_BLOCKS * SLOT_BYTES + (64 << 20)
    async with Pool.open(
        pool_bytes, register=devices.register_slab, unregister=devices.unregister_slab
    ) as pool:
        async for _ in pool.grow():
            pass
        async with devices.open(pool.view) as opened, trio.open_nursery() as nursery:
            theirs = await opened.attach([doomed_region], [-1])
            ours = await opened.attach([region], [-1])

            async def copy_for_the_doomed() -> None:
                nonlocal saves
                try:
                    copies = [Copies(kv_layout("k and v apart"), ids, ids * SLOT_BYTES)]
                    while saves < 50:
                        await opened.copy("save", theirs, copies, deadline=time.monotonic() + 10)
                        saves += 1
                except DeviceTrouble as exc:
                    troubles.append(type(exc).__name__)

            nursery.start_soon(copy_for_the_doomed)
            await trio.sleep(0.3)
            doomed.kill()
            progress("killed")
            mine = np.arange(blocks, dtype=np.int64)
            offsets = MOVED_BLOCKS * SLOT_BYTES + mine * SLOT_BYTES
            want = living.read(number, 0)
            for _ in range(20):
                failed = await opened.copy(
                    "save", ours, [Copies(small, mine, offsets)], deadline=time.monotonic() + 10
                )
                outcome += not failed.any()
            got = np.frombuffer(pool.view, np.uint8)[MOVED_BLOCKS * SLOT_BYTES :][: 64 << 20]
            progress("compared")
            right = bool(np.array_equal(got, want))
            del got
            nursery.cancel_scope.cancel()
            progress("letting go")
            with contextlib.suppress(DeviceTrouble), trio.CancelScope(shield=True):
                await opened.detach(theirs)
                await opened.detach(ours)
    living.kill()
    return {
        "saves_of_the_killed": saves,
        "troubles": troubles,
        "saves_of_the_living": outcome,
        "bytes_right": right,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    devices = find_devices(None)
    import cupy

    runtime = cupy.cuda.runtime
    result: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": options.commit,
        "card": runtime.getDeviceProperties(0)["name"].decode(),
        "driver": runtime.driverGetVersion(),
        "batched_copies": devices.driver.batched,
    }
    cases = trio.run(run_cases, devices)
    result["cases_passed"] = sum(said == "ok" for said in cases.values())
    result["cases_failed"] = {name: said for name, said in cases.items() if said != "ok"}
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        result["killed_engine"] = trio.run(killed_beside_living, devices)
    except BaseException as exc:
        result["killed_engine"] = {"error": repr(exc)[:800]}
    faulthandler.cancel_dump_traceback_later()
    progress(f"killed_engine {result['killed_engine']}")
    options.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
