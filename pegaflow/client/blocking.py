"""The blocking form of a session, for engine processes: no event loop, no thread.

Every call has a deadline.  An object belongs to the thread that made it; other threads may drop it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from pegaflow import __version__
from pegaflow.client.address import Address, connect_socket, parse_address
from pegaflow.model import messages as m
from pegaflow.model.keys import InstanceId, LeaseToken, Manifest, Namespace
from pegaflow.rpc import calls
from pegaflow.rpc.blocking import Wire
from pegaflow.rpc.connections import Limits


class BlockingNode:
    """A connection without a session: health, statistics, shutdown."""

    def __init__(self, address: Address | str, timeout_s: float) -> None:
        """Connect; raises :exc:`PeerGone` or :exc:`DeadlineExceeded`."""
        self.address = parse_address(address) if isinstance(address, str) else address
        end = time.monotonic() + timeout_s
        self._wire = Wire(connect_socket(self.address, timeout_s), Limits())
        self._end = end
        self._wire.bootstrap(calls.NODE, "node")

    def health(self, timeout_s: float) -> m.Health:
        """Cheap facts."""
        return self._wire.call("node", *calls.health(), _end(timeout_s))

    def statistics(self, timeout_s: float) -> str:
        """A flat JSON object."""
        return self._wire.call("node", *calls.statistics(), _end(timeout_s))

    def shutdown(self, grace_ms: int, timeout_s: float) -> None:
        """Ask the daemon to drain and exit; only from its own host."""
        end = _end(timeout_s)
        boot_id = self._wire.call("node", *calls.health(), end).boot_id
        self._wire.call("node", *calls.shutdown(grace_ms, boot_id), end)

    @property
    def open(self) -> bool:
        """Not closed by us; the peer may be gone all the same."""
        return self._wire.open

    def close(self) -> None:
        """Drop the connection.  May be repeated."""
        self._wire.close()

    def __enter__(self) -> BlockingNode:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class BlockingSession(BlockingNode):
    """One session; its end, or the process's, ends what it registered and leased."""

    def __init__(
        self,
        address: Address | str,
        *,
        instance: InstanceId,
        namespace: Namespace,
        manifest: Manifest,
        world_size: int,
        timeout_s: float,
        client: str = "",
    ) -> None:
        """Connect and open within ``timeout_s``; raises of the error tree, leaves nothing open."""
        end = time.monotonic() + timeout_s
        super().__init__(address, timeout_s)
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
        try:
            self.opened = self._wire.call(
                "node", *calls.open_session(request), end, keep=("session", calls.session_of)
            )
        except BaseException:
            self.close()
            raise

    def register(self, request: m.RegisterRequest, timeout_s: float) -> int:
        """Hand one rank's memory over; returns how many ranks are still missing."""
        return self._wire.call("session", *calls.register(request), _end(timeout_s))

    def query(self, request: m.QueryRequest, timeout_s: float) -> m.QueryReply:
        """How many leading blocks are cached, with a lease on them."""
        return self._wire.call("session", *calls.query(request), _end(timeout_s), impatient=True)

    def load(self, request: m.LoadRequest, timeout_s: float) -> m.Loaded:
        """Copy leased blocks into the rank's memory; returns when the daemon let go of it."""
        return self._wire.call("session", *calls.load(request), _end(timeout_s))

    def begin_load(self, request: m.LoadRequest, send_timeout_s: float) -> int:
        """Send :meth:`load` and go on; :meth:`poll_load` with the number tells its outcome."""
        return self._wire.begin("session", *calls.load(request), _end(send_timeout_s))

    def poll_load(self, number: int) -> m.Loaded | None:
        """None while the load is under way.  Never waits; raises once as :meth:`load` would."""
        answer = self._wire.poll(number)
        if answer is None:
            return None
        loaded = answer[0]
        assert isinstance(loaded, m.Loaded)
        return loaded

    def abandon(self, number: int) -> None:
        """Ask no more; the memory is let go of when the load's deadline has passed."""
        self._wire.abandon(number)

    def save(self, request: m.SaveRequest, timeout_s: float) -> m.Saved:
        """Copy blocks out of the rank's memory; returns when the daemon let go of it."""
        return self._wire.call("session", *calls.save(request), _end(timeout_s))

    def release(self, leases: Sequence[LeaseToken], timeout_s: float) -> None:
        """Give leases back early; unknown ones are ignored."""
        self._wire.call("session", *calls.release(leases), _end(timeout_s), impatient=True)

    def renew(self, lease: LeaseToken, timeout_s: float) -> int:
        """Start a lease's time anew; returns its milliseconds."""
        return self._wire.call("session", *calls.renew(lease), _end(timeout_s), impatient=True)

    def unregister(self, timeout_s: float) -> None:
        """Drop all that this session registered or leased."""
        self._wire.call("session", *calls.unregister(), _end(timeout_s))

    def ping(self, timeout_s: float) -> bytes:
        """Heartbeat; returns the daemon's boot id."""
        return self._wire.call("session", *calls.ping(), _end(timeout_s))

    def __enter__(self) -> BlockingSession:
        return self


def _end(timeout_s: float) -> float:
    return time.monotonic() + timeout_s
