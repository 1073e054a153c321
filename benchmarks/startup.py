"""How long from starting the daemon to its first answered query, with a small and a large pool?

Would disprove: the pool is touched in the background, so its size does not delay the first answer.
The clock starts before the process does; the query comes from an engine that opened a session and
handed its memory over, so all of that is inside.  Keys: ``startup_1gb_s``, ``startup_12gb_s``, and
how long the whole pool took, ``pool_1gb_s``, ``pool_12gb_s``.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.harness import Figure, emit, progress
from pegaflow.client.blocking import BlockingNode, BlockingSession
from pegaflow.client.memory import SharedMemory, hand_over, layout_of
from pegaflow.errors import PegaflowError
from pegaflow.model.keys import (
    REQUIRED_MANIFEST_FIELDS,
    BlockHash,
    InstanceId,
    Manifest,
    Namespace,
)
from pegaflow.model.layout import HandedOver, Region
from pegaflow.model.messages import QueryRequest, Ready, RegisterRequest
from pegaflow.testing.daemon import Daemon, DaemonFailed, start_daemon

GIVE_UP_S = 60.0
POOL_GIVE_UP_S = 240.0


def first_query(address: str) -> None:
    """Everything an engine does before its first answer; raises of the error tree."""
    session = BlockingSession(
        address,
        instance=InstanceId("startup"),
        namespace=Namespace("startup"),
        manifest=Manifest(dict.fromkeys(REQUIRED_MANIFEST_FIELDS, "startup")),
        world_size=1,
        timeout_s=1.0,
    )
    memory = SharedMemory(1 << 20)
    try:
        token = hand_over(session.opened.handover, [memory.fd], 1.0)
        region = Region(memory.size_bytes, HandedOver(token, 0, 0))
        base = memory.view.__array_interface__["data"][0]
        layout = layout_of([memory.view.reshape(16, -1)], region=0, base_address=base)
        session.register(RegisterRequest(0, 0, 1, (region,), (layout,)), 1.0)
        hashes = [BlockHash(bytes([i]) * 32) for i in range(64)]
        reply = session.query(QueryRequest(0, hashes, b"", "first"), 1.0)
        assert isinstance(reply, Ready)
        assert reply.hit_count == 0
    finally:
        session.close()
        memory.close()


def until_answer(daemon: Daemon, started: float) -> float:
    """Seconds from ``started`` to the first answered query."""
    while time.monotonic() - started < GIVE_UP_S:
        if daemon.process.poll() is not None:
            raise DaemonFailed(daemon.log_tail())
        try:
            first_query(daemon.address)
        except PegaflowError:
            time.sleep(0.005)
        else:
            return time.monotonic() - started
    raise DaemonFailed(f"no answer in {GIVE_UP_S} s:\n{daemon.log_tail()}")


def until_pool(daemon: Daemon, started: float) -> float | None:
    """Seconds until all of the pool was usable; None when it took too long."""
    with BlockingNode(daemon.address, 5.0) as node:
        while time.monotonic() - started < POOL_GIVE_UP_S:
            health = node.health(5.0)
            if health.pool_ready_bytes >= health.pool_total_bytes:
                return time.monotonic() - started
            time.sleep(0.1)
    return None


def main() -> None:
    result: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory(prefix="pegaflow-bench-") as folder:
        for size in ("1gb", "12gb"):
            progress(f"pool of {size}")
            started = time.monotonic()
            daemon = start_daemon(pool_size=size, folder=Path(folder))
            try:
                result[f"startup_{size}_s"] = round(until_answer(daemon, started), 3)
                progress(f"first answer after {result[f'startup_{size}_s']} s")
                whole = until_pool(daemon, started)
                result[f"pool_{size}_s"] = None if whole is None else round(whole, 3)
                progress(f"whole pool after {result[f'pool_{size}_s']} s")
            finally:
                daemon.kill()
    emit(result)


if __name__ == "__main__":
    main()
