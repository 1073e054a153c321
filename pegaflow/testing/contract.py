"""The promise of :mod:`pegaflow.engine.base` as one suite for every copy engine.

A case opens its own engine and its own memory, so cases may run alone and in any order.  The
expected bytes come from the plainest loops there are; nothing here shares code with an engine.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Final, Protocol

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from numpy.typing import NDArray

from pegaflow.engine.base import AttachedMemory, Copies, CopyEngine, Direction
from pegaflow.errors import BadRequest, MemoryGone, Overloaded
from pegaflow.model.layout import GroupLayout, Region, Run

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

POOL_BYTES: Final = 34 << 20
CANARY: Final = 0xA5
PATIENCE_SECONDS: Final = 60.0

_BIG_BLOCK_BYTES: Final = 512 << 10
_BIG_BLOCKS: Final = 64


class EngineMemory(Protocol):
    """KV memory of an engine process, seen from both ends."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """To be attached."""

    @property
    def fds(self) -> tuple[int, ...]:
        """One a region; -1 where none is handed over."""

    def read(self, region: int) -> Bytes:
        """A copy of what the engine sees."""

    def write(self, region: int, content: Bytes) -> None:
        """Set the whole region."""

    def shrink(self, region: int, size_bytes: int) -> bool:
        """Take the end of the region away; False where that can't be done."""


@attrs.frozen(eq=False)
class Bench:
    """An open engine and its pool of ``POOL_BYTES``."""

    engine: CopyEngine
    pool: Bytes
    now: Callable[[], float] = time.monotonic
    """The clock of deadlines."""

    @property
    def later(self) -> float:
        """A deadline that is not met."""
        return self.now() + PATIENCE_SECONDS


OpenEngine = Callable[[int], AbstractAsyncContextManager[Bench]]
"""Called with the queue's capacity a direction."""

MakeMemory = Callable[[Sequence[int], int], AbstractContextManager[EngineMemory]]
"""Called with the regions' bytes and with where each begins in its file or allocation."""


@attrs.frozen(eq=False)
class World:
    """What a case is given."""

    open_engine: OpenEngine
    make_memory: MakeMemory
    rng: np.random.Generator = attrs.field(factory=lambda: np.random.default_rng(7))

    def noise(self, size_bytes: int) -> Bytes:
        """Random bytes, none of them the canary."""
        return self.rng.integers(0, CANARY, size_bytes, np.uint8)

    def fill(self, memory: EngineMemory) -> list[Bytes]:
        """Noise in every region; returns it."""
        content = [self.noise(region.size_bytes) for region in memory.regions]
        for i, each in enumerate(content):
            memory.write(i, each)
        return content


Case = Callable[[World], Awaitable[None]]


@attrs.frozen
class Shape:
    """A layout worth a test."""

    name: str
    sizes: tuple[int, ...]
    layout: GroupLayout
    offset_bytes: int = 0


def shapes() -> Iterator[Shape]:
    """What engines register, and what they might."""
    n, length = 24, 1536
    both = [(region, kv) for region in range(3) for kv in range(2)]
    yield Shape(
        "keys, then values, a region a layer",
        (2 * n * length,) * 3,
        GroupLayout(0, n, tuple(Run(r, kv * n * length, length, length) for r, kv in both)),
    )
    yield Shape(
        "keys and values side by side in each block",
        (2 * n * length,) * 3,
        GroupLayout(0, n, tuple(Run(r, kv * length, 2 * length, length) for r, kv in both)),
    )
    yield Shape("one range a block", (n * length,), GroupLayout(0, n, (Run(0, 0, length, length),)))
    yield Shape(
        "padding between blocks",
        (512 + n * 2048,),
        GroupLayout(0, n, (Run(0, 512, 2048, length), Run(0, 512 + length, 2048, 100))),
        offset_bytes=8192,
    )
    yield Shape(
        "runs stored in another order than they lie",
        (3 * n * 64, n * 512),
        GroupLayout(0, n, (Run(1, 0, 512, 512), Run(0, 128, 192, 64), Run(0, 0, 192, 64))),
        offset_bytes=256,
    )
    big = 9 << 20
    yield Shape(
        "blocks larger than a part",
        (3 * (big + 4096),),
        GroupLayout(0, 3, (Run(0, 0, big + 4096, big),)),
    )
    yield Shape("a single block", (4096,), GroupLayout(0, 1, (Run(0, 96, 0, 4000),)))


ORDERS: Final = ("random", "rising", "falling")


def pick(world: World, block_count: int, order: str) -> Ints:
    """Two thirds of the blocks."""
    ids = world.rng.permutation(block_count)[: -(-block_count * 2 // 3)].astype(np.int64)
    if order == "rising":
        first = int(world.rng.integers(0, block_count - ids.size + 1))
        return np.arange(first, first + ids.size)
    return np.sort(ids)[::-1].copy() if order == "falling" else ids


def slots(world: World, count: int, slot_bytes: int, order: str) -> Ints:
    """Disjoint places in the pool: neighbours when rising, else scattered with gaps."""
    if order == "rising":
        return 512 + np.arange(count) * slot_bytes
    step = POOL_BYTES // (count + 1)
    assert step >= slot_bytes, (count, slot_bytes)
    return world.rng.permutation(count).astype(np.int64) * step + int(world.rng.integers(0, 64))


def gather(content: Sequence[Bytes], layout: GroupLayout, block: int) -> Bytes:
    """A slot as it must look in the pool."""
    starts = [(r, r.base_bytes + block * r.stride_bytes) for r in layout.runs]
    return np.concatenate([content[r.region][at : at + r.length_bytes] for r, at in starts])


def scatter(content: Sequence[Bytes], layout: GroupLayout, block: int, slot: Bytes) -> None:
    """The inverse."""
    done = 0
    for run in layout.runs:
        at = run.base_bytes + block * run.stride_bytes
        content[run.region][at : at + run.length_bytes] = slot[done : done + run.length_bytes]
        done += run.length_bytes


def blank(memory: EngineMemory) -> list[Bytes]:
    """Canaries in every region; returns them."""
    content = [np.full(region.size_bytes, CANARY, np.uint8) for region in memory.regions]
    for i, each in enumerate(content):
        memory.write(i, each)
    return content


def same_memory(memory: EngineMemory, expected: Sequence[Bytes]) -> None:
    """Every byte of every region, also those between blocks."""
    for i, each in enumerate(expected):
        assert np.array_equal(memory.read(i), each), f"region {i} differs"


def _place(pool: Bytes, offset: int, size_bytes: int) -> Bytes:
    return pool[offset : offset + size_bytes]


def _big() -> tuple[tuple[int, ...], GroupLayout, Ints, Ints]:
    """32 MiB: sizes, layout, all ids in a wild order, places."""
    ids = np.random.default_rng(3).permutation(_BIG_BLOCKS).astype(np.int64)
    layout = GroupLayout(0, _BIG_BLOCKS, (Run(0, 0, _BIG_BLOCK_BYTES, _BIG_BLOCK_BYTES),))
    places = np.arange(_BIG_BLOCKS, dtype=np.int64) * _BIG_BLOCK_BYTES
    return (_BIG_BLOCKS * _BIG_BLOCK_BYTES,), layout, ids, places


async def _round_trip(world: World, shape: Shape, order: str) -> None:
    layout = shape.layout
    ids = pick(world, layout.block_count, order)
    places = slots(world, ids.size, layout.slot_bytes, order)
    with world.make_memory(shape.sizes, shape.offset_bytes) as memory:
        content = world.fill(memory)
        async with world.open_engine(8) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)
            assert attached.regions == memory.regions
            bench.pool[:] = CANARY
            expected = bench.pool.copy()
            for block, place in zip(ids.tolist(), places.tolist(), strict=True):
                _place(expected, place, layout.slot_bytes)[:] = gather(content, layout, block)
            batch = [Copies(layout, ids, places)]
            failed = await bench.engine.copy("save", attached, batch, deadline=bench.later)
            assert failed.dtype == np.bool_
            assert not failed.any()
            assert np.array_equal(bench.pool, expected), "the pool differs"
            same_memory(memory, content)

            wanted = blank(memory)
            targets = pick(world, layout.block_count, order)
            for block, place in zip(targets.tolist(), places.tolist(), strict=True):
                scatter(wanted, layout, block, _place(expected, place, layout.slot_bytes))
            batch = [Copies(layout, targets, places)]
            failed = await bench.engine.copy("load", attached, batch, deadline=bench.later)
            assert not failed.any()
            same_memory(memory, wanted)
            assert np.array_equal(bench.pool, expected), "a load changed the pool"
            await bench.engine.detach(attached)


async def bytes_are_exact(world: World) -> None:
    """Every layout, ids and places in every order; nothing else is touched."""
    for shape in shapes():
        for order in ORDERS:
            try:
                await _round_trip(world, shape, order)
            except AssertionError as error:
                raise AssertionError(f"{shape.name}, {order} ids") from error


async def several_batches_in_one_call(world: World) -> None:
    """Groups of different layouts; an empty one between them; flags count over all."""
    small = GroupLayout(0, 16, (Run(0, 0, 1024, 1024),))
    wide = GroupLayout(1, 8, (Run(1, 0, 2048, 2048), Run(0, 0, 1024, 512)))
    with world.make_memory((16 * 1024, 8 * 2048), 0) as memory:
        content = world.fill(memory)
        async with world.open_engine(8) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)
            none = np.zeros(0, np.int64)
            batches = [
                Copies(small, np.array([3, 9, 4]), np.array([0, 4096, 8192])),
                Copies(small, none, none),
                Copies(wide, np.array([7, 0]), np.array([1 << 20, 2 << 20])),
            ]
            failed = await bench.engine.copy("save", attached, batches, deadline=bench.later)
            assert failed.tolist() == [False] * 5
            for copies in batches:
                pairs = zip(copies.block_ids.tolist(), copies.pool_offsets.tolist(), strict=True)
                for block, place in pairs:
                    slot = gather(content, copies.layout, block)
                    assert np.array_equal(_place(bench.pool, place, slot.size), slot), block


async def nothing_to_copy(world: World) -> None:
    """No blocks: no flags, no trouble."""
    none = np.zeros(0, np.int64)
    layout = GroupLayout(0, 4, (Run(0, 0, 1024, 1024),))
    with world.make_memory((4096,), 0) as memory:
        async with world.open_engine(8) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)
            for batches in ([], [Copies(layout, none, none)]):
                failed = await bench.engine.copy("save", attached, batches, deadline=bench.later)
                assert failed.shape == (0,)
                assert failed.dtype == np.bool_


async def deadline_in_the_past_copies_nothing(world: World) -> None:
    """All blocks fail and no byte moves, either way."""
    sizes, layout, ids, places = _big()
    with world.make_memory(sizes, 0) as memory:
        content = world.fill(memory)
        async with world.open_engine(8) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)
            bench.pool[:] = CANARY
            for direction in ("save", "load"):
                batch = [Copies(layout, ids, places)]
                late = bench.now() - 0.001
                failed = await bench.engine.copy(direction, attached, batch, deadline=late)
                assert failed.all()
                assert failed.size == ids.size
                assert (bench.pool == CANARY).all()
                same_memory(memory, content)


async def deadline_in_between_tells_the_truth(world: World) -> None:
    """Blocks not reported as failed are exact, however many made it."""
    sizes, layout, ids, places = _big()
    with world.make_memory(sizes, 0) as memory:
        content = world.fill(memory)
        async with world.open_engine(8) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)
            for seconds in (0.0005, 0.002, 0.005, 0.01):
                batch = [Copies(layout, ids, places)]
                for direction in ("save", "load"):
                    source = bench.pool if direction == "load" else content[0]
                    source[:] = world.noise(source.size)
                    memory.write(0, content[0])
                    soon = bench.now() + seconds
                    failed = await bench.engine.copy(direction, attached, batch, deadline=soon)
                    seen = [memory.read(0)]
                    for i in np.flatnonzero(~failed).tolist():
                        slot = gather(seen, layout, int(ids[i]))
                        place = _place(bench.pool, int(places[i]), _BIG_BLOCK_BYTES)
                        assert np.array_equal(slot, place), (direction, i)
                    content[0][:] = seen[0]


async def cancelled_copy_ends_first(world: World) -> None:
    """A cancelled caller gets its result, and afterwards nobody touches the buffers."""
    sizes, layout, ids, places = _big()
    with world.make_memory(sizes, 0) as memory:
        content = world.fill(memory)
        async with world.open_engine(8) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)
            results: list[NDArray[np.bool_]] = []
            scope = trio.CancelScope()

            async def save() -> None:
                with scope:
                    batch = [Copies(layout, ids, places)]
                    results.append(
                        await bench.engine.copy("save", attached, batch, deadline=bench.later)
                    )
                    await trio.lowlevel.checkpoint()  # here it is cancelled

            async with trio.open_nursery() as nursery:
                nursery.start_soon(save)
                await trio.testing.wait_all_tasks_blocked(0.0)
                scope.cancel()
            assert scope.cancelled_caught
            assert len(results) == 1
            for i in np.flatnonzero(~results[0]).tolist():
                slot = _place(bench.pool, int(places[i]), _BIG_BLOCK_BYTES)
                assert np.array_equal(slot, gather(content, layout, int(ids[i]))), i
            bench.pool[:] = CANARY
            await trio.sleep(0.05)
            assert (bench.pool == CANARY).all(), "written to after the call returned"


async def cancelled_before_it_begins(world: World) -> None:
    """A caller that is cancelled already begins nothing."""
    layout = GroupLayout(0, 4, (Run(0, 0, 1024, 1024),))
    with world.make_memory((4096,), 0) as memory:
        world.fill(memory)
        async with world.open_engine(8) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)
            bench.pool[:] = CANARY
            with trio.CancelScope() as scope:
                scope.cancel()
                batch = [Copies(layout, np.arange(4), np.arange(4) * 1024)]
                await bench.engine.copy("save", attached, batch, deadline=bench.later)
            assert scope.cancelled_caught
            await trio.sleep(0.02)
            assert (bench.pool == CANARY).all()


async def lost_end_fails_by_position(world: World) -> None:
    """Memory that got shorter: its blocks fail, the others are exact.  Nothing grows back."""
    n, length = 32, 4096
    layout = GroupLayout(0, n, (Run(0, 0, length, length), Run(1, 0, length, length)))
    with world.make_memory((n * length, n * length), 0) as memory:
        content = world.fill(memory)
        async with world.open_engine(8) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)
            kept = 20
            if not memory.shrink(0, kept * length + 17):
                return
            ids = world.rng.permutation(n).astype(np.int64)
            places = np.arange(n, dtype=np.int64) * layout.slot_bytes
            batch = [Copies(layout, ids, places)]
            failed = await bench.engine.copy("save", attached, batch, deadline=bench.later)
            assert np.array_equal(failed, ids >= kept)
            for i in np.flatnonzero(~failed).tolist():
                slot = _place(bench.pool, int(places[i]), layout.slot_bytes)
                assert np.array_equal(slot, gather(content, layout, int(ids[i]))), i

            bench.pool[:] = world.noise(bench.pool.size)
            failed = await bench.engine.copy("load", attached, batch, deadline=bench.later)
            assert failed[ids >= kept].all()
            seen = [memory.read(0), memory.read(1)]
            assert seen[0].size == kept * length + 17, "a load made the file grow"
            for i in np.flatnonzero(~failed).tolist():
                slot = _place(bench.pool, int(places[i]), layout.slot_bytes)
                assert np.array_equal(slot, gather(seen, layout, int(ids[i]))), i


async def too_small_a_region_is_refused(world: World) -> None:
    """A region larger than its memory, or empty, is not attached."""
    with world.make_memory((1 << 20,), 4096) as memory:
        async with world.open_engine(8) as bench:
            for size_bytes in (64 << 20, 0, -1):
                lie = attrs.evolve(memory.regions[0], size_bytes=size_bytes)
                with pytest.raises(BadRequest):
                    await bench.engine.attach([lie], memory.fds)


async def block_that_does_not_exist_is_refused(world: World) -> None:
    """An id outside the layout, or a layout outside the region, copies nothing."""
    good = GroupLayout(0, 4, (Run(0, 0, 1024, 1024),))
    outside = GroupLayout(0, 4, (Run(0, 8, 1024, 1024),))
    with world.make_memory((4096,), 0) as memory:
        content = world.fill(memory)
        async with world.open_engine(8) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)
            for layout, ids in ((good, [0, 4]), (good, [-1, 0]), (outside, [0, 1])):
                batch = [Copies(layout, np.array(ids), np.array([0, 1024]))]
                for direction in ("save", "load"):
                    with pytest.raises(BadRequest):
                        await bench.engine.copy(direction, attached, batch, deadline=bench.later)
            same_memory(memory, content)


async def detached_memory_is_gone(world: World) -> None:
    """Detaching waits for copies under way; later ones fail; other memory lives on."""
    sizes, layout, ids, places = _big()
    with world.make_memory(sizes, 0) as memory, world.make_memory((4096,), 0) as other:
        content = world.fill(memory)
        kept = world.fill(other)
        async with world.open_engine(8) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)
            neighbour = await bench.engine.attach(other.regions, other.fds)
            results: list[NDArray[np.bool_]] = []
            batch = [Copies(layout, ids, places)]

            async def save() -> None:
                results.append(
                    await bench.engine.copy("save", attached, batch, deadline=bench.later)
                )

            async with trio.open_nursery() as nursery:
                nursery.start_soon(save)
                await trio.testing.wait_all_tasks_blocked(0.0)
                await bench.engine.detach(attached)
            assert len(results) == 1
            assert not results[0].any()
            for i in range(ids.size):
                slot = _place(bench.pool, int(places[i]), _BIG_BLOCK_BYTES)
                assert np.array_equal(slot, gather(content, layout, int(ids[i]))), i
            with pytest.raises(MemoryGone):
                await bench.engine.copy("load", attached, batch, deadline=bench.later)
            await _save_one_kib(bench, neighbour)
            assert np.array_equal(bench.pool[:1024], kept[0][:1024])


async def _save_one_kib(bench: Bench, memory: AttachedMemory) -> None:
    layout = GroupLayout(0, 4, (Run(0, 0, 1024, 1024),))
    batch = [Copies(layout, np.array([0]), np.array([0]))]
    assert not (await bench.engine.copy("save", memory, batch, deadline=bench.later)).any()


async def full_queue_refuses_at_once(world: World) -> None:
    """Beyond the bound a call is refused; what was taken is copied."""
    sizes, layout, ids, places = _big()
    outcomes: list[str] = []
    with world.make_memory(sizes, 0) as memory:
        content = world.fill(memory)
        async with world.open_engine(2) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)

            async def save() -> None:
                batch = [Copies(layout, ids, places)]
                try:
                    failed = await bench.engine.copy("save", attached, batch, deadline=bench.later)
                except Overloaded:
                    outcomes.append("refused")
                else:
                    assert not failed.any()
                    outcomes.append("copied")

            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(save)
            assert outcomes.count("refused") >= 6
            assert outcomes.count("copied") >= 2
            assert outcomes[0] == "refused"
            assert len(outcomes) == 12
            assert bench.engine.statistics().batches["save"] == outcomes.count("copied")
            slot = _place(bench.pool, int(places[5]), _BIG_BLOCK_BYTES)
            assert np.array_equal(slot, gather(content, layout, int(ids[5])))


async def load_overtakes_waiting_saves(world: World) -> None:
    """A load that comes behind many saves ends before they do."""
    sizes, layout, ids, places = _big()
    with world.make_memory(sizes, 0) as memory:
        world.fill(memory)
        async with world.open_engine(32) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)

            async def save() -> None:
                batch = [Copies(layout, ids, places)]
                await bench.engine.copy("save", attached, batch, deadline=bench.later)

            async with trio.open_nursery() as nursery:
                for _ in range(16):
                    nursery.start_soon(save)
                await trio.testing.wait_all_tasks_blocked(0.0)
                batch = [Copies(layout, ids[:1], places[:1])]
                await bench.engine.copy("load", attached, batch, deadline=bench.later)
                assert bench.engine.statistics().batches["save"] < 16


async def loads_and_saves_at_once(world: World) -> None:
    """Eight callers a direction on disjoint blocks of one memory: every byte is right."""
    n, length, callers = 128, 32 << 10, 8
    each = n // (2 * callers)
    layout = GroupLayout(0, n, (Run(0, 0, length, length), Run(1, 0, length, length)))
    with world.make_memory((n * length, n * length), 0) as memory:
        content = world.fill(memory)
        async with world.open_engine(64) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)
            bench.pool[:] = world.noise(bench.pool.size)
            before = bench.pool.copy()
            ids = world.rng.permutation(n).astype(np.int64)
            places = world.rng.permutation(n).astype(np.int64) * layout.slot_bytes

            async def move(direction: Direction, first: int) -> None:
                mine = slice(first, first + each)
                batch = [Copies(layout, ids[mine], places[mine])]
                failed = await bench.engine.copy(direction, attached, batch, deadline=bench.later)
                assert not failed.any()

            async with trio.open_nursery() as nursery:
                for caller in range(callers):
                    nursery.start_soon(move, "save", caller * each)
                    nursery.start_soon(move, "load", (callers + caller) * each)
            seen = [memory.read(0), memory.read(1)]
            for i in range(n):
                place, block = int(places[i]), int(ids[i])
                if i < n // 2:
                    expected, found = gather(content, layout, block), bench.pool
                    found = _place(found, place, layout.slot_bytes)
                else:
                    expected = _place(before, place, layout.slot_bytes)
                    found = gather(seen, layout, block)
                assert np.array_equal(found, expected), i


async def statistics_add_up(world: World) -> None:
    """Copied and failed blocks are what was asked for; nothing waits at the end."""
    layout = GroupLayout(0, 16, (Run(0, 0, 1024, 1000),))
    with world.make_memory((16 * 1024,), 0) as memory:
        world.fill(memory)
        async with world.open_engine(8) as bench:
            attached = await bench.engine.attach(memory.regions, memory.fds)
            batch = [Copies(layout, np.arange(10), np.arange(10) * 1000)]
            for direction in ("save", "save", "load"):
                await bench.engine.copy(direction, attached, batch, deadline=bench.later)
            await bench.engine.copy("load", attached, batch, deadline=bench.now() - 1.0)
            found = bench.engine.statistics()
            assert found.batches == {"save": 2, "load": 2}
            assert found.blocks == {"save": 20, "load": 10}
            assert found.failed_blocks == {"save": 0, "load": 10}
            assert found.bytes_copied == {"save": 20_000, "load": 10_000}
            assert found.queued == {"save": 0, "load": 0}
            for seconds in (found.busy_seconds, found.wait_seconds):
                assert set(seconds) == {"save", "load"}
                assert all(0 <= value < PATIENCE_SECONDS for value in seconds.values())


CASES: Final[tuple[Case, ...]] = (
    bytes_are_exact,
    several_batches_in_one_call,
    nothing_to_copy,
    deadline_in_the_past_copies_nothing,
    deadline_in_between_tells_the_truth,
    cancelled_copy_ends_first,
    cancelled_before_it_begins,
    lost_end_fails_by_position,
    too_small_a_region_is_refused,
    block_that_does_not_exist_is_refused,
    detached_memory_is_gone,
    full_queue_refuses_at_once,
    load_overtakes_waiting_saves,
    loads_and_saves_at_once,
    statistics_add_up,
)


async def check_copy_engine(open_engine: OpenEngine, make_memory: MakeMemory) -> list[str]:
    """Run every case; returns their names, or raises what the first failing one raised."""
    passed: list[str] = []
    for case in CASES:
        await case(World(open_engine, make_memory))
        passed.append(case.__name__)
    return passed
