"""How the CUDA engine chooses, and what it does when staging can't be had."""

from __future__ import annotations

import time

import fake_cuda
import numpy as np
import pytest

from pegaflow.engine.base import Copies
from pegaflow.engine.cuda import CudaCopyEngine
from pegaflow.engine.cuda_copy import METHODS
from pegaflow.engine.cuda_measure import RANGE_BYTES, measure
from pegaflow.engine.lanes import Pace
from pegaflow.model.layout import GroupLayout, Run

BLOCKS, RANGE = 40, 4096
TWO_PLANES = GroupLayout(0, BLOCKS, (Run(0, 0, RANGE, RANGE), Run(0, BLOCKS * RANGE, RANGE, RANGE)))
IDS = np.random.default_rng(1).permutation(BLOCKS)[:30].astype(np.int64)
OFFSETS = np.arange(30, dtype=np.int64)[::-1] * 2 * RANGE


async def saved_and_loaded(cuda: fake_cuda.FakeCuda) -> dict[tuple[str, str], int]:
    """Save, wipe, load; the bytes must be back.  Returns bytes by (direction, method)."""
    with cuda.make_memory([2 * BLOCKS * RANGE], 0) as memory:
        content = np.random.default_rng(2).integers(0, 255, 2 * BLOCKS * RANGE, np.uint8)
        memory.write(0, content)
        async with cuda.open_engine(4) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)
            batch = [Copies(TWO_PLANES, IDS, OFFSETS)]
            later = time.monotonic() + 10
            assert not (await bench.engine.copy("save", attached, batch, deadline=later)).any()
            memory.write(0, np.zeros_like(content))
            assert not (await bench.engine.copy("load", attached, batch, deadline=later)).any()
            planes = memory.read(0).reshape(2, BLOCKS, RANGE)
            want = np.zeros_like(planes)
            want[:, IDS] = content.reshape(2, BLOCKS, RANGE)[:, IDS]
            assert np.array_equal(planes, want)
            return dict(bench.engine.statistics().method_bytes)


@pytest.mark.parametrize(("below", "method"), [(RANGE, "direct"), (RANGE + 1, "staged")])
async def test_ranges_below_the_threshold_are_staged(below: int, method: str) -> None:
    cuda = fake_cuda.FakeCuda(staged_below=below)
    size = 30 * 2 * RANGE
    found = await saved_and_loaded(cuda)
    assert found[("save", method)] == found[("load", method)] == size
    assert sum(found.values()) == 2 * size
    assert bool(cuda.launches) == (method == "staged")


async def test_a_gpu_without_room_for_stages_copies_directly() -> None:
    cuda = fake_cuda.FakeCuda(staged_below=1 << 30)
    cuda.fail_malloc = 2
    found = await saved_and_loaded(cuda)
    assert found[("save", "staged")] == found[("load", "staged")] == 0
    assert found[("save", "direct")] > 0


async def test_one_layout_in_many_batches_is_one_batch_for_the_driver() -> None:
    """A step's saves are a block each of many requests."""
    cuda = fake_cuda.FakeCuda()
    batches = []
    cuda.copy_batch = lambda *a: batches.append(a[0].size)
    with cuda.make_memory([2 * BLOCKS * RANGE], 0) as memory:
        async with cuda.open_engine(4) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)
            each = [Copies(TWO_PLANES, IDS[i : i + 1], OFFSETS[i : i + 1]) for i in range(IDS.size)]
            await bench.engine.copy("save", attached, each, deadline=time.monotonic() + 10)
    assert batches == [2 * IDS.size]


async def test_measuring_sets_both_thresholds_and_touches_no_pool() -> None:
    cuda = fake_cuda.FakeCuda()
    async with cuda.open_engine(4) as bench:
        assert isinstance(bench.engine, CudaCopyEngine)
        bench.pool[:] = 7
        device = next(iter(bench.engine.devices.values()))
        for copier in device.copiers.values():
            measure(copier)
        assert (bench.pool == 7).all()
        assert {key[:2] for key in device.choice.measured_gbps} == {
            (direction, method) for direction in ("save", "load") for method in METHODS
        }
        allowed = {0, *(size * 3 // 2 for size in RANGE_BYTES)}
        assert set(device.choice.staged_below_bytes.values()) <= allowed
    assert not cuda.allocated


def test_a_cap_delays_what_comes_too_early_and_never_past_its_deadline() -> None:
    pace = Pace(1e6)
    began = time.monotonic()
    for _ in range(3):
        pace.wait(50_000, began + 10)
    assert time.monotonic() - began >= 0.1  # the first is free, two more are due
    soon = time.monotonic() + 0.02
    pace.wait(1 << 30, began + 10)
    pace.wait(50_000, soon)
    assert time.monotonic() - soon < 0.5
    Pace().wait(1 << 60, 0.0)
