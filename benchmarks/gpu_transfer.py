"""How fast do blocks go between a GPU engine and the daemon, and what does it cost the model?

Would disprove: through the whole product (client, RPC, index, copy, seal) blocks of one range move
at 52 GB/s each way, idle and beside a model that computes, and the model loses at most 2 %.

625 blocks of 2 MiB (10,000 tokens of Llama-3.1-8B), block ids in random order in a pool of 2,000,
in ranges of one size; the engine, the daemon and the model are three processes on one GPU.  A raw
2 GiB copy and the model's own rate are measured in the same run.  Keys: ``save_SIZE_IDS_LOAD_gbps``
and ``load_...``; ``..._loss_percent`` of the model's rate meanwhile.  Needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from benchmarks.gpu_engine import (
    DeviceMemory,
    GpuRank,
    Model,
    computing,
    fresh_hashes,
    ids_of,
    median,
    planes,
)
from benchmarks.harness import Figure, emit, percentile, progress
from benchmarks.rpc import processor_seconds
from benchmarks.startup import until_answer, until_pool
from pegaflow.testing.daemon import Daemon, start_daemon

KIB, MIB = 1 << 10, 1 << 20
BLOCKS, MOVED = 2000, 625
SLOT_BYTES = 2 * MIB
SIZES = {
    "4k": 4 * KIB, "8k": 8 * KIB, "16k": 16 * KIB, "32k": 32 * KIB, "64k": 64 * KIB,
    "128k": 128 * KIB, "256k": 256 * KIB, "1m": MIB, "2m": 2 * MIB, "2560k": 2560 * KIB,
}  # fmt: skip
LOADED_SIZES = ("32k", "64k", "1m", "2m")
WINDOW_S = 0.6

Result = dict[str, Figure]


@attrs.define(eq=False)
class Case:
    """One layout, registered."""

    rank: GpuRank
    daemon: Daemon
    model: Model
    order: str = "random"

    @property
    def total_bytes(self) -> int:
        return MOVED * self.rank.layout.slot_bytes

    def repeat(self, work: Callable[[], None], seconds: float = WINDOW_S) -> tuple[float, float]:
        """(median seconds of a call, the model's products a second meanwhile)."""
        work()
        taken: list[float] = []
        before, began = self.model.products, time.monotonic()
        while time.monotonic() - began < seconds or len(taken) < 5:
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
        rate = (self.model.products - before) / (time.monotonic() - began)
        return median(taken), rate

    def measure(self, key: str, result: Result, baseline: float) -> None:
        """Save and load, each for a while."""
        ids = ids_of(MOVED, BLOCKS, self.order)
        names = iter([fresh_hashes(MOVED) for _ in range(60)])
        kept = next(names)
        self.rank.save(kept, ids)

        def save() -> None:
            saved = self.rank.save(next(names), ids)
            assert saved.stored == MOVED, saved

        def load() -> None:
            self.rank.load(self.rank.lease(kept), ids)

        seconds, rate = self.repeat(load)
        result[f"load_{key}_gbps"] = round(self.total_bytes / seconds / 1e9, 2)
        if baseline:
            result[f"load_{key}_loss_percent"] = round(100 * (1 - rate / baseline), 2)
        seconds, rate = self.repeat(save)
        result[f"save_{key}_gbps"] = round(self.total_bytes / seconds / 1e9, 2)
        if baseline:
            result[f"save_{key}_loss_percent"] = round(100 * (1 - rate / baseline), 2)
        progress(f"{key}: save {result[f'save_{key}_gbps']} load {result[f'load_{key}_gbps']}")


def check(rank: GpuRank, memory: DeviceMemory) -> bool:
    """Do bytes come back, to other blocks, and nowhere else?"""
    import cupy

    runs = len(rank.layout.runs)
    size = rank.layout.slot_bytes // runs
    whole = runs * BLOCKS * size
    kv = memory.array[:whole].reshape(runs, BLOCKS, size)  # type: ignore[index]  # CuPy is untyped
    words = kv.reshape(-1).view(cupy.uint64)
    words[...] = cupy.arange(words.size, dtype=cupy.uint64) * cupy.uint64(0x9E3779B97F4A7C15)
    cupy.cuda.runtime.deviceSynchronize()
    before, after = ids_of(MOVED, BLOCKS, "random", 1), ids_of(MOVED, BLOCKS, "random", 2)
    want = kv[:, before].copy()
    names = fresh_hashes(MOVED)
    assert rank.save(names, before).stored == MOVED
    kv[...] = 0
    cupy.cuda.runtime.deviceSynchronize()
    rank.load(rank.lease(names), after)
    same = bool((kv[:, after] == want).all())
    kv[:, after] = 0
    return same and not bool(kv.any())


def link(result: Result) -> None:
    """One raw 2 GiB copy each way."""
    import cupy

    runtime, size = cupy.cuda.runtime, 2 << 30
    host, device = runtime.hostAlloc(size, 0), runtime.malloc(size)
    stream = cupy.cuda.Stream(non_blocking=True)
    for name, to, source, kind in (("d2h", host, device, 2), ("h2d", device, host, 1)):
        best = 1e9
        for _ in range(4):
            began = time.perf_counter()
            runtime.memcpyAsync(to, source, size, kind, stream.ptr)
            stream.synchronize()
            best = min(best, time.perf_counter() - began)
        result[f"link_{name}_gbps"] = round(size / best / 1e9, 2)
    runtime.freeHost(host)
    runtime.free(device)


def both_ways(case: Case, memory: DeviceMemory, name: str) -> Result:
    """Saves and loads at once, and single blocks loaded while 1.2 GiB saves run."""
    daemon = case.daemon
    ids, other = ids_of(MOVED, BLOCKS, "random"), ids_of(MOVED, BLOCKS, "random", 3)
    kept = fresh_hashes(MOVED)
    case.rank.save(kept, ids)
    stop, saved = threading.Event(), [0]

    def save_on() -> None:
        rank = GpuRank(daemon.address, memory, case.rank.layout, name, join=True)
        while not stop.is_set():
            saved[0] += rank.save(fresh_hashes(MOVED), other).stored
        rank.session.close()

    saver = threading.Thread(target=save_on)
    saver.start()
    case.rank.load(case.rank.lease(kept), ids)
    loads, began, before = 0, time.monotonic(), saved[0]
    while time.monotonic() - began < 1.5:
        case.rank.load(case.rank.lease(kept), ids)
        loads += MOVED
    seconds = time.monotonic() - began
    slot = case.rank.layout.slot_bytes
    together = [loads * slot / seconds / 1e9, (saved[0] - before) * slot / seconds / 1e9]
    one, taken = ids[:1], []
    began = time.monotonic()
    while time.monotonic() - began < 1.5:
        start = time.perf_counter()
        case.rank.load(case.rank.lease(kept[:1]), one)
        taken.append((time.perf_counter() - start) * 1e3)
    stop.set()
    saver.join()
    return {
        "together_load_gbps": round(together[0], 2),
        "together_save_gbps": round(together[1], 2),
        "together_sum_gbps": round(sum(together), 2),
        "load_2mib_beside_saves_p50_ms": round(percentile(taken, 50), 3),
        "load_2mib_beside_saves_p99_ms": round(percentile(taken, 99), 3),
    }


def two_in_flight(case: Case, memory: DeviceMemory, key: str, name: str) -> Result:
    """The same with two calls under way: one is prepared while the other one's bytes move."""
    out: Result = {}
    for direction in ("save", "load"):
        blocks_per_s = _two_lanes(case, memory, name, direction)
        gbps = blocks_per_s * case.rank.layout.slot_bytes / 1e9
        out[f"{direction}_{key}_two_in_flight_gbps"] = round(gbps, 2)
    progress(str(out))
    return out


def _two_lanes(case: Case, memory: DeviceMemory, name: str, direction: str) -> float:
    """Blocks a second, after a beginning that does not count."""
    ids, done = ids_of(MOVED, BLOCKS, "random"), [0, 0]
    end = time.monotonic() + 1.8

    def lane(number: int) -> None:
        rank = GpuRank(case.daemon.address, memory, case.rank.layout, name, join=True)
        names = fresh_hashes(MOVED)
        rank.save(names, ids)
        while time.monotonic() < end:
            if direction == "save":
                rank.save(fresh_hashes(MOVED), ids)
            else:
                rank.load(rank.lease(names), ids)
            done[number] += MOVED if time.monotonic() < end else 0
        rank.session.close()

    threads = [threading.Thread(target=lane, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    before, began = sum(done), time.monotonic()
    for thread in threads:
        thread.join()
    return (sum(done) - before) / (end - began)


def cost(case: Case, key: str) -> Result:
    """The daemon's processor time for each GiB, saves and loads alternating."""
    ids, gib = ids_of(MOVED, BLOCKS, "random"), 0.0
    before = processor_seconds(case.daemon.process.pid)
    for _ in range(12):
        names = fresh_hashes(MOVED)
        case.rank.save(names, ids)
        case.rank.load(case.rank.lease(names), ids)
        gib += 2 * case.total_bytes / (1 << 30)
    spent = processor_seconds(case.daemon.process.pid) - before
    return {f"daemon_cpu_ms_per_gib_{key}": round(1e3 * spent / gib, 2)}


@contextlib.contextmanager
def started(result: Result) -> Iterator[Daemon]:
    """A daemon with a pool of 40 GB: how long until it answers, until all is pinned?"""
    with tempfile.TemporaryDirectory(prefix="pegaflow-bench-") as folder:
        began = time.monotonic()
        daemon = start_daemon(pool_size="40gb", folder=Path(folder))
        try:
            result["startup_40gb_s"] = round(until_answer(daemon, began), 3)
            pinned = until_pool(daemon, began)
            result["pinned_40gb_s"] = None if pinned is None else round(pinned, 3)
            progress(f"40 GB: {result['startup_40gb_s']} s, {result['pinned_40gb_s']} s")
            yield daemon
        finally:
            daemon.kill()


def transfers(result: Result, quick: bool) -> None:
    """All layouts against one daemon."""
    link(result)
    memory = DeviceMemory(BLOCKS * max(SLOT_BYTES, SIZES["2560k"]))
    with computing() as model, started(result) as daemon:
        model.run(True)
        time.sleep(0.5)
        result["model_products_per_s"] = round(model.rate(1.5), 1)
        for label, size in SIZES.items():
            if quick and label not in LOADED_SIZES:
                continue
            slot = max(SLOT_BYTES, size)
            layout = planes(slot, size, BLOCKS)
            rank = GpuRank(daemon.address, memory, layout, f"bench-{label}")
            case = Case(rank, daemon, model)
            model.run(False)
            result[f"bytes_right_{label}"] = int(check(rank, memory))
            case.measure(f"{label}_random_idle", result, 0)
            if label in ("64k", "2m"):
                case.order = "contiguous"
                case.measure(f"{label}_contiguous_idle", result, 0)
                case.order = "random"
                result |= cost(case, label)
            if label in ("32k", "64k", "2m"):
                result |= two_in_flight(case, memory, label, f"bench-{label}")
            if label in LOADED_SIZES:
                model.run(True)
                time.sleep(0.2)
                case.measure(f"{label}_random_loaded", result, model.rate(0.8))
                model.run(False)
            if label == "2m":
                result |= both_ways(case, memory, f"bench-{label}")
            rank.session.close()
        result |= _methods(daemon)


def _methods(daemon: Daemon) -> Result:
    """What the daemon chose, from its metrics."""
    url = f"http://{daemon.http_address}/metrics"
    text = urllib.request.urlopen(url, timeout=5).read().decode()
    out: Result = {}
    for line in text.splitlines():
        if line.startswith("pegaflow_copy_staged_below_bytes{"):
            direction = line.split('"')[1]
            out[f"staged_below_{direction}_bytes"] = int(float(line.split()[-1]))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the sizes that matter most")
    parser.add_argument("--out", type=Path, help="also write the object there, after each step")
    options = parser.parse_args()
    result: Result = {}
    import cupy

    result["card"] = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    result["date"] = time.strftime("%Y-%m-%d")
    try:
        transfers(result, options.quick)
    finally:
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result)


if __name__ == "__main__":
    main()
