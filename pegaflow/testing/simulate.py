"""The whole node protocol under a seed: engines, faults, virtual time, every byte checked.

``python -m pegaflow.testing.simulate --seeds 0:10000`` runs one small world a seed and prints one
JSON line.  A world has the daemon's real handlers, flows, background tasks and policy, a simulated
copy engine, and some engine replicas: processes with a session each that register, query, load,
save, renew, release, lose their connection, die and come back under the same name.  Handlers are
cancelled at a drawn await of theirs.  A block's bytes are a function of its key and slot, so every
loaded byte is checked, and after every step that changed the Host all its invariants are.

The same seed gives the same run: time is virtual and Trio's choice among runnable tasks is seeded.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import logging
import multiprocessing
import random
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import attrs
import numpy as np
import trio
import trio.lowlevel
import trio.testing

from pegaflow.errors import BadRequest, PeerGone, PegaflowError
from pegaflow.model import messages as m
from pegaflow.model.keys import (
    REQUIRED_MANIFEST_FIELDS,
    BlockHash,
    InstanceId,
    LeaseToken,
    Manifest,
    Namespace,
)
from pegaflow.model.layout import GroupLayout, Run
from pegaflow.node import background
from pegaflow.node.handover import Handover
from pegaflow.node.parts import Node
from pegaflow.node.service import NodeService, SessionService
from pegaflow.policy.host import Host
from pegaflow.policy.index import SEALED
from pegaflow.rpc.connections import Peer
from pegaflow.testing.sim_engine import Bytes, Faults, SimCopyEngine

NS = 1_000_000_000
ALIGN_BYTES = 64
LEASE_SECONDS, UNSEALED_SECONDS = 1.5, 1.0
LIFE_SECONDS = 2.0
"""How long the engines of a world come and go."""
WORLD_SECONDS = 120.0
"""No world takes longer in virtual time, or something hangs."""
RANK_BLOCKS = 12

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class SimulationFailed(AssertionError):
    """The daemon broke a promise."""


# ---- what a block is


@functools.lru_cache(65536)
def content(namespace: Namespace, group: int, key: BlockHash, slot: int, size: int) -> Bytes:
    """The bytes of one slot of one block: anything else is a wrong byte."""
    seed = b"%s %d %d " % (namespace.encode(), group, slot)
    return np.frombuffer(hashlib.shake_128(seed + key).digest(size), np.uint8)


def prompt(dice: random.Random) -> list[BlockHash]:
    """Chained hashes; prompts share heads, and there are few enough for hits."""
    out: list[BlockHash] = []
    before = b""
    for _ in range(dice.randint(1, 7)):
        before = hashlib.blake2b(
            before + bytes([dice.choice((0, 0, 0, 1))]), digest_size=16
        ).digest()
        out.append(BlockHash(before))
    return out


@attrs.frozen
class Model:
    """What a namespace's engines have in common."""

    namespace: Namespace
    ranks: int
    slots: int
    """1 although there are more ranks: all ranks hold equal bytes (MLA)."""
    slot_bytes: tuple[tuple[int, ...], ...]
    """[group][slot]"""

    @classmethod
    def draw(cls, dice: random.Random, number: int) -> Model:
        """Any shape."""
        ranks = dice.randint(1, 3)
        slots = dice.choice((1, ranks))
        sizes = tuple(
            tuple(dice.choice((96, 128, 130, 300)) for _ in range(slots))
            for _ in range(dice.randint(1, 2))
        )
        return cls(Namespace(f"space-{number}"), ranks, slots, sizes)

    @property
    def manifest(self) -> Manifest:
        """Complete, and different for each namespace."""
        return Manifest(dict.fromkeys(REQUIRED_MANIFEST_FIELDS, str(self)))


# ---- what is counted and watched


@attrs.define
class Tally:
    """Totals of one or many worlds."""

    steps: int = 0
    """Task steps of Trio."""
    validations: int = 0
    """Steps that changed the Host; all its invariants were checked after each."""
    loads_verified: int = 0
    blocks_verified: int = 0
    saves: int = 0
    hits: int = 0
    evictions: int = 0
    outcomes: Counter[str] = attrs.field(factory=Counter)
    """Calls by their end."""
    faults: Counter[str] = attrs.field(factory=Counter)

    def add(self, other: Tally) -> None:
        """Sum."""
        for field in attrs.fields(Tally):
            mine, more = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, Counter):
                mine.update(more)
            else:
                setattr(self, field.name, mine + more)


@attrs.define(eq=False)
class Watcher(trio.abc.Instrument):
    """Validates after each step that changed the Host; cancels handlers at a drawn await."""

    host: Host
    tally: Tally
    cancel_at: dict[trio.lowlevel.Task, tuple[int, trio.CancelScope]] = attrs.field(factory=dict)
    """Handler's task -> (steps that are left, what to cancel then)."""
    _seen: tuple[int, ...] = ()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Trio calls this."""
        self.tally.steps += 1
        host = self.host
        state = (
            host._order.tick,
            host._arena.capacity_bytes,
            host._arena.free_bytes,
            len(host._leases),
            len(host._saves),
            host._open_loads,
            host._shelf_number,
            len(host._spaces),
        )
        if state != self._seen:
            self._seen = state
            self.tally.validations += 1
            host.validate()
        if task in self.cancel_at:
            left, scope = self.cancel_at[task]
            if left == 0:
                scope.cancel()
                del self.cancel_at[task]
            else:
                self.cancel_at[task] = (left - 1, scope)


# ---- the wire


@attrs.define(eq=False)
class Wire:
    """One connection: its handlers run as its children; losing it cancels them."""

    world: World
    service: SessionService
    scope: trio.CancelScope
    nursery: trio.Nursery
    lost: bool = False

    async def call(
        self,
        handler: Callable[[Request], Awaitable[Reply]],
        request: Request,
        give_up_seconds: float,
    ) -> Reply:
        """Run a handler as the daemon does; raises what it raised, or :exc:`PeerGone`.

        A client that gives up cancels the handler, as dropping the call does.
        """
        results: list[Reply | BaseException] = []
        done = trio.Event()
        scope = trio.CancelScope()
        if self.lost:
            raise PeerGone("the connection is gone")
        self.nursery.start_soon(self._handle, handler, request, scope, results, done)
        with trio.move_on_after(give_up_seconds):
            await done.wait()
        if not done.is_set():
            scope.cancel()
            self.world.tally.faults["client_gave_up"] += 1
            raise PeerGone("the client gave up")
        if not results:
            raise PeerGone("the handler was cancelled")
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    async def _handle(
        self,
        handler: Callable[[Request], Awaitable[Reply]],
        request: Request,
        scope: trio.CancelScope,
        results: list[Reply | BaseException],
        done: trio.Event,
    ) -> None:
        task = trio.lowlevel.current_task()
        world = self.world
        if world.faults.happens("handler_cancelled", world.cancel_chance):
            world.watcher.cancel_at[task] = (world.dice.randint(0, 4), scope)
        try:
            with scope:
                results.append(await handler(request))
        except PegaflowError as trouble:
            results.append(trouble)
        finally:
            world.watcher.cancel_at.pop(task, None)
            done.set()

    def lose(self) -> None:
        """The connection breaks."""
        self.lost = True
        self.scope.cancel()


# ---- the engines


@attrs.define(eq=False)
class SimRank:
    """One worker process: its memory, and which of its blocks are free."""

    rank: int
    slot: int
    wire: Wire
    save_wire: Wire
    handle: bytes
    arrays: list[Bytes]
    layouts: tuple[GroupLayout, ...]
    free: list[int] = attrs.field(factory=lambda: list(range(RANK_BLOCKS)))
    registered: bool = False

    @property
    def wires(self) -> list[Wire]:
        """Its connections."""
        return [self.wire] if self.wire is self.save_wire else [self.wire, self.save_wire]

    def view(self, group: int, block: int) -> list[Bytes]:
        """Where a block lies, run by run."""
        out = []
        for run in self.layouts[group].runs:
            start = run.base_bytes + block * run.stride_bytes
            out.append(self.arrays[run.region][start : start + run.length_bytes])
        return out

    def write(self, group: int, block: int, value: Bytes) -> None:
        """What the model's forward pass does."""
        for part in self.view(group, block):
            part[:] = value[: len(part)]
            value = value[len(part) :]

    def read(self, group: int, block: int) -> Bytes:
        """What attention will see."""
        return np.concatenate(self.view(group, block))


def rank_layouts(model: Model, slot: int) -> tuple[tuple[GroupLayout, ...], list[int]]:
    """Groups side by side in two regions of different stride; also the size of each region."""
    layouts: list[GroupLayout] = []
    ends = [0, 0]
    for group, sizes in enumerate(model.slot_bytes):
        size = sizes[slot]
        first = size // 3
        runs = (
            Run(0, ends[0], first + 8, first),
            Run(1, ends[1], size - first, size - first),
        )
        ends = [ends[i] + RANK_BLOCKS * run.stride_bytes for i, run in enumerate(runs)]
        layouts.append(GroupLayout(group, RANK_BLOCKS, runs))
    return tuple(layouts), ends


@attrs.define(eq=False)
class SimEngine:
    """One life of one engine replica."""

    world: World
    model: Model
    instance: InstanceId
    scheduler: Wire
    ranks: list[SimRank]

    async def live(self) -> None:
        """Register, serve some prompts, and end in one way or another."""
        dice = self.world.dice
        async with trio.open_nursery() as nursery:
            for rank in self.ranks:
                nursery.start_soon(self.register, rank)
        async with trio.open_nursery() as requests:
            for _ in range(dice.randint(2, 5)):
                requests.start_soon(self.serve_prompt, dice.random() * 0.5)
            if self.world.faults.happens("engine_killed", self.world.death_chance):
                await trio.sleep(dice.random() * 0.4)
                requests.cancel_scope.cancel()
            elif self.world.faults.happens("wire_lost", self.world.death_chance):
                await trio.sleep(dice.random() * 0.3)
                wires = [wire for rank in self.ranks for wire in rank.wires]
                dice.choice([self.scheduler, *wires]).lose()
            elif self.world.faults.happens("registered_again", self.world.death_chance):
                await trio.sleep(dice.random() * 0.3)
                await self.register(dice.choice(self.ranks))
            elif self.world.faults.happens("unregistered", self.world.death_chance):
                await trio.sleep(dice.random() * 0.3)
                await self.unregister(dice.choice(self.ranks))

    async def register(self, rank: SimRank) -> None:
        """Hand the memory over."""
        regions = tuple(
            self.world.engine.export(rank.handle + bytes([i]), array)
            for i, array in enumerate(rank.arrays)
        )
        request = m.RegisterRequest(rank.rank, rank.slot, self.model.slots, regions, rank.layouts)
        rank.registered |= await self.attempt("register", self._register(rank, request)) is not None

    async def _register(self, rank: SimRank, request: m.RegisterRequest) -> int:
        return await rank.wire.call(rank.wire.service.register, request, 5.0)

    async def unregister(self, rank: SimRank) -> None:
        """Let the memory go although requests are in flight."""

        async def handler(_: None) -> None:
            await rank.wire.service.unregister()

        await self.attempt("unregister", rank.wire.call(handler, None, 5.0))

    async def attempt(self, what: str, call: Awaitable[Reply]) -> Reply | None:
        """None where the call failed in a way that an engine has to live with."""
        try:
            reply = await call
        except BadRequest:
            raise  # nothing here sends one
        except PegaflowError as trouble:
            self.world.tally.outcomes[f"{what}.{type(trouble).__name__}"] += 1
            return None
        self.world.tally.outcomes[f"{what}.ok"] += 1
        return reply

    async def serve_prompt(self, delay: float) -> None:
        """Query, load what is there, compute the rest, save it."""
        dice = self.world.dice
        await trio.sleep(delay)
        hashes, group = prompt(dice), dice.randrange(len(self.model.slot_bytes))
        skip = dice.choice((0, 0, 0, dice.randrange(len(hashes))))
        parent = hashes[skip - 1] if skip else b""
        hashes = hashes[skip:]
        query = m.QueryRequest(group, hashes, parent, "")
        ready = await self.attempt("query", self._query(query))
        hits = 0
        if isinstance(ready, m.Ready) and ready.hit_count:
            hits = ready.hit_count
            await self.use_lease(ready, group, hashes)
        if hits:
            parent = hashes[hits - 1]
        missing = hashes[hits:] if dice.random() < 0.8 else hashes
        if missing is hashes and skip == 0:
            parent = b""
        async with trio.open_nursery() as nursery:
            for rank in self.ranks:
                if dice.random() < 0.95:
                    nursery.start_soon(self.save, rank, group, missing, parent)

    async def _query(self, request: m.QueryRequest) -> m.QueryReply:
        if self.scheduler.lost:
            raise PeerGone("the connection is gone")
        return self.scheduler.service.query(request)

    async def use_lease(self, ready: m.Ready, group: int, hashes: list[BlockHash]) -> None:
        """Mostly load on each rank; also release, wait too long, renew, load twice."""
        dice, service = self.world.dice, self.scheduler.service
        way = dice.random()
        if way < 0.1:
            service.release([ready.lease])
        elif way < 0.2:
            await trio.sleep(dice.random() * 2 * LEASE_SECONDS)
        elif way < 0.3:
            await trio.sleep(dice.random() * LEASE_SECONDS)
            await self.attempt("renew", self._renew(ready.lease))
        async with trio.open_nursery() as nursery:
            for rank in self.ranks:
                for _ in range(dice.choice((0, *[1] * 14, 2))):
                    nursery.start_soon(self.load, rank, ready, group, hashes)

    async def _renew(self, lease: LeaseToken) -> int:
        if self.scheduler.lost:
            raise PeerGone("the connection is gone")
        return self.scheduler.service.renew(lease)

    def deadline(self) -> float:
        """Mostly ample, sometimes hopeless."""
        dice = self.world.dice
        return trio.current_time() + (
            dice.random() * 0.05 if dice.random() < self.world.hurry_chance else 3.0
        )

    async def load(
        self, rank: SimRank, ready: m.Ready, group: int, hashes: list[BlockHash]
    ) -> None:
        """Load some blocks of a lease and look at every byte."""
        dice = self.world.dice
        positions = sorted(dice.sample(range(ready.hit_count), dice.randint(1, ready.hit_count)))
        blocks = self.take(rank, len(positions))
        positions = positions[: len(blocks)]
        deadline = self.deadline()
        for block in blocks:
            rank.write(group, block, np.zeros(rank.layouts[group].slot_bytes, np.uint8))
        request = m.LoadRequest(
            rank.rank,
            ready.lease,
            group,
            np.array(positions, np.uint32),
            np.array(blocks, np.uint32),
            round(deadline * NS),
        )
        done = await self.attempt(
            "load", self.call(rank, rank.wire, rank.wire.service.load, request, deadline)
        )
        if done is None:
            return
        failed = set(done.failed.tolist())
        self.world.expect_perfect(not failed, "a load failed without a fault")
        for i, (position, block) in enumerate(zip(positions, blocks, strict=True)):
            if i not in failed:
                self.check(rank, group, block, hashes[position])
        self.world.tally.loads_verified += 1
        rank.free += blocks

    def check(self, rank: SimRank, group: int, block: int, key: BlockHash) -> None:
        """A wrong byte ends the simulation."""
        size = rank.layouts[group].slot_bytes
        if not np.array_equal(
            rank.read(group, block), content(self.model.namespace, group, key, rank.slot, size)
        ):
            raise SimulationFailed(
                f"wrong bytes in {self.instance} rank {rank.rank}: "
                + self.world.node.host.story(self.model.namespace, group, key)
            )
        self.world.tally.blocks_verified += 1

    async def save(self, rank: SimRank, group: int, hashes: list[BlockHash], parent: bytes) -> None:
        """Compute blocks and offer them: mostly one run, also two, also of another group."""
        dice = self.world.dice
        cut = dice.randint(0, len(hashes)) if dice.random() < 0.3 else len(hashes)
        wanted = [(group, hashes[:cut], parent)]
        if cut < len(hashes):
            wanted.append((group, hashes[cut:], hashes[cut - 1] if cut else parent))
        if dice.random() < 0.2:
            wanted.append((dice.randrange(len(rank.layouts)), prompt(dice), b""))
        runs = [run for one in wanted if len((run := self.computed(rank, *one)).hashes)]
        if not runs:
            return
        blocks = [int(block) for run in runs for block in run.block_ids]
        deadline = self.deadline()
        request = m.SaveRequest(rank.rank, tuple(runs), round(deadline * NS))
        done = await self.attempt(
            "save", self.call(rank, rank.save_wire, rank.save_wire.service.save, request, deadline)
        )
        if done is not None:
            total = done.stored + done.known + done.rejected + done.failed
            if total != len(blocks):
                raise SimulationFailed(f"{done} does not add up to {len(blocks)}")
            self.world.expect_perfect(not done.failed, "a save failed without a fault")
            self.world.tally.saves += 1
            rank.free += blocks

    def computed(
        self, rank: SimRank, group: int, hashes: list[BlockHash], parent: bytes
    ) -> m.SaveRun:
        """As many of the blocks as there is free memory for, with the bytes that they should
        have."""
        blocks = self.take(rank, len(hashes))
        hashes = hashes[: len(blocks)]
        size = rank.layouts[group].slot_bytes
        for key, block in zip(hashes, blocks, strict=True):
            rank.write(group, block, content(self.model.namespace, group, key, rank.slot, size))
        return m.SaveRun(group, hashes, parent, np.array(blocks, np.uint32))

    def take(self, rank: SimRank, count: int) -> list[int]:
        """Up to that many free blocks."""
        taken, rank.free = rank.free[:count], rank.free[count:]
        return taken

    async def call(
        self,
        rank: SimRank,
        wire: Wire,
        handler: Callable[[Request], Awaitable[Reply]],
        request: Request,
        deadline: float,
    ) -> Reply:
        """Keep to the client's duty: leave the blocks alone until an answer or the deadline.

        But not a moment longer: what is saved is scribbled over at the deadline, answer or not.
        """
        dice = self.world.dice
        patience = dice.random() * 0.2 if dice.random() < 0.1 else 5.0
        blocks = request_blocks(request)
        try:
            async with trio.open_nursery() as nursery:
                if isinstance(request, m.SaveRequest):
                    nursery.start_soon(self.scribble_at, deadline, rank, blocks)
                reply = await wire.call(handler, request, patience)
                nursery.cancel_scope.cancel()
        except* PegaflowError as group:
            trouble = group.exceptions[0]
        else:
            return reply
        # An answer, a lost wire and a client that gave up look alike here; after the latter two a
        # load that was begun in time may still be writing.
        slack = self.world.engine.worst_chunk_seconds
        await self.scribble_at(deadline + slack, rank, blocks)
        rank.free += blocks
        raise trouble

    async def scribble_at(self, when: float, rank: SimRank, blocks: list[int]) -> None:
        """The engine computes something else into its blocks."""
        await trio.sleep(max(0.0, when - trio.current_time()))
        for block in blocks:
            for layout in rank.layouts:
                rank.write(layout.group, block, np.full(layout.slot_bytes, 0xEE, np.uint8))


def request_blocks(request: object) -> list[int]:
    """The blocks of engine memory that a request names."""
    if isinstance(request, m.LoadRequest):
        return [int(block) for block in request.block_ids]
    if isinstance(request, m.SaveRequest):
        return [int(block) for run in request.runs for block in run.block_ids]
    return []


# ---- the world


@attrs.define(eq=False)
class World:
    """Everything of one seed."""

    dice: random.Random
    faults: Faults
    tally: Tally
    models: list[Model]
    engine: SimCopyEngine
    node: Node
    service: NodeService
    watcher: Watcher
    wires: trio.Nursery
    perfect: bool
    """No faults at all: then nothing may fail."""

    @property
    def cancel_chance(self) -> float:
        """Of each call."""
        return 0.0 if self.perfect else 0.12

    @property
    def death_chance(self) -> float:
        """Of each engine's life, for each kind of end."""
        return 0.0 if self.perfect else 0.25

    @property
    def hurry_chance(self) -> float:
        """Of each deadline."""
        return 0.0 if self.perfect else 0.15

    def expect_perfect(self, good: bool, complaint: str) -> None:
        """Assert what holds when nothing was injected."""
        if self.perfect and not good:
            raise SimulationFailed(complaint)

    async def open(self, model: Model, instance: InstanceId, process: str) -> Wire:
        """Connect one process."""
        request = m.OpenRequest(
            1,
            1,
            process,
            instance,
            model.namespace,
            model.manifest,
            model.ranks,
            round(trio.current_time() * NS),
        )
        _, service = self.service.open(request, Peer("simulated", local=True))
        wire: Wire = await self.wires.start(self._serve_wire, service)
        return wire

    async def _serve_wire(
        self,
        service: SessionService,
        *,
        task_status: trio.TaskStatus[Wire] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """What the RPC layer does for a connection; it may see the session end before the calls."""
        closed = False
        try:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    task_status.started(Wire(self, service, scope, nursery))
                    try:
                        await trio.sleep_forever()
                    finally:
                        if self.dice.random() < 0.5:
                            service.closed()
                            closed = True
        finally:
            if not closed:
                service.closed()

    async def run_engine(self, number: int) -> None:
        """Lives of one replica under one name, the next one sometimes before the last is buried."""
        await trio.sleep(self.dice.random() * 0.3)
        model = self.dice.choice(self.models)
        instance = InstanceId(f"engine-{number}")
        until = trio.current_time() + LIFE_SECONDS
        for life in range(3):
            if trio.current_time() >= until:
                break
            scheduler = await self.open(model, instance, f"{instance} {life} scheduler")
            ranks = [await self._rank(model, instance, rank, life) for rank in range(model.ranks)]
            await SimEngine(self, model, instance, scheduler, ranks).live()
            for rank in ranks:
                if not self.perfect and self.dice.random() < 0.3:
                    for i in range(len(rank.arrays)):
                        self.engine.vanish(rank.handle + bytes([i]))
            for wire in [scheduler, *(wire for rank in ranks for wire in rank.wires)]:
                self.wires.start_soon(self._lose_later, wire, self.dice.choice((0.0, 0.0, 0.4)))

    async def _lose_later(self, wire: Wire, seconds: float) -> None:
        await trio.sleep(self.dice.random() * seconds)
        wire.lose()

    async def _rank(self, model: Model, instance: InstanceId, rank: int, life: int) -> SimRank:
        """A worker with one connection for everything, or another one for saves."""
        slot = rank % model.slots
        layouts, sizes = rank_layouts(model, slot)
        process = f"{instance} {life} rank {rank}"
        wire = await self.open(model, instance, process)
        lanes = self.dice.random() < 0.5
        return SimRank(
            rank,
            slot,
            wire,
            await self.open(model, instance, process) if lanes else wire,
            process.encode(),
            [np.full(size, 0xEE, np.uint8) for size in sizes],
            layouts,
        )

    async def grow(self, slabs: Sequence[int]) -> None:
        """The pool becomes usable slab by slab while engines already save."""
        offset = 0
        for size in slabs:
            self.node.host.add_memory(offset, size)
            offset += size
            await trio.sleep(self.dice.random() * 0.3)

    def check_pool(self) -> None:
        """Every visible block has the right bytes in the pool."""
        for shelf in self.node.host._order.shelves.values():
            for key, row in shelf.keys.items():
                if shelf.missing[row] != SEALED:
                    continue
                for slot, column in enumerate(shelf.offsets):
                    size = shelf.slot_bytes[slot]
                    here = self.engine.pool[int(column[row]) : int(column[row]) + size]
                    right = content(shelf.namespace, shelf.group, key, slot, size)
                    if not np.array_equal(here, right):
                        raise SimulationFailed(
                            "wrong bytes in the pool: "
                            + self.node.host.story(shelf.namespace, shelf.group, key)
                        )
                    self.tally.blocks_verified += 1

    def check_baseline(self) -> None:
        """Everybody has gone: nothing is held any more."""
        numbers = self.node.host.statistics()
        held = {
            name: getattr(numbers, name)
            for name in (
                "leases",
                "pinned_blocks",
                "pinned_bytes",
                "open_saves",
                "open_loads",
                "unsealed",
            )
        }
        if any(held.values()) or self.engine.attached or len(self.node.instances):
            raise SimulationFailed(f"left over: {held}, {len(self.engine.attached)} memories")
        self.tally.hits += numbers.hits
        self.tally.evictions += numbers.evictions
        cleared = self.node.host.clear()
        if self.node.host.statistics().used_bytes or cleared.still_referenced:
            raise SimulationFailed("bytes are left after everything was cleared")


async def run_world(seed: int, tally: Tally) -> None:
    """One seed; raises when a promise is broken."""
    dice = random.Random(seed)
    perfect = dice.random() < 0.15
    faults = Faults(dice, injected=tally.faults)
    if not perfect:
        faults.block_fails = dice.choice((0.0, 0.05))
        faults.memory_goes = dice.choice((0.0, 0.02))
        faults.attach_fails = dice.choice((0.0, 0.05))
        faults.slow = dice.choice((0.0, 0.05))
    models = [Model.draw(dice, number) for number in range(dice.randint(1, 2))]
    slabs = [dice.randint(4, 16) * 320 for _ in range(dice.randint(1, 3))]
    engine = SimCopyEngine(pool=np.zeros(sum(slabs), np.uint8), faults=faults)
    if perfect:
        engine.queue_max = 1000
    host = Host(
        make_token=lambda: LeaseToken(dice.randbytes(16)),
        lease_ttl_s=LEASE_SECONDS,
        unsealed_ttl_s=UNSEALED_SECONDS,
        high_watermark=0.9,
        low_watermark=0.7,
        align_bytes=ALIGN_BYTES,
    )
    watcher = Watcher(host, tally)
    trio.lowlevel.add_instrument(watcher)
    with trio.fail_after(WORLD_SECONDS):
        async with trio.open_nursery() as services:
            node = Node(
                host=host,
                engine=engine,
                claim_fds=_no_fds,
                background=services,
                clock=trio.current_time,
                boot_id=dice.randbytes(16),
            )
            services.start_soon(background.evict, node)
            services.start_soon(background.expire, node, Handover(trio.current_time))
            async with trio.open_nursery() as wires:
                world = World(
                    dice,
                    faults,
                    tally,
                    models,
                    engine,
                    node,
                    NodeService(node, _no_shutdown),
                    watcher,
                    wires,
                    perfect,
                )
                async with trio.open_nursery() as engines:
                    engines.start_soon(world.grow, slabs)
                    for number in range(dice.randint(1, 3)):
                        engines.start_soon(world.run_engine, number)
            world.check_pool()
            await trio.sleep(LEASE_SECONDS + UNSEALED_SECONDS + 2.0)
            world.check_baseline()
            services.cancel_scope.cancel()


def _no_fds(token: bytes) -> list[int]:
    raise BadRequest("nothing is handed over here")


def _no_shutdown(grace_ms: int) -> None:
    raise AssertionError("nobody asks for that")


# ---- running many


def run_seed(seed: int) -> tuple[int, Tally, str]:
    """One world in its own Trio run: (seed, what happened, the traceback of a failure or "")."""
    tally = Tally()
    # Trio draws the order of runnable tasks from a generator of its own; Hypothesis seeds it the
    # same way.  Without sorting, the order would hang on object addresses.
    trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    trio._core._run._r.seed(seed)
    try:
        trio.run(run_world, seed, tally, clock=trio.testing.MockClock(autojump_threshold=0))
    except (Exception, BaseExceptionGroup) as failure:
        return seed, tally, "".join(traceback.format_exception(failure))
    return seed, tally, ""


def run_seeds(seeds: Sequence[int], jobs: int) -> tuple[Tally, list[int]]:
    """All of them; failures are told on stderr as they come."""
    logging.getLogger("pegaflow").setLevel(logging.CRITICAL)
    total, failures = Tally(), []
    with multiprocessing.Pool(jobs) if jobs > 1 else _Here() as pool:
        for seed, tally, failure in pool.imap_unordered(run_seed, seeds, chunksize=16):
            total.add(tally)
            if failure:
                failures.append(seed)
                sys.stderr.write(
                    f"{failure}\nseed {seed} failed; replay: "
                    f"python -m pegaflow.testing.simulate --seeds {seed}:{seed + 1}\n"
                )
    return total, failures


class _Here:
    """A pool of no processes."""

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def imap_unordered(
        self,
        work: Callable[[int], tuple[int, Tally, str]],
        seeds: Sequence[int],
        chunksize: int,
    ) -> map[tuple[int, Tally, str]]:
        """As multiprocessing's, one after another."""
        return map(work, seeds)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 when a seed failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", default="0:100", help="first:behind, as a slice")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(argv)
    first, _, behind = options.seeds.partition(":")
    seeds = range(int(first), int(behind or int(first) + 1))
    total, failures = run_seeds(seeds, options.jobs)
    line = {
        "seeds": len(seeds),
        "steps": total.steps,
        "validations": total.validations,
        "loads_verified": total.loads_verified,
        "blocks_verified": total.blocks_verified,
        "saves": total.saves,
        "hits": total.hits,
        "evictions": total.evictions,
        "outcomes": dict(sorted(total.outcomes.items())),
        "faults_injected": dict(sorted(total.faults.items())),
        "failures": failures,
    }
    sys.stdout.write(json.dumps(line) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
