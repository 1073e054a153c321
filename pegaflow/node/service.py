"""The node protocol's handlers: thin, each calls a flow."""

from __future__ import annotations

import json
from collections.abc import Callable

import attrs

from pegaflow import __version__
from pegaflow.errors import BadRequest, ShuttingDown
from pegaflow.model import messages as m
from pegaflow.model.keys import LeaseToken, SessionId
from pegaflow.node import flows
from pegaflow.node.parts import Node
from pegaflow.observe import log
from pegaflow.rpc.connections import Peer
from pegaflow.rpc.server import negotiate

CLOCK_SKEW_MAX_SECONDS = 5.0


@attrs.define(eq=False)
class SessionService:
    """One session's calls."""

    node: Node
    session: SessionId

    def query(self, request: m.QueryRequest) -> m.QueryReply:
        """Longest cached prefix."""
        self._refuse_when_draining()
        return flows.query(self.node, self.session, request)

    def release(self, leases: list[LeaseToken]) -> None:
        """Give leases back."""
        self.node.host.release(leases, self.session)

    def renew(self, lease: LeaseToken) -> int:
        """Start a lease's time anew."""
        return self.node.host.renew(lease, self.session, self.node.clock())

    def ping(self) -> bytes:
        """Heartbeat."""
        return self.node.boot_id

    async def register(self, request: m.RegisterRequest) -> int:
        """Attach a rank."""
        self._refuse_when_draining()
        return await flows.register(self.node, self.session, request)

    async def load(self, request: m.LoadRequest) -> m.Loaded:
        """Pool to engine.  Also while draining: the lease is there, and no new one is given."""
        return await flows.load(self.node, self.session, request)

    async def save(self, request: m.SaveRequest) -> m.Saved:
        """Engine to pool."""
        self._refuse_when_draining()
        return await flows.save(self.node, self.session, request)

    async def unregister(self) -> None:
        """Let go of everything."""
        await flows.unregister(self.node, self.session)

    def closed(self) -> None:
        """The session is over."""
        flows.close_session(self.node, self.session)

    def _refuse_when_draining(self) -> None:
        if self.node.draining:
            raise ShuttingDown("the daemon is draining: connect again later")


@attrs.define(eq=False)
class NodeService:
    """What a connection may ask before it has a session."""

    node: Node
    on_shutdown: Callable[[int], None]
    """Called with the grace in milliseconds when a local peer asks for shutdown."""

    def open(self, request: m.OpenRequest, peer: Peer) -> tuple[m.Opened, SessionService]:
        """Start a session after checks of identity and clock; a refusal leaves nothing behind."""
        node = self.node
        if node.draining:
            raise ShuttingDown("the daemon is draining: connect again later")
        protocol = negotiate(request)
        skew = abs(node.clock() - request.monotonic_ns / flows.NS)
        if skew > CLOCK_SKEW_MAX_SECONDS:
            raise BadRequest(
                f"the client's monotonic clock differs by {skew:.1f} s from the daemon's: "
                "both must run on one host and in one time namespace",
                "monotonicNanos",
            )
        request.manifest.check_complete()
        session = next(node.session_ids)
        node.host.open_namespace(request.namespace, request.manifest, session)
        try:
            node.instances.open(
                session, request.instance, request.namespace, request.world_size, request.client
            )
        except BaseException:
            node.host.drop_owner(session)
            raise
        log.info(
            "session.opened",
            session=session,
            instance=request.instance,
            namespace=request.namespace,
            client=request.client,
            peer=peer.address,
        )
        opened = m.Opened(protocol, node.boot_id, node.handover_address, __version__)
        return opened, SessionService(node, session)

    def health(self) -> m.Health:
        """Serving, and some pool memory is usable."""
        ready = self.node.host.statistics().capacity_bytes
        return m.Health(
            bool(ready) and not self.node.draining,
            self.node.boot_id,
            __version__,
            ready,
            self.node.pool_total_bytes,
        )

    def statistics(self) -> str:
        """Flat numbers of policy and engine, for people and tests."""
        host = self.node.host.statistics()
        numbers: dict[str, object] = {
            name: value
            for name, value in attrs.asdict(host, recurse=False).items()
            if isinstance(value, int)
        }
        numbers["instances"] = len(self.node.instances)
        numbers["boot_id"] = self.node.boot_id.hex()
        numbers["version"] = __version__
        numbers["pool_total_bytes"] = self.node.pool_total_bytes
        engine = attrs.asdict(self.node.engine.statistics())
        for (direction, method), size in engine.pop("method_bytes").items():
            numbers[f"engine_bytes_{method}_{direction}"] = size
        for name, value in engine.items():
            numbers |= {f"engine_{name}_{direction}": number for direction, number in value.items()}
        numbers |= {f"event_{name}": count for name, count in self.node.meter.events.items()}
        return json.dumps(numbers)

    def shutdown(self, grace_ms: int, peer: Peer) -> None:
        """Drain and exit, if the peer is on this host."""
        if not peer.local:
            raise BadRequest("shutdown is only taken from the daemon's own host")
        log.info("shutdown.requested", peer=peer.address, grace_ms=grace_ms)
        self.on_shutdown(grace_ms)

    def observed(self, method: str, status: str, seconds: float) -> None:
        """For metrics."""
        self.node.meter.call(method, status, seconds)
