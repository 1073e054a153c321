"""Two engines on one GPU share a pool; one is killed in the middle of a copy.

    PYTHONPATH=. python3 tests/device/run_sharing.py --commit COMMIT --out FILE

What one engine saved the other loads, byte for byte.  After the kill the daemon has let go of the
dead engine's GPU memory within two seconds, and the living one goes on.  Needs a GPU; the result
is one JSON line, kept in tests/device/results/.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_engine import DeviceMemory, GpuRank, fresh_hashes, ids_of, planes
from pegaflow.model.keys import BlockHash
from pegaflow.testing.daemon import running_daemon

BLOCKS, MOVED, SLOT_BYTES, RANGE_BYTES = 2000, 625, 2 << 20, 64 << 10
LAYOUT = planes(SLOT_BYTES, RANGE_BYTES, BLOCKS)


def free_gpu_bytes() -> int:
    import cupy

    return int(cupy.cuda.runtime.memGetInfo()[0])


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def engine(address: str, role: str) -> None:
    """A process of its own: ``save`` saves a pattern and waits, ``storm`` saves without pause."""
    import cupy

    memory = DeviceMemory(BLOCKS * SLOT_BYTES)
    rank = GpuRank(address, memory, LAYOUT, role, namespace="shared")
    words = memory.array.view(cupy.uint64)  # type: ignore[attr-defined]  # CuPy is untyped
    words[...] = cupy.arange(words.size, dtype=cupy.uint64) * cupy.uint64(0x9E3779B97F4A7C15)
    cupy.cuda.runtime.deviceSynchronize()
    if role == "save":
        names = fresh_hashes(MOVED)
        assert rank.save(names, ids_of(MOVED, BLOCKS, "random", 1)).stored == MOVED
        say(b"".join(names).hex())
        sys.stdin.readline()
        return
    while True:
        rank.save(fresh_hashes(MOVED), ids_of(MOVED, BLOCKS, "random", 2))
        say("saved")


def spawn(address: str, role: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--engine", role, "--address", address]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def bytes_are_right(memory: DeviceMemory, ids: NDArray[np.uint32]) -> bool:
    """Blocks ``ids`` hold what the other engine's blocks held."""
    import cupy

    runs = SLOT_BYTES // RANGE_BYTES
    kv = memory.array.view(cupy.uint64).reshape(runs, BLOCKS, -1)  # type: ignore[attr-defined]  # CuPy
    want = cupy.arange(kv.size, dtype=cupy.uint64) * cupy.uint64(0x9E3779B97F4A7C15)
    before = ids_of(MOVED, BLOCKS, "random", 1)
    return bool((kv[:, ids] == want.reshape(kv.shape)[:, before]).all())


def measure() -> dict[str, object]:
    result: dict[str, object] = {}
    with running_daemon(pool_size="16gb", timeout_s=60) as daemon:
        saver = spawn(daemon.address, "save")
        assert saver.stdout is not None
        packed = bytes.fromhex(saver.stdout.readline().decode())
        names = [BlockHash(packed[i : i + 32]) for i in range(0, len(packed), 32)]
        memory = DeviceMemory(BLOCKS * SLOT_BYTES)
        rank = GpuRank(daemon.address, memory, LAYOUT, "living", namespace="shared")
        ids = ids_of(MOVED, BLOCKS, "random", 3)
        rank.load(rank.lease(names), ids)
        result["other_engines_bytes_right"] = bytes_are_right(memory, ids)
        saver.kill()
        saver.wait()
        time.sleep(2.0)  # sleep: its memory is given back meanwhile

        before = free_gpu_bytes()
        doomed = spawn(daemon.address, "storm")
        assert doomed.stdout is not None
        for _ in range(3):
            doomed.stdout.readline()
        time.sleep(0.01)  # sleep: into the middle of the next save
        doomed.kill()
        killed = time.monotonic()
        loads = 0
        while free_gpu_bytes() < before - (64 << 20) and time.monotonic() - killed < 10:
            rank.load(rank.lease(names), ids)
            loads += 1
        result["memory_released_after_s"] = round(time.monotonic() - killed, 3)
        result["memory_still_missing_mb"] = max(0, before - free_gpu_bytes()) >> 20
        for _ in range(20):
            rank.load(rank.lease(names), ids)
        result["loads_of_the_living"] = loads + 20
        result["bytes_right_afterwards"] = bytes_are_right(memory, ids)
        result["daemon_lives"] = daemon.process.poll() is None
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine")
    parser.add_argument("--address", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.engine:
        engine(options.address, options.engine)
        return
    result = {"date": time.strftime("%Y-%m-%d"), "commit": options.commit, **measure()}
    if options.out:
        options.out.write_text(json.dumps(result) + "\n")
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
