"""The flows on a simulated device in virtual time: deadlines, cancellation, loss, full pools."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from numpy.typing import NDArray

from pegaflow.errors import (
    BadRequest,
    DeadlineExceeded,
    LeaseExpired,
    ManifestMismatch,
    MemoryGone,
    NotReady,
    PegaflowError,
    ShuttingDown,
    UnknownInstance,
    VersionMismatch,
)
from pegaflow.model import messages as m
from pegaflow.model.keys import (
    REQUIRED_MANIFEST_FIELDS,
    BlockHash,
    InstanceId,
    LeaseToken,
    Manifest,
    Namespace,
)
from pegaflow.model.layout import GroupLayout, HandedOver, Region, Run
from pegaflow.node.flows import NS
from pegaflow.node.parts import Node
from pegaflow.node.service import NodeService, SessionService
from pegaflow.policy.host import Host
from pegaflow.rpc.connections import Peer
from pegaflow.testing.sim_engine import Faults, SimCopyEngine

BLOCK = 1024
BLOCKS = 16
MANIFEST = Manifest(dict.fromkeys(REQUIRED_MANIFEST_FIELDS, "x"))
SPACE = Namespace("space")
LOCAL = Peer("unix", local=True)
FAR = 1e6


def hashes(count: int, salt: str = "") -> list[BlockHash]:
    return [BlockHash(f"{salt}{number}".encode().ljust(32, b"#")) for number in range(count)]


class World:
    """A node without sockets or threads, and engines that use it."""

    def __init__(self, nursery: trio.Nursery, pool_blocks: int) -> None:
        self.engine = SimCopyEngine(
            pool=np.zeros(pool_blocks * BLOCK, np.uint8),
            faults=Faults(random.Random(1)),
            chunk_blocks=2,
            chunk_seconds=1.0,
            queue_max=100,
        )
        numbers = itertools.count(1)
        self.claims: dict[bytes, list[int]] = {}
        self.node = Node(
            host=Host(
                make_token=lambda: LeaseToken(next(numbers).to_bytes(16, "big")), lease_ttl_s=60.0
            ),
            engine=self.engine,
            claim_fds=lambda token: self.claims.pop(token),
            background=nursery,
            clock=trio.current_time,
            boot_id=b"boot" * 4,
        )
        self.node.host.add_memory(0, pool_blocks * BLOCK)
        self.shut_down: list[int] = []
        self.service = NodeService(self.node, self.shut_down.append)

    def open_request(
        self, name: str = "engine", ranks: int = 1, **changes: object
    ) -> m.OpenRequest:
        now_ns = int(trio.current_time() * NS)
        base = {
            "protocol_min": m.PROTOCOL_MIN,
            "protocol_max": m.PROTOCOL_MAX,
            "client": f"{name} pid 1",
            "instance": InstanceId(name),
            "namespace": SPACE,
            "manifest": MANIFEST,
            "world_size": ranks,
            "monotonic_ns": now_ns,
        }
        return m.OpenRequest(**{**base, **changes})  # type: ignore[arg-type]

    def open(self, name: str = "engine", ranks: int = 1) -> SessionService:
        return self.service.open(self.open_request(name, ranks), LOCAL)[1]

    async def rank(self, name: str = "engine", rank: int = 0, ranks: int = 1) -> Rank:
        """Open a session and register one rank with random bytes."""
        one = Rank(self, self.open(name, ranks), rank, ranks)
        await one.register()
        return one


class Rank:
    """One process of an engine."""

    def __init__(self, world: World, session: SessionService, rank: int, ranks: int) -> None:
        self.world, self.session, self.rank, self.ranks = world, session, rank, ranks
        self.memory = np.frombuffer(secrets.token_bytes(BLOCKS * BLOCK), np.uint8).copy()
        self.handle = secrets.token_bytes(64)

    def block(self, number: int) -> NDArray[np.uint8]:
        return self.memory[number * BLOCK : (number + 1) * BLOCK]

    async def register(self) -> int:
        region = self.world.engine.export(self.handle, self.memory)
        return await self.session.register(self.request(region))

    def request(self, region: Region) -> m.RegisterRequest:
        layout = GroupLayout(0, BLOCKS, (Run(0, 0, BLOCK, BLOCK),))
        return m.RegisterRequest(self.rank, self.rank, self.ranks, (region,), (layout,))

    async def save(
        self, names: list[BlockHash], ids: Sequence[int] | None = None, within: float = FAR
    ) -> m.Saved:
        where = np.array(range(len(names)) if ids is None else ids, np.uint32)
        run = m.SaveRun(0, names, b"", where)
        return await self.session.save(m.SaveRequest(self.rank, (run,), deadline(within)))

    def query(self, names: list[BlockHash]) -> m.Ready:
        found = self.session.query(m.QueryRequest(0, names, b"", "request"))
        assert isinstance(found, m.Ready)
        return found

    async def load(
        self, lease: LeaseToken, positions: Sequence[int], ids: Sequence[int], within: float = FAR
    ) -> m.Loaded:
        at, to = np.array(positions, np.uint32), np.array(ids, np.uint32)
        return await self.session.load(m.LoadRequest(self.rank, lease, 0, at, to, deadline(within)))


def deadline(within: float) -> int:
    return int((trio.current_time() + within) * NS)


@contextlib.asynccontextmanager
async def world(pool_blocks: int = 64) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        made = World(nursery, pool_blocks)
        yield made
        made.node.host.validate()
        made.node.instances.validate()
        with trio.fail_after(1000):
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


# pytest-trio takes a clock only from a test's own arguments.
Clock = trio.testing.MockClock


async def test_what_was_saved_is_loaded(autojump_clock: Clock) -> None:
    async with world() as w:
        writer = await w.rank()
        names = hashes(5)
        saved = await writer.save(names, [3, 1, 4, 15, 9])
        assert saved == m.Saved(stored=5, known=0, rejected=0, failed=0)
        want = np.concatenate([writer.block(n).copy() for n in (3, 1, 4, 15, 9)])
        reader = await w.rank("other")
        lease = reader.query([*names, *hashes(2, "unknown")])
        assert (lease.hit_count, lease.ttl_ms) == (5, 60_000)
        loaded = await reader.load(lease.lease, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
        assert not len(loaded.failed)
        assert np.array_equal(reader.memory[: 5 * BLOCK], want)
        assert w.node.host.statistics().pinned_blocks == 0
        assert (await writer.save(names)).known == 5


async def test_a_block_is_visible_when_all_ranks_have_saved_it(autojump_clock: Clock) -> None:
    async with world() as w:
        first = await w.rank(rank=0, ranks=2)
        with pytest.raises(NotReady, match="1 of 2 ranks"):
            first.query(hashes(1))
        second = await w.rank(rank=1, ranks=2)
        await first.save(hashes(2))
        assert first.query(hashes(2)).hit_count == 0
        await second.save(hashes(1))
        assert first.query(hashes(2)).hit_count == 1


async def test_a_save_that_ends_behind_its_deadline_never_becomes_visible(
    autojump_clock: Clock,
) -> None:
    """The engine may write new content into the blocks from the deadline on."""
    async with world() as w:
        rank = await w.rank()
        w.engine.chunk_blocks = 100  # one chunk: begun before the deadline, over after it
        with pytest.raises(DeadlineExceeded, match="not complete at its deadline"):
            await rank.save(hashes(10), within=1e-6)
        now = w.node.host.statistics()
        assert (now.blocks, now.used_bytes, now.open_saves) == (0, 0, 0)
        assert w.node.meter.events == {"save_past_deadline": 1}
        assert rank.query(hashes(10)).hit_count == 0
        assert (await rank.save(hashes(10))).stored == 10


async def test_a_save_that_does_not_finish_in_time_never_becomes_visible(
    autojump_clock: Clock,
) -> None:
    async with world() as w:
        rank = await w.rank()
        with pytest.raises(DeadlineExceeded):
            await rank.save(hashes(16), within=0.5)
        assert w.node.host.statistics().used_bytes == 0


@pytest.mark.parametrize("what", ["load", "save"])
async def test_a_call_that_arrives_behind_its_deadline_begins_nothing(
    what: str, autojump_clock: Clock
) -> None:
    async with world() as w:
        rank = await w.rank()
        await rank.save(hashes(2))
        lease = rank.query(hashes(2)).lease
        before = w.engine.statistics()
        await trio.sleep(5)
        if what == "load":
            with pytest.raises(DeadlineExceeded, match="when the call arrived"):
                await rank.load(lease, [0], [7], within=-1)
        else:
            with pytest.raises(DeadlineExceeded, match="when the call arrived"):
                await rank.save(hashes(2, "new"), within=-1)
        assert w.engine.statistics() == before
        # The rank's share of the lease is not used up.
        assert not len((await rank.load(lease, [0, 1], [7, 8])).failed)


async def test_a_load_in_part_behind_its_deadline_names_the_blocks_that_failed(
    autojump_clock: Clock,
) -> None:
    async with world() as w:
        rank = await w.rank()
        await rank.save(hashes(16))
        lease = rank.query(hashes(16)).lease
        canary = rank.memory.copy()
        loaded = await rank.load(lease, range(16), range(16), within=1.0)
        failed = loaded.failed.tolist()
        assert 0 < len(failed) < 16
        for block in failed:  # never begun: nothing was written there
            assert np.array_equal(rank.block(block), canary[block * BLOCK : (block + 1) * BLOCK])


@pytest.mark.parametrize("what", ["load", "save"])
async def test_a_cancelled_call_returns_only_when_the_device_let_go(
    what: str, autojump_clock: Clock
) -> None:  # T13
    async with world() as w:
        rank = await w.rank()
        await rank.save(hashes(8))
        lease = rank.query(hashes(8)).lease
        (memory,) = w.engine.attached
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def call() -> None:
                    try:
                        if what == "load":
                            await rank.load(lease, range(8), range(8))
                        else:
                            await rank.save(hashes(8, "new"))
                    finally:
                        assert memory.users == 0

                nursery.start_soon(call)
                await trio.sleep(0.01)
                assert memory.users == 1
                assert w.node.host.statistics().pinned_blocks == 8
                scope.cancel()
        assert scope.cancelled_caught
        now = w.node.host.statistics()
        assert (now.open_loads, now.open_saves, now.blocks) == (0, 0, 8)
        assert now.used_bytes == 8 * BLOCK, "a cancelled save gives its room back"
        if what == "load":
            assert now.pinned_blocks == 0
            with pytest.raises(LeaseExpired):
                await rank.load(lease, [0], [0])


async def test_a_lost_session_drops_leases_at_once_and_memory_when_no_copy_uses_it(
    autojump_clock: Clock,
) -> None:
    async with world() as w:
        rank, other = await w.rank(), await w.rank("other")
        await other.save(hashes(8))
        rank.query(hashes(8))
        running = rank.query(hashes(2))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rank.load, running.lease, [0, 1], [0, 1])
            await trio.sleep(0.01)
            assert w.node.host.statistics().pinned_blocks == 8
            rank.session.closed()
            now = w.node.host.statistics()
            assert (now.leases, now.pinned_blocks) == (0, 2), "the running load keeps its blocks"
            assert len(w.engine.attached) == 2, "detach waits for the copy"
        await trio.testing.wait_all_tasks_blocked()
        assert w.node.host.statistics().pinned_blocks == 0
        assert len(w.engine.attached) == 1
        with pytest.raises(UnknownInstance, match="register again"):
            rank.query(hashes(1))
        assert len(w.node.instances) == 1


async def test_half_saved_blocks_go_with_the_last_session_of_an_instance(
    autojump_clock: Clock,
) -> None:  # T20
    async with world() as w:
        first = await w.rank(rank=0, ranks=2)
        second = await w.rank(rank=1, ranks=2)
        await first.save(hashes(4))
        first.session.closed()
        assert w.node.host.statistics().unsealed == 4
        second.session.closed()
        now = w.node.host.statistics()
        assert (now.unsealed, now.used_bytes) == (0, 0)


async def test_a_newer_registration_replaces_the_older_one(autojump_clock: Clock) -> None:
    async with world() as w:
        rank = await w.rank()
        (older,) = w.engine.attached
        assert await rank.register() == 0
        await trio.testing.wait_all_tasks_blocked()
        assert older.detached
        assert len(w.engine.attached) == 1
        assert (await rank.save(hashes(1))).stored == 1


async def test_memory_attached_for_a_session_that_has_ended_is_let_go(
    autojump_clock: Clock,
) -> None:
    async with world() as w:
        rank = Rank(w, w.open(), 0, 1)
        async with trio.open_nursery() as nursery:

            async def register() -> None:
                with pytest.raises(UnknownInstance):
                    await rank.register()

            nursery.start_soon(register)
            await trio.testing.wait_all_tasks_blocked()
            rank.session.closed()
        await trio.testing.wait_all_tasks_blocked()
        assert not w.engine.attached


async def test_memory_gone_drops_that_instance_only(autojump_clock: Clock) -> None:
    async with world() as w:
        sick, well = await w.rank("sick"), await w.rank("well")
        await well.save(hashes(2))
        lease = sick.query(hashes(2)).lease
        w.engine.vanish(sick.handle)
        with pytest.raises(MemoryGone):
            await sick.load(lease, [0], [0])
        with pytest.raises(NotReady):
            sick.query(hashes(2))
        with pytest.raises(NotReady):
            await sick.save(hashes(2, "new"))
        await trio.testing.wait_all_tasks_blocked()
        assert len(w.engine.attached) == 1
        assert w.node.meter.events == {"memory_gone": 1}
        assert well.query(hashes(2)).hit_count == 2
        assert await sick.register() == 0
        assert sick.query(hashes(2)).hit_count == 2


async def test_unregister_lets_go_of_everything_even_when_cancelled(autojump_clock: Clock) -> None:
    async with world() as w:
        session = w.open(ranks=3)
        for number in range(3):
            await Rank(w, session, number, 3).register()
        assert len(w.engine.attached) == 3
        with trio.CancelScope() as scope:
            scope.cancel()
            await session.unregister()
        assert not w.engine.attached
        with pytest.raises(NotReady):
            session.query(m.QueryRequest(0, hashes(1), b"", ""))


async def test_blocks_that_failed_are_counted_and_can_be_saved_again(autojump_clock: Clock) -> None:
    async with world() as w:
        rank = await w.rank()
        w.engine.faults.block_fails = 1.0
        assert await rank.save(hashes(3)) == m.Saved(0, 0, 0, 3)
        assert w.node.host.statistics().used_bytes == 0
        w.engine.faults.block_fails = 0.0
        assert (await rank.save(hashes(3))).stored == 3


async def test_five_times_the_capacity_with_nine_tenths_pinned(
    autojump_clock: Clock,
) -> None:  # T19
    """What can't get room is rejected and counted; what is leased stays; the rest turns over."""
    async with world(pool_blocks=20) as w:
        rank = await w.rank()
        held = hashes(9, "held a"), hashes(9, "held b")
        for names in held:
            await rank.save(names)
        leases = [rank.query(names) for names in held]
        stored = rejected = 0
        for number in range(25):
            saved = await rank.save(hashes(4, f"new {number}"))
            stored, rejected = stored + saved.stored, rejected + saved.rejected
            assert saved.stored + saved.rejected == 4
            w.node.host.validate()
        assert stored == 2 * 25, "two blocks of room, used by every batch"
        assert rejected == 2 * 25
        assert w.node.host.statistics().rejections == rejected
        for lease, names in zip(leases, held, strict=True):
            assert rank.query(names).hit_count == 9
            assert not len((await rank.load(lease.lease, range(9), range(9))).failed)


@pytest.mark.parametrize("ids", [[BLOCKS], [0, 2**32 - 1]])
async def test_block_ids_outside_the_memory_are_refused(
    ids: list[int], autojump_clock: Clock
) -> None:
    async with world() as w:
        rank = await w.rank()
        with pytest.raises(BadRequest, match="outside the 16 blocks"):
            await rank.save(hashes(len(ids)), ids)
        await rank.save(hashes(2))
        lease = rank.query(hashes(2)).lease
        with pytest.raises(BadRequest, match="outside the 16 blocks"):
            await rank.load(lease, range(len(ids)), ids)
        assert w.node.host.statistics().used_bytes == 2 * BLOCK


async def test_descriptors_are_closed_whether_or_not_they_are_taken(autojump_clock: Clock) -> None:
    async with world() as w:
        rank = Rank(w, w.open(), 0, 1)
        for index, error in ((0, MemoryGone), (1, BadRequest)):
            fd = os.memfd_create("x")
            w.claims[b"t" * 16] = [fd]
            region = Region(BLOCKS * BLOCK, HandedOver(b"t" * 16, index, 0))
            with pytest.raises(error):  # the simulated device takes no descriptors
                await rank.session.register(rank.request(region))
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
        assert not w.claims


# ---- opening


async def test_clocks_of_two_time_namespaces_are_noticed(autojump_clock: Clock) -> None:
    async with world() as w:
        for off in (-6, 6):
            ns = int((trio.current_time() + 100 + off) * NS)
            await trio.sleep(100)
            with pytest.raises(BadRequest, match=r"differs by 6.0 s.*one time namespace"):
                w.service.open(w.open_request(monotonic_ns=ns), LOCAL)
        close = int((trio.current_time() - 4) * NS)
        w.service.open(w.open_request(monotonic_ns=close), LOCAL)


Change = Callable[[m.OpenRequest], m.OpenRequest]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            lambda r: attrs.evolve(r, manifest=Manifest({**MANIFEST.fields, "dtype": "fp8"})),
            ManifestMismatch,
        ),
        (lambda r: attrs.evolve(r, manifest=Manifest({})), BadRequest),
        (lambda r: attrs.evolve(r, protocol_min=99, protocol_max=99), VersionMismatch),
        (lambda r: attrs.evolve(r, world_size=3), BadRequest),
        (lambda r: attrs.evolve(r, namespace=Namespace("elsewhere")), BadRequest),
    ],
    ids=["other-dtype", "no-manifest", "version", "world-size", "namespace"],
)
async def test_a_refused_open_leaves_nothing_behind(
    change: Change, error: type[PegaflowError], autojump_clock: Clock
) -> None:
    async with world() as w:
        first = w.open()
        with pytest.raises(error):
            w.service.open(change(w.open_request()), LOCAL)
        assert w.node.host.statistics().namespaces.keys() == {SPACE}
        first.closed()
        assert not w.node.host.statistics().namespaces
        assert len(w.node.instances) == 0


async def test_draining_refuses_what_is_new_and_finishes_what_is_leased(
    autojump_clock: Clock,
) -> None:
    async with world() as w:
        rank = await w.rank()
        await rank.save(hashes(2))
        lease = rank.query(hashes(2)).lease
        w.node.draining = True
        assert not w.service.health().ready
        with pytest.raises(ShuttingDown):
            w.open("new")
        with pytest.raises(ShuttingDown):
            rank.query(hashes(1))
        with pytest.raises(ShuttingDown):
            await rank.save(hashes(1))
        with pytest.raises(ShuttingDown):
            await rank.register()
        assert not len((await rank.load(lease, [0, 1], [0, 1])).failed)


async def test_shutdown_is_for_this_host_only(autojump_clock: Clock) -> None:
    async with world() as w:
        with pytest.raises(BadRequest, match="own host"):
            w.service.shutdown(5, Peer("10.0.0.1:1", local=False))
        assert not w.shut_down
        w.service.shutdown(5, LOCAL)
        assert w.shut_down == [5]
