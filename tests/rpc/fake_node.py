"""A node without a cache: answers what the test says, and remembers what it heard."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable

import attrs
import numpy as np
import trio

from pegaflow.client.blocking import BlockingSession
from pegaflow.model import messages as m
from pegaflow.model.keys import (
    REQUIRED_MANIFEST_FIELDS,
    InstanceId,
    LeaseToken,
    Manifest,
    Namespace,
)
from pegaflow.rpc.connections import Limits, Peer
from pegaflow.rpc.kjloop import KjLoop, open_kj_loop
from pegaflow.rpc.server import serve_node

MANIFEST = Manifest(dict.fromkeys(REQUIRED_MANIFEST_FIELDS, "x"))
BOOT_ID = b"b" * 16


@attrs.define(eq=False)
class FakeSession:
    """Every call may be told to raise, or to take long."""

    error: Exception | None = None
    seconds: float = 0.0
    heard: list[str] = attrs.field(factory=list)
    cancelled: list[str] = attrs.field(factory=list)
    closed_times: int = 0

    def _now(self, name: str) -> None:
        self.heard.append(name)
        if self.error is not None:
            raise self.error

    async def _later(self, name: str) -> None:
        try:
            await trio.sleep(self.seconds)
        except trio.Cancelled:
            self.cancelled.append(name)
            raise
        self._now(name)

    def query(self, request: m.QueryRequest) -> m.QueryReply:
        self._now(f"query {request.request_id}")
        return m.Ready(len(request.hashes), LeaseToken(b"l" * 16 if request.hashes else b""), 5)

    def release(self, leases: list[LeaseToken]) -> None:
        self._now(f"release {len(leases)}")

    def renew(self, lease: LeaseToken) -> int:
        self._now("renew")
        return 7

    def ping(self) -> bytes:
        return BOOT_ID

    async def register(self, request: m.RegisterRequest) -> int:
        await self._later("register")
        return 3

    async def load(self, request: m.LoadRequest) -> m.Loaded:
        await self._later("load")
        return m.Loaded(np.array([1], np.uint32))

    async def save(self, request: m.SaveRequest) -> m.Saved:
        await self._later("save")
        return m.Saved(1, 2, 3, 4)

    async def unregister(self) -> None:
        await self._later("unregister")

    def closed(self) -> None:
        self.closed_times += 1


@attrs.define(eq=False)
class FakeNode:
    """Makes a session a call of open."""

    error: Exception | None = None
    sessions: list[FakeSession] = attrs.field(factory=list)
    opened: list[m.OpenRequest] = attrs.field(factory=list)
    shut_down: list[int] = attrs.field(factory=list)
    observations: list[tuple[str, str]] = attrs.field(factory=list)
    statistics_text: str = "{}"
    prepare: Callable[[FakeSession], None] = lambda session: None

    def open(self, request: m.OpenRequest, peer: Peer) -> tuple[m.Opened, FakeSession]:
        if self.error is not None:
            raise self.error
        self.opened.append(request)
        session = FakeSession()
        self.prepare(session)
        self.sessions.append(session)
        return m.Opened(1, BOOT_ID, "@nowhere", "0"), session

    def health(self) -> m.Health:
        return m.Health(True, BOOT_ID, "0", 1, 2)

    def statistics(self) -> str:
        return self.statistics_text

    def shutdown(self, grace_ms: int, peer: Peer) -> None:
        self.shut_down.append(grace_ms)

    def observed(self, method: str, status: str, seconds: float) -> None:
        self.observations.append((method, status))


@contextlib.asynccontextmanager
async def serving(
    node: FakeNode, limits: Limits | None = None
) -> AsyncIterator[tuple[str, KjLoop]]:
    """The address of a served fake; the loop is there for Trio clients."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with open_kj_loop() as loop, trio.open_nursery() as nursery:
            await nursery.start(serve_node, loop, [listener], node, limits or Limits())
            yield f"127.0.0.1:{listener.getsockname()[1]}", loop
            nursery.cancel_scope.cancel()


def open_blocking(address: str, **changes: object) -> BlockingSession:
    """For a thread; the caller closes it."""
    arguments: dict[str, object] = {
        "instance": InstanceId("i"),
        "namespace": Namespace("n"),
        "manifest": MANIFEST,
        "world_size": 1,
        "timeout_s": 5.0,
    }
    return BlockingSession(address, **{**arguments, **changes})  # type: ignore[arg-type]  # by name


def load_request() -> m.LoadRequest:
    one = np.zeros(1, np.uint32)
    return m.LoadRequest(0, LeaseToken(b"l" * 16), 0, one, one, time.monotonic_ns() + 10**10)


def save_request() -> m.SaveRequest:
    return m.SaveRequest(0, (), time.monotonic_ns() + 10**10)


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for what other threads and sockets bring about."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - threads and sockets bring it about
            await trio.sleep(0.005)
