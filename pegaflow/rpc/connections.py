"""Accepting and making connections: one nursery each, deadlines, caps."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Callable, Sequence

import attrs
import capnp
import trio

from pegaflow.observe import log
from pegaflow.rpc.kjloop import KjLoop
from pegaflow.rpc.transport import Transport

WORD_BYTES = 8
ACCEPT_PAUSE_SECONDS = 0.1
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@attrs.frozen
class Limits:
    """What one peer may cost.  Bounds for every connection of a listener."""

    message_bytes: int = 4 << 20  # a save of 64 k blocks; also bounds replies
    first_message_seconds: float = 10.0
    idle_seconds: float = 60.0
    calls_in_flight: int = 64
    connections: int = 1024

    @property
    def capnp(self) -> dict[str, int]:
        """As pycapnp wants it: a message may be read about twice over."""
        return {"traversal_limit_in_words": 2 * self.message_bytes // WORD_BYTES}


@attrs.frozen
class Peer:
    """Who is at the other end."""

    address: str
    local: bool


@attrs.define(eq=False)
class Connection:
    """One accepted connection; its nursery holds every handler that runs for it."""

    nursery: trio.Nursery
    peer: Peer
    limits: Limits
    calls: int = 0
    in_flight: int = 0
    last_call: float = attrs.field(factory=trio.current_time)
    closers: dict[int, Callable[[], None]] = attrs.field(factory=dict)
    """What must hear that the connection is over; each removes itself when it ended earlier."""

    def begin(self) -> bool:
        """Count a call; False when too many are in flight and it must be refused."""
        self.calls += 1
        self.last_call = trio.current_time()
        return self.in_flight < self.limits.calls_in_flight

    def end(self) -> None:
        """A call that was in flight is over."""
        self.in_flight -= 1
        self.last_call = trio.current_time()


def peer_of(sock: socket.socket) -> Peer:
    """The address for logs, and whether the peer is on this host."""
    if sock.family == socket.AF_UNIX:
        return Peer("unix", local=True)
    try:
        name = sock.getpeername()
    except OSError:
        return Peer("gone", local=False)
    host = str(name[0])
    return Peer(f"{host}:{name[1]}", host.startswith("127.") or host in ("::1", "::ffff:127.0.0.1"))


async def _watch(connection: Connection, scope: trio.CancelScope) -> None:
    """Close a connection that sends no first call in time, or falls silent with nothing in flight.

    Calls count, not bytes: a peer that dribbles one byte a second gains nothing.
    """
    limits = connection.limits
    while True:
        patience = limits.idle_seconds if connection.calls else limits.first_message_seconds
        due = connection.last_call + patience
        if trio.current_time() >= due:
            if not connection.in_flight:
                log.info("rpc.connection_idle", peer=connection.peer.address)
                scope.cancel()
                return
            due = trio.current_time() + patience
        await trio.sleep_until(due)


async def serve_connection(
    loop: KjLoop,
    sock: socket.socket,
    bootstrap: Callable[[Connection], object],
    limits: Limits,
) -> None:
    """Serve one peer until it goes, falls silent, or this is cancelled.

    Returns when every handler of the connection has ended.
    """
    box: list[object] = []
    factory = await capnp.AsyncIoStream.create_server(box.append)  # our create_server returns it
    async with trio.open_nursery() as nursery:
        connection = Connection(nursery, peer_of(sock), limits)
        protocol = factory()
        transport = Transport(loop, sock, protocol, gate=True)
        protocol.connection_made(transport)
        server = capnp.TwoPartyServer(box[0], bootstrap=bootstrap(connection), **limits.capnp)
        nursery.start_soon(transport.run)
        nursery.start_soon(_watch, connection, nursery.cancel_scope)
        try:
            await server.on_disconnect()
        finally:
            server.close()  # drops every capability exported to this peer
            transport.close()
            loop.drain()
            for closer in list(connection.closers.values()):
                closer()
            nursery.cancel_scope.cancel()
            box.clear()
            # KJ objects die here and now, by reference count, not in some later collection.
            del server, protocol, transport


async def serve(
    loop: KjLoop,
    listeners: Sequence[socket.socket],
    bootstrap: Callable[[Connection], object],
    limits: Limits,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Accept on listening sockets until cancelled; one child nursery a connection.

    The listeners stay the caller's.  A broken connection is logged and dropped; a broken invariant
    in a handler ends this call.
    """
    open_now = 0

    async def one(sock: socket.socket) -> None:
        nonlocal open_now
        try:
            await serve_connection(loop, sock, bootstrap, limits)
        except* (OSError, capnp.KjException) as group:
            log.info("rpc.connection_lost", error=repr(group.exceptions[0])[:200])
        finally:
            open_now -= 1
            sock.close()

    async def accept(listener: socket.socket, nursery: trio.Nursery) -> None:
        nonlocal open_now
        listener.setblocking(False)
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(listener)
                continue
            except OSError as exc:
                if exc.errno in _OUT_OF_DESCRIPTORS:
                    await trio.sleep(ACCEPT_PAUSE_SECONDS)
                    continue
                if exc.errno in (errno.ECONNABORTED, errno.EPROTO):
                    continue
                raise
            if open_now >= limits.connections:
                log.warning("rpc.connection_refused", open=open_now)
                sock.close()
                continue
            open_now += 1  # here: tasks of a burst start later
            nursery.start_soon(one, sock)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for listener in listeners:
            nursery.start_soon(accept, listener, nursery)
        task_status.started()


@contextlib.asynccontextmanager
async def connect(loop: KjLoop, sock: socket.socket, limits: Limits) -> AsyncIterator[object]:
    """A client over a connected socket, which it owns; yields pycapnp's TwoPartyClient."""
    box: list[object] = []
    factory = await capnp.AsyncIoStream.create_server(box.append)
    async with trio.open_nursery() as nursery:
        protocol = factory()
        transport = Transport(loop, sock, protocol)
        protocol.connection_made(transport)
        nursery.start_soon(transport.run)
        client = capnp.TwoPartyClient(box[0], **limits.capnp)
        try:
            yield client
        finally:
            client.close()
            transport.close()
            loop.drain()
            nursery.cancel_scope.cancel()
            box.clear()
            del client, protocol, transport


def bootstrap_of(client: object, interface: object) -> object:
    """The main capability of a client connection, cast to its interface."""
    return client.bootstrap().cast_as(interface)  # type: ignore[attr-defined]  # pycapnp is untyped


def is_rpc_error(exc: Exception) -> bool:
    """Whether pycapnp raised it: the peer is gone, or its bytes can't be read."""
    return isinstance(exc, capnp.KjException)
