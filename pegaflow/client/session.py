"""The Trio form of a session."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from pegaflow import __version__
from pegaflow.client.address import Address, connect_socket, parse_address
from pegaflow.errors import DeadlineExceeded, PeerGone, PegaflowError
from pegaflow.model import messages as m
from pegaflow.model.keys import InstanceId, LeaseToken, Manifest, Namespace
from pegaflow.rpc import calls
from pegaflow.rpc.connections import Limits, bootstrap_of, connect, is_rpc_error
from pegaflow.rpc.kjloop import KjLoop, open_kj_loop

T = TypeVar("T")
__all__ = ["Session", "open_kj_loop", "open_session"]


class Session:
    """One session under Trio; made by :func:`open_session`.  Methods as in the blocking form."""

    def __init__(self, session: object, opened: m.Opened) -> None:
        """Used by :func:`open_session`."""
        self._session, self.opened = session, opened

    async def register(self, request: m.RegisterRequest, timeout_s: float) -> int:
        """Hand one rank's memory over; returns how many ranks are still missing."""
        return await _call(self._session, calls.register(request), timeout_s)

    async def query(self, request: m.QueryRequest, timeout_s: float) -> m.QueryReply:
        """How many leading blocks are cached, with a lease on them."""
        return await _call(self._session, calls.query(request), timeout_s)

    async def load(self, request: m.LoadRequest, timeout_s: float) -> m.Loaded:
        """Copy leased blocks into the rank's memory."""
        return await _call(self._session, calls.load(request), timeout_s)

    async def save(self, request: m.SaveRequest, timeout_s: float) -> m.Saved:
        """Copy blocks out of the rank's memory."""
        return await _call(self._session, calls.save(request), timeout_s)

    async def release(self, leases: Sequence[LeaseToken], timeout_s: float) -> None:
        """Give leases back early; unknown ones are ignored."""
        await _call(self._session, calls.release(leases), timeout_s)

    async def renew(self, lease: LeaseToken, timeout_s: float) -> int:
        """Start a lease's time anew; returns its milliseconds."""
        return await _call(self._session, calls.renew(lease), timeout_s)

    async def unregister(self, timeout_s: float) -> None:
        """Drop all that this session registered or leased."""
        await _call(self._session, calls.unregister(), timeout_s)

    async def ping(self, timeout_s: float) -> bytes:
        """Heartbeat; returns the daemon's boot id."""
        return await _call(self._session, calls.ping(), timeout_s)


async def _call(
    capability: object,
    pair: tuple[Callable[[object], object], Callable[[object], T]],
    timeout_s: float,
) -> T:
    start, read = pair
    try:
        with trio.fail_after(max(timeout_s, 0)):
            promise = start(capability)
            assert isinstance(promise, Awaitable) or hasattr(promise, "__await__")
            return read(await promise)
    except trio.TooSlowError:
        raise DeadlineExceeded(f"no answer within {timeout_s:g} s") from None
    except PegaflowError:
        raise
    except Exception as exc:
        trouble = "the connection broke" if is_rpc_error(exc) else type(exc).__name__
    raise PeerGone(f"the peer's answer can't be read: {trouble}")


@contextlib.asynccontextmanager
async def open_session(
    loop: KjLoop,
    address: Address | str,
    *,
    instance: InstanceId,
    namespace: Namespace,
    manifest: Manifest,
    world_size: int,
    timeout_s: float,
    client: str = "",
) -> AsyncIterator[Session]:
    """Connect and open; the session ends with the block.  ``loop`` comes from ``open_kj_loop``."""
    end = trio.current_time() + timeout_s
    where = parse_address(address) if isinstance(address, str) else address
    sock = await trio.to_thread.run_sync(connect_socket, where, timeout_s, abandon_on_cancel=True)
    async with connect(loop, sock, Limits()) as wire:
        request = m.OpenRequest(
            protocol_min=m.PROTOCOL_MIN,
            protocol_max=m.PROTOCOL_MAX,
            client=client or f"pegaflow.client {__version__} pid {os.getpid()}",
            instance=instance,
            namespace=namespace,
            manifest=manifest,
            world_size=world_size,
            monotonic_ns=time.monotonic_ns(),
        )
        node = bootstrap_of(wire, calls.NODE)
        start, read = calls.open_session(request)
        kept: list[object] = []

        def read_both(answer: object) -> m.Opened:
            opened = read(answer)
            kept.append(calls.session_of(answer))
            return opened

        opened = await _call(node, (start, read_both), end - trio.current_time())
        session = Session(kept.pop(), opened)
        try:
            yield session
        finally:
            session._session = None  # the capability goes before its connection does
            del node
