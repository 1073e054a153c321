"""The simulated device keeps the copy engine's promises, and breaks things only as told."""

from __future__ import annotations

import random

import numpy as np
import pytest
import trio
import trio.testing

from pegaflow.engine.base import Copies, CopyEngine, Direction
from pegaflow.errors import BadRequest, MemoryGone, Overloaded
from pegaflow.model.layout import GroupLayout, HandedOver, Region, Run
from pegaflow.testing.sim_engine import Faults, SimCopyEngine, SimMemory

LAYOUT = GroupLayout(0, 8, (Run(0, 0, 20, 16), Run(1, 4, 8, 8)))


def make(**chances: float) -> SimCopyEngine:
    faults = Faults(random.Random(1))
    for name, chance in chances.items():
        setattr(faults, name, chance)
    engine = SimCopyEngine(pool=np.zeros(1024, np.uint8), faults=faults)
    _: CopyEngine = engine  # the Protocol, checked by mypy
    return engine


async def attached(engine: SimCopyEngine) -> SimMemory:
    arrays = [np.arange(200, dtype=np.uint8), np.arange(200, 100, -1, dtype=np.uint8)]
    regions = [engine.export(b"memory %d" % i, array) for i, array in enumerate(arrays)]
    return await engine.attach(regions, [-1, -1])


def copies(*blocks: int) -> list[Copies]:
    ids = np.array(blocks, np.int64)
    return [Copies(LAYOUT, ids, ids * 64)]


async def test_a_slot_is_its_runs_back_to_back_and_comes_back_equal(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = make()
    memory = await attached(engine)
    failed = await engine.copy("save", memory, copies(1, 5), deadline=1e9)
    assert not failed.any()
    for block in (1, 5):
        first = memory.arrays[0][block * 20 : block * 20 + 16]
        second = memory.arrays[1][4 + block * 8 : 12 + block * 8]
        slot = engine.pool[block * 64 : block * 64 + 24]
        assert slot.tolist() == [*first.tolist(), *second.tolist()]
    before = [array.copy() for array in memory.arrays]
    for array in memory.arrays:
        array[:] = 0
    assert not (await engine.copy("load", memory, copies(5), deadline=1e9)).any()
    assert (memory.arrays[0][100:116] == before[0][100:116]).all()
    assert not memory.arrays[0][:100].any()
    numbers = engine.statistics()
    assert numbers.blocks == {"load": 1, "save": 2}
    assert numbers.bytes_copied == {"load": 24, "save": 48}


async def test_cancelled_calls_return_when_the_device_has_let_go(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = make()
    memory = await attached(engine)
    began = trio.current_time()
    with trio.move_on_after(0.0001):
        failed = await engine.copy("save", memory, copies(*range(8)), deadline=1e9)
        assert trio.current_time() > began + 0.0001
        assert not failed.any()
        await trio.lowlevel.checkpoint()
        raise AssertionError("not reached: the caller is cancelled at its next checkpoint")
    assert engine.pool.any()


async def test_no_part_begins_after_the_deadline(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = make()
    memory = await attached(engine)
    deadline = trio.current_time() + 0.008
    failed = await engine.copy("save", memory, copies(*range(8)), deadline=deadline)
    assert 0 < failed.sum() < 8
    assert failed.tolist() == sorted(failed.tolist()), "the first ones in order arrived"


async def test_loads_overtake_saves_and_a_full_queue_says_so(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = make()
    engine.queue_max = 2
    memory = await attached(engine)
    ended: list[str] = []

    async def one(direction: Direction, label: str) -> None:
        await engine.copy(direction, memory, copies(0, 1), deadline=1e9)
        ended.append(label)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, "save", "running")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(one, "save", "save")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(one, "load", "load")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(one, "save", "save 2")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Overloaded):
            await one("save", "too many")
    assert ended == ["running", "load", "save", "save 2"]


async def test_detach_waits_for_copies_and_later_ones_fail(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = make()
    memory = await attached(engine)
    ended: list[str] = []

    async def copy() -> None:
        await engine.copy("save", memory, copies(*range(8)), deadline=1e9)
        ended.append("copy")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(copy)
        await trio.testing.wait_all_tasks_blocked()
        await engine.detach(memory)
        ended.append("detach")
    assert ended == ["copy", "detach"]
    assert not engine.attached
    with pytest.raises(MemoryGone):
        await engine.copy("save", memory, copies(0), deadline=1e9)


async def test_memory_that_vanishes_is_gone_for_ever(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = make()
    memory = await attached(engine)

    async def vanish() -> None:
        await trio.sleep(0.005)
        engine.vanish(b"memory 0")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(vanish)
        with pytest.raises(MemoryGone):
            await engine.copy("save", memory, copies(*range(8)), deadline=1e9)
    with pytest.raises(MemoryGone):
        await engine.copy("load", memory, copies(0), deadline=1e9)
    with pytest.raises(MemoryGone):
        await engine.attach(memory.regions, [-1, -1])
    await engine.detach(memory)


async def test_what_cannot_be_attached_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    engine = make()
    region = engine.export(b"small", np.zeros(8, np.uint8))
    with pytest.raises(BadRequest):
        await engine.attach([Region(9, region.source)], [-1])
    with pytest.raises(MemoryGone):
        await engine.attach([Region(8, HandedOver(b"t" * 16, 0, 0))], [-1])
    with pytest.raises(MemoryGone):
        await make(attach_fails=1.0).attach([region], [-1])


async def test_faults_are_drawn_and_counted(autojump_clock: trio.testing.MockClock) -> None:
    engine = make(block_fails=0.5, slow=1.0)
    memory = await attached(engine)
    failed = await engine.copy("save", memory, copies(*range(8)), deadline=1e9)
    assert failed.sum() == engine.faults.injected["block_fails"] > 0
    assert engine.faults.injected["slow"] == 3
    assert engine.worst_chunk_seconds == 0.2
    gone = make(memory_goes=1.0)
    memory = await attached(gone)
    with pytest.raises(MemoryGone):
        await gone.copy("save", memory, copies(0), deadline=1e9)
    assert gone.faults.injected["memory_goes"] == 1
