"""What runs beside the calls: growing the pool, evicting, expiring, collecting garbage."""

from __future__ import annotations

import gc
from typing import assert_never

import trio

from pegaflow.engine.pinned import Pool
from pegaflow.node.handover import Handover
from pegaflow.node.parts import Node
from pegaflow.observe import log
from pegaflow.policy.figures import ExpiredLease, StaleBlocks

EVICT_EVERY_SECONDS = 0.05
EVICT_BATCH_BLOCKS = 1024
EXPIRE_EVERY_SECONDS = 1.0
COLLECT_EVERY_SECONDS = 5.0
COLLECT_ALL_EVERY = 12


async def grow_pool(node: Node, pool: Pool) -> None:
    """Give the policy each slab as it becomes usable: the daemon serves meanwhile."""
    began = trio.current_time()
    async for offset, size in pool.grow():
        node.host.add_memory(offset, size)
    log.info(
        "pool.ready",
        bytes=node.host.statistics().capacity_bytes,
        seconds=round(trio.current_time() - began, 2),
    )


async def evict(node: Node) -> None:
    """Keep room free between the watermarks, so that a save finds some without waiting."""
    while True:
        await trio.sleep(EVICT_EVERY_SECONDS)
        while node.host.evict_to_low_watermark(EVICT_BATCH_BLOCKS).blocks:
            await trio.lowlevel.checkpoint()


async def expire(node: Node, handover: Handover) -> None:
    """End leases, unfinished blocks and unclaimed descriptors whose time is over."""
    while True:
        await trio.sleep(EXPIRE_EVERY_SECONDS)
        for over in node.host.expire(node.clock()):
            match over:
                case ExpiredLease():  # its token is a secret, even now
                    log.info("lease.expired", instance=over.instance, blocks=over.blocks)
                case StaleBlocks():
                    log.info("blocks.given_up", namespace=over.namespace, blocks=over.blocks)
                case never:
                    assert_never(never)
        if unclaimed := handover.expire(node.clock()):
            log.warning("handover.unclaimed", messages=unclaimed)


async def collect_garbage() -> None:
    """Run Python's cyclic collector in this thread, and only here.

    It must never free a capnp object in a worker thread: that aborts the process.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    turns = 0
    while True:
        await trio.sleep(COLLECT_EVERY_SECONDS)
        turns += 1
        gc.collect(2 if turns % COLLECT_ALL_EVERY == 0 else 1)
