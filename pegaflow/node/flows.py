"""What the daemon does, one straight function each: prepare, copy, complete.

Between two awaits everything is atomic.  Whatever fails on the way ends in a miss, never in a wrong
byte: a plan that is left without commit gives its room back, and an engine returns only when the
device has let go.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import numpy as np
import trio
from numpy.typing import NDArray

from pegaflow.engine.base import AttachedMemory, Copies, Direction
from pegaflow.errors import BadRequest, DeadlineExceeded, MemoryGone, NotReady
from pegaflow.model.keys import SessionId
from pegaflow.model.layout import GroupLayout, HandedOver, Region
from pegaflow.model.messages import (
    Loaded,
    LoadRequest,
    QueryReply,
    QueryRequest,
    RegisterRequest,
    Saved,
    SaveRequest,
)
from pegaflow.node.parts import Node
from pegaflow.observe import log
from pegaflow.policy.host import SaveOrder, SavePlan
from pegaflow.policy.instances import Registration

NS = 1_000_000_000

Rank = Registration[AttachedMemory]


async def register(node: Node, session: SessionId, request: RegisterRequest) -> int:
    """Attach a rank's memory; returns how many ranks of the instance are still missing."""
    instance = node.instances.of(session)
    node.instances.check(session, request.rank, request.slot_index, request.slot_count)
    for layout in request.groups:
        node.host.declare_slots(
            instance.namespace,
            layout.group,
            request.slot_index,
            request.slot_count,
            layout.slot_bytes,
        )
    with _claimed(node, request.regions) as fds:
        memory = await node.engine.attach(request.regions, fds)
    try:
        # The session may have ended meanwhile; then nobody else would let go of the memory.
        older = node.instances.register(
            Registration(
                session,
                request.rank,
                request.slot_index,
                request.slot_count,
                tuple(layout.merged() for layout in request.groups),
                memory,
            )
        )
    except BaseException:
        node.background.start_soon(node.engine.detach, memory)
        raise
    if older is not None:
        node.background.start_soon(node.engine.detach, older.memory)
    log.info(
        "rank.registered",
        instance=instance.name,
        rank=request.rank,
        slot_bytes=sum(layout.slot_bytes for layout in request.groups),
        missing=instance.missing,
    )
    return instance.missing


def query(node: Node, session: SessionId, request: QueryRequest) -> QueryReply:
    """The longest cached prefix, leased to the session's instance."""
    instance = node.instances.of(session)
    if instance.missing:
        raise NotReady(
            f"{instance.missing} of {instance.world_size} ranks have not registered their memory"
        )
    return node.host.look(
        instance.namespace,
        request.group,
        request.hashes,
        request.parent,
        instance.name,
        session,
        instance.world_size,
        node.clock(),
    )


async def load(node: Node, session: SessionId, request: LoadRequest) -> Loaded:
    """Pool -> engine memory.  Uses up the rank's share of the lease."""
    rank = node.instances.rank(session, request.rank)
    layout = rank.layout(request.group)
    block_ids = _checked_ids(request.block_ids, layout)
    deadline = _deadline(node, request.deadline_ns)
    with node.host.loading(
        request.lease,
        node.instances.of(session).name,
        request.rank,
        rank.slot_index,
        request.group,
        request.positions,
        node.clock(),
    ) as plan:
        assert plan.slot_bytes == layout.slot_bytes, "a namespace with two geometries"
        copies = [Copies(layout, block_ids, plan.pool_offsets)]
        failed = await _copy(node, "load", rank, copies, deadline)
    return Loaded(np.flatnonzero(failed).astype(np.uint32))


async def save(node: Node, session: SessionId, request: SaveRequest) -> Saved:
    """Engine memory -> pool.  A block becomes visible when its last slot has arrived."""
    rank = node.instances.rank(session, request.rank)
    instance = node.instances.of(session)
    ids = [_checked_ids(run.block_ids, rank.layout(run.group)) for run in request.runs]
    deadline = _deadline(node, request.deadline_ns)
    order = SaveOrder(instance.namespace, instance.name, rank.slot_index, request.runs)
    with node.host.saving(order, node.clock()) as plan:
        failed = np.zeros(plan.blocks, np.bool_)
        if plan.blocks:
            copies = _save_copies(plan, rank, ids)
            failed = await _copy(node, "save", rank, copies, deadline)
        # Past the deadline the engine may be writing new content into the blocks already.
        if node.clock() >= deadline:
            node.meter.event("save_past_deadline")
            raise DeadlineExceeded("the save was not complete at its deadline")
        done = plan.commit(failed, node.clock())
    return Saved(done.stored, plan.known, plan.rejected, done.failed)


def close_session(node: Node, session: SessionId) -> None:
    """A session ended, in whatever way: its leases go now, its memory when no copy uses it."""
    leases = node.host.drop_owner(session)
    dropped = node.instances.drop_session(session)
    for rank in dropped.detach:
        node.background.start_soon(node.engine.detach, rank.memory)
    if dropped.gone is not None:
        unfinished = node.host.drop_instance(dropped.gone)
        log.info("instance.gone", instance=dropped.gone, leases=leases, unfinished=unfinished)


async def unregister(node: Node, session: SessionId) -> None:
    """Let go of all that the session registered or leased; the session stays."""
    node.host.drop_leases(session)
    mine = node.instances.drop_registrations(session)
    # Nobody else knows of them any more, so a cancelled caller must not stop half-way.
    with trio.CancelScope(shield=True):
        for rank in mine:
            await node.engine.detach(rank.memory)


async def _copy(
    node: Node, direction: Direction, rank: Rank, copies: Sequence[Copies], deadline: float
) -> NDArray[np.bool_]:
    began = node.clock()
    try:
        failed = await node.engine.copy(direction, rank.memory, copies, deadline=deadline)
    except MemoryGone:
        node.meter.event("memory_gone")
        if node.instances.drop_rank(rank):
            log.warning("rank.memory_gone", rank=rank.rank, session=rank.session)
            node.background.start_soon(node.engine.detach, rank.memory)
        raise
    node.meter.copied(direction, node.clock() - began)
    # The device has let go.  A caller that is gone keeps nothing still: nothing becomes visible.
    await trio.lowlevel.checkpoint_if_cancelled()
    return failed


def _save_copies(
    plan: SavePlan, rank: Rank, block_ids: Sequence[NDArray[np.int64]]
) -> list[Copies]:
    """One batch where all runs are of one group, which is the rule; else one a run."""
    runs = plan.order.runs
    ids = [block_ids[part.run_index][part.picks] for part in plan.parts]
    offsets = [part.pool_offsets for part in plan.parts]
    groups = [runs[part.run_index].group for part in plan.parts]
    if len(set(groups)) == 1:
        return [Copies(rank.layout(groups[0]), np.concatenate(ids), np.concatenate(offsets))]
    return [
        Copies(rank.layout(group), some_ids, some_offsets)
        for group, some_ids, some_offsets in zip(groups, ids, offsets, strict=True)
    ]


def _checked_ids(block_ids: NDArray[np.uint32], layout: GroupLayout) -> NDArray[np.int64]:
    if len(block_ids) and int(block_ids.max()) >= layout.block_count:
        raise BadRequest(
            f"block id {int(block_ids.max())} is outside the {layout.block_count} blocks of "
            f"group {layout.group}",
            "blockIds",
        )
    return block_ids.astype(np.int64)


def _deadline(node: Node, deadline_ns: int) -> float:
    deadline = deadline_ns / NS
    if node.clock() >= deadline:
        raise DeadlineExceeded("the deadline had passed when the call arrived")
    return deadline


@contextlib.contextmanager
def _claimed(node: Node, regions: Sequence[Region]) -> Iterator[list[int]]:
    """The descriptor behind each region, -1 where it has none; closed at the end."""
    claimed: dict[bytes, list[int]] = {}
    try:
        out = []
        for region in regions:
            source = region.source
            if not isinstance(source, HandedOver):
                out.append(-1)
                continue
            if source.token not in claimed:
                claimed[source.token] = node.claim_fds(source.token)
            fds = claimed[source.token]
            if source.index >= len(fds):
                raise BadRequest(
                    f"descriptor {source.index} of a hand-over of {len(fds)}", "regions.index"
                )
            out.append(fds[source.index])
        yield out
    finally:
        for fds in claimed.values():
            for fd in fds:
                os.close(fd)
