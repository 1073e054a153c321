"""Health, metrics and clean-up over HTTP, for people, probes and Prometheus.

There are no passwords: bind it to loopback.  A browser on this host can reach loopback too, so what
changes something is refused when a web page asked for it.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable

import attrs
import hypercorn.config
import hypercorn.trio
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pegaflow.engine.base import AttachedMemory
from pegaflow.node import flows, measure
from pegaflow.node.parts import Node
from pegaflow.observe import log, metrics
from pegaflow.policy.instances import Instance

IDLE_SECONDS = 5
GRACE_SECONDS = 0.5

Handler = Callable[[Request], Awaitable[Response]]


async def serve(
    node: Node,
    listener: socket.socket,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled, also while the daemon drains.  The listener stays the caller's.

    A broken invariant in a handler ends this call, as everywhere else.
    """
    admin = Admin(node)
    config = _Config(listener)
    async with trio.open_nursery() as nursery:
        await nursery.start(hypercorn.trio.serve, admin.application(), config)
        task_status.started()
        await admin.broken.wait()
        assert admin.bug is not None
        raise admin.bug


class _Config(hypercorn.config.Config):
    """Listens on a socket that is there already."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__()
        self._listener = listener
        quiet = logging.getLogger("pegaflow.http")
        quiet.setLevel(logging.WARNING)
        self.errorlog = quiet
        self.accesslog = None
        self.keep_alive_timeout = IDLE_SECONDS
        self.read_timeout = IDLE_SECONDS
        self.graceful_timeout = GRACE_SECONDS
        self.include_server_header = False

    def create_sockets(self) -> hypercorn.config.Sockets:
        """The one that was bound before, so that a taken port was one sentence at the start."""
        self._listener.setblocking(False)
        return hypercorn.config.Sockets([], [self._listener], [])


@attrs.define(eq=False)
class Admin:
    """The routes.  Handlers run on the Trio thread; each touches the node in one atomic step."""

    node: Node
    broken: trio.Event = attrs.field(factory=trio.Event)
    bug: AssertionError | None = None

    def application(self) -> Starlette:
        """For an ASGI server."""
        routes: list[tuple[str, str, Handler]] = [
            ("/health", "GET", self.health),
            ("/ready", "GET", self.ready),
            ("/metrics", "GET", self.metrics),
            ("/instances", "GET", self.instances),
            ("/instances/cleanup", "POST", self.cleanup_instances),
            ("/cache/memory/cleanup", "POST", self.cleanup_memory),
        ]
        return Starlette(
            routes=[
                Route(path, self._guarded(handler), methods=[method])
                for path, method, handler in routes
            ]
        )

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            if request.method == "POST" and _from_web_page(request):
                return JSONResponse({"error": "not for web pages"}, 403)
            try:
                return await handler(request)
            except AssertionError as exc:
                # The web framework would answer 500 and go on with broken state.
                self.bug = exc
                self.broken.set()
                raise

        return guarded

    async def health(self, request: Request) -> Response:
        """The process is alive and its loop turns."""
        return PlainTextResponse("ok")

    async def ready(self, request: Request) -> Response:
        """Whether an engine may come."""
        if self.node.draining:
            return PlainTextResponse("draining", 503)
        if not self.node.host.statistics().capacity_bytes:
            return PlainTextResponse("no pool memory is usable yet", 503)
        return PlainTextResponse("ready")

    async def metrics(self, request: Request) -> Response:
        """Prometheus text, rendered off this thread."""
        seen = measure.snapshot(self.node)
        text = await trio.to_thread.run_sync(metrics.render, seen)
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def instances(self, request: Request) -> Response:
        """Who is here."""
        return JSONResponse({"instances": [_told(found) for found in self.node.instances]})

    async def cleanup_instances(self, request: Request) -> Response:
        """End the sessions of one instance, or of all; its engine opens and registers anew."""
        wanted = request.query_params.get("id")
        here = [found for found in self.node.instances if wanted in (None, found.name)]
        if wanted is not None and not here:
            return JSONResponse({"error": f"no instance {wanted!r} is here"}, 404)
        tensors = sum(len(rank.memory.regions) for found in here for rank in found.ranks.values())
        for found in here:
            for session in list(found.sessions):
                flows.close_session(self.node, session)
        log.info("instances.cleaned_up", wanted=wanted, instances=len(here), tensors=tensors)
        return JSONResponse({"removed_instances": len(here), "removed_tensors": tensors})

    async def cleanup_memory(self, request: Request) -> Response:
        """Remove every block that nobody holds."""
        before = self.node.host.statistics().used_bytes
        gone = self.node.host.clear()
        reclaimed = before - self.node.host.statistics().used_bytes
        log.info("memory.cleaned_up", blocks=gone.blocks, reclaimed_bytes=reclaimed)
        return JSONResponse(
            {
                "evicted_blocks": gone.blocks,
                "evicted_bytes": gone.size_bytes,
                "reclaimed_bytes": reclaimed,
                "still_referenced_blocks": gone.still_referenced,
            }
        )


def _from_web_page(request: Request) -> bool:
    return "origin" in request.headers or "sec-fetch-site" in request.headers


def _told(found: Instance[AttachedMemory]) -> dict[str, object]:
    return {
        "id": found.name,
        "namespace": found.namespace,
        "world_size": found.world_size,
        "registered_ranks": sorted(found.ranks),
        "sessions": len(found.sessions),
        "ready": not found.missing,
    }
