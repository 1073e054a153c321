"""The Trio client: several questions at a time over one connection, each with a deadline.

    python docs/examples/trio_session.py 127.0.0.1:50055

The methods, arguments and errors are those of the blocking form in ``blocking_engine.py``.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import trio

from pegaflow.client.memory import SharedMemory, hand_over, layout_of
from pegaflow.client.session import Session, open_kj_loop, open_session
from pegaflow.model.keys import (
    REQUIRED_MANIFEST_FIELDS,
    BlockHash,
    InstanceId,
    LeaseToken,
    Manifest,
    Namespace,
)
from pegaflow.model.layout import HandedOver, Region
from pegaflow.model.messages import QueryRequest, Ready, RegisterRequest, SaveRequest, SaveRun

BLOCKS, BLOCK_BYTES, TIMEOUT_S = 8, 4096, 5.0


def conversation(number: int) -> list[BlockHash]:
    """Hashes of a prompt; a real engine has them from its own prefix cache."""
    return [BlockHash(bytes([number, i]) * 16) for i in range(4)]


async def register(session: Session, memory: SharedMemory) -> None:
    """One rank with one layer.  Handing over blocks, so it has a thread."""
    token = await trio.to_thread.run_sync(
        hand_over, session.opened.handover, [memory.fd], TIMEOUT_S
    )
    kv = memory.view.reshape(BLOCKS, BLOCK_BYTES)
    base = memory.view.__array_interface__["data"][0]
    region = Region(memory.size_bytes, HandedOver(token, 0, 0))
    layout = layout_of([kv], region=0, base_address=base)
    await session.register(RegisterRequest(0, 0, 1, (region,), (layout,)), TIMEOUT_S)


async def ask(session: Session, number: int, found: dict[int, int]) -> None:
    """How much of a conversation is cached?  The lease is given back at once here."""
    reply = await session.query(
        QueryRequest(0, conversation(number), b"", f"request-{number}"), TIMEOUT_S
    )
    assert isinstance(reply, Ready)
    found[number] = reply.hit_count
    if reply.hit_count:
        await session.release([LeaseToken(reply.lease)], TIMEOUT_S)


async def main(address: str) -> None:
    memory = SharedMemory(BLOCKS * BLOCK_BYTES)
    async with (
        open_kj_loop() as loop,
        open_session(
            loop,
            address,
            instance=InstanceId("trio-engine"),
            namespace=Namespace("trio-example"),
            manifest=Manifest(dict.fromkeys(REQUIRED_MANIFEST_FIELDS, "example")),
            world_size=1,
            timeout_s=TIMEOUT_S,
        ) as session,
    ):
        await register(session, memory)
        run = SaveRun(0, conversation(1), b"", np.arange(4, dtype=np.uint32))
        # Deadlines are on CLOCK_MONOTONIC; Trio's own clock has another zero.
        deadline_ns = time.monotonic_ns() + int(TIMEOUT_S * 1e9)
        saved = await session.save(SaveRequest(0, (run,), deadline_ns), TIMEOUT_S)
        print("stored blocks:", saved.stored)
        found: dict[int, int] = {}
        async with trio.open_nursery() as questions:
            for number in (1, 2, 3):
                questions.start_soon(ask, session, number, found)
        print("cached blocks by conversation:", dict(sorted(found.items())))
        assert found == {1: 4, 2: 0, 3: 0}
    memory.close()


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50055")
