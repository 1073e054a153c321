"""The daemon's capabilities: parse, call a handler, fill the answer.

Parsing happens in the synchronous part of a method, where the call's context is alive and calls
arrive in order; what must keep that order (query, release) also runs there.  What waits for a
device runs as a task of the connection, gets plain values and returns one.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import trio

from pegaflow.errors import BadRequest, Overloaded, VersionMismatch
from pegaflow.model import messages as m
from pegaflow.model.keys import LeaseToken
from pegaflow.observe import log
from pegaflow.rpc import convert, schema
from pegaflow.rpc.connections import Connection, Limits, Peer, is_rpc_error, serve
from pegaflow.rpc.convert import Struct
from pegaflow.rpc.kjloop import Call, Immediate, KjLoop

T = TypeVar("T")


class SessionHandler(Protocol):
    """What one session may ask; raises :exc:`PegaflowError` for what the caller can act on."""

    def query(self, request: m.QueryRequest) -> m.QueryReply: ...
    def release(self, leases: list[LeaseToken]) -> None: ...
    def renew(self, lease: LeaseToken) -> int: ...
    def ping(self) -> bytes: ...
    async def register(self, request: m.RegisterRequest) -> int: ...
    async def load(self, request: m.LoadRequest) -> m.Loaded: ...
    async def save(self, request: m.SaveRequest) -> m.Saved: ...
    async def unregister(self) -> None: ...
    def closed(self) -> None:
        """The session is over, for whatever reason; called exactly once, in the loop's thread."""


class NodeHandler(Protocol):
    """What a connection may ask before it has a session."""

    def open(self, request: m.OpenRequest, peer: Peer) -> tuple[m.Opened, SessionHandler]: ...
    def health(self) -> m.Health: ...
    def statistics(self) -> str: ...
    def shutdown(self, grace_ms: int, peer: Peer) -> None: ...
    def observed(self, method: str, status: str, seconds: float) -> None:
        """One call ended; ``status`` is "ok" or the error's kind.  For metrics."""


class Context(Protocol):
    """pycapnp's call context; alive only during the call."""

    @property
    def params(self) -> Struct: ...
    @property
    def results(self) -> Struct: ...


Fill = Callable[[Struct, T], None]
"""Writes a handler's value into the method's result union."""


class _Methods:
    """What both capabilities share: guarded parsing, bounds, answers, accounts."""

    def __init__(self, handler: NodeHandler, connection: Connection) -> None:
        self._node = handler
        self._connection = connection

    def _answer(self, method: str, context: Context, value: T, fill: Fill[T], began: float) -> None:
        fill(context.results.init("result"), value)
        self._node.observed(method, "ok", trio.current_time() - began)

    def _refuse(self, method: str, results: Struct, exc: Exception, began: float) -> None:
        if is_unreadable(exc):
            exc = BadRequest("the message can't be read: it breaks its own structure")
        kind = convert.error_kind(exc)
        if kind == "internal":
            log.error("rpc.internal_error", exc=exc, method=method)
        convert.write_error(results.init("result").init("error"), exc)
        self._node.observed(method, kind, trio.current_time() - began)

    def _now(self, method: str, context: Context, run: Callable[[], T], fill: Fill[T]) -> Immediate:
        """Run in place, in the order in which calls arrive."""

        def body() -> None:
            began = trio.current_time()
            try:
                self._connection.begin()
                self._answer(method, context, run(), fill, began)
            except AssertionError:
                raise
            except Exception as exc:
                self._refuse(method, context.results, exc, began)

        return Immediate(body)

    def _task(
        self,
        method: str,
        context: Context,
        parse: Callable[[Struct], T],
        run: Callable[[T], Awaitable[object]],
        fill: Fill[object],
    ) -> Immediate | Call:
        """Parse in place, then run as a task of the connection."""
        connection, began = self._connection, trio.current_time()
        try:
            if not connection.begin():
                raise Overloaded(  # noqa: TRY301 - one way to answer
                    f"{connection.in_flight} calls of this connection are in flight already"
                )
            request = parse(context.params)
        except Exception as exc:
            # Bound outside the except block: a kept exception would keep its frames.
            refusal = exc.with_traceback(None)
            return Immediate(self._refuse, method, context.results, refusal, began)
        connection.in_flight += 1  # at once: tasks start later; end() takes it down
        return Call(
            connection.nursery,
            self._run,
            (run, request),
            context,
            lambda results, outcome: self._settle(method, results, outcome, fill, began),
            connection.end,
        )

    async def _run(self, run: Callable[[T], Awaitable[object]], request: T) -> object:
        try:
            return await run(request)
        except AssertionError:
            raise
        except Exception as exc:
            return exc

    def _settle(
        self, method: str, results: Struct, outcome: object, fill: Fill[object], began: float
    ) -> None:
        if isinstance(outcome, Exception):
            self._refuse(method, results, outcome, began)
            return
        fill(results.init("result"), outcome)
        self._node.observed(method, "ok", trio.current_time() - began)


def _nothing(result: Struct, value: object) -> None:
    result.ok = None


def _ok(write: Callable[[Struct, T], None]) -> Fill[T]:
    """Fill the ``ok`` struct of a result union."""
    return lambda result, value: write(result.init("ok"), value)


class SessionServer(_Methods, schema.node.Session.Server):  # type: ignore[misc]  # capnp is untyped
    """The Session capability: a small acyclic token; its end is the session's end."""

    def __init__(self, node: NodeHandler, connection: Connection, handler: SessionHandler) -> None:
        super().__init__(node, connection)
        self._handler = handler
        self._key = id(handler)
        connection.closers[self._key] = _once(handler, connection, self._key)

    def __del__(self) -> None:
        closer = self._connection.closers.get(self._key)
        if closer is not None:
            closer()

    def query_context(self, context: Context) -> Immediate:
        return self._now(
            "query",
            context,
            lambda: self._handler.query(convert.read_query_request(context.params.request)),
            convert.write_query_reply,
        )

    def release_context(self, context: Context) -> Immediate:
        return self._now(
            "release",
            context,
            lambda: self._handler.release(convert.read_leases(context.params.leases)),
            _nothing,
        )

    def renew_context(self, context: Context) -> Immediate:
        def fill(result: Struct, ttl_ms: int) -> None:
            result.ttlMillis = ttl_ms

        return self._now(
            "renew",
            context,
            lambda: self._handler.renew(LeaseToken(bytes(context.params.lease))),
            fill,
        )

    def ping_context(self, context: Context) -> Immediate:
        def body() -> None:
            self._connection.begin()
            context.results.bootId = self._handler.ping()

        return Immediate(body)

    def register_context(self, context: Context) -> Immediate | Call:
        def fill(result: Struct, missing: object) -> None:
            result.init("ok").ranksMissing = missing

        return self._task(
            "register",
            context,
            lambda params: convert.read_register_request(params.request),
            self._handler.register,
            fill,
        )

    def load_context(self, context: Context) -> Immediate | Call:
        return self._task(
            "load",
            context,
            lambda params: convert.read_load_request(params.request),
            self._handler.load,
            _ok(convert.write_loaded),  # type: ignore[arg-type]  # the handler returns Loaded
        )

    def save_context(self, context: Context) -> Immediate | Call:
        return self._task(
            "save",
            context,
            lambda params: convert.read_save_request(params.request),
            self._handler.save,
            _ok(convert.write_saved),  # type: ignore[arg-type]  # the handler returns Saved
        )

    def unregister_context(self, context: Context) -> Immediate | Call:
        return self._task(
            "unregister",
            context,
            lambda params: None,
            lambda _: self._handler.unregister(),
            _nothing,
        )


def _once(handler: SessionHandler, connection: Connection, key: int) -> Callable[[], None]:
    """Tell the handler that its session is over, the first time this is called."""

    def close() -> None:
        if connection.closers.pop(key, None) is not None:
            handler.closed()

    return close


class NodeServer(_Methods, schema.node.Node.Server):  # type: ignore[misc]  # capnp is untyped
    """The bootstrap capability of a connection."""

    def open_context(self, context: Context) -> Immediate:
        def run() -> tuple[m.Opened, SessionHandler]:
            request = convert.read_open_request(context.params.request)
            negotiate(request)
            return self._node.open(request, self._connection.peer)

        def fill(result: Struct, value: tuple[m.Opened, SessionHandler]) -> None:
            opened, handler = value
            session = SessionServer(self._node, self._connection, handler)
            convert.write_opened(result.init("ok"), opened, session)

        return self._now("open", context, run, fill)

    def health_context(self, context: Context) -> Immediate:
        def body() -> None:
            self._connection.begin()
            convert.write_health(context.results.init("health"), self._node.health())

        return Immediate(body)

    def statistics_context(self, context: Context) -> Immediate:
        def body() -> None:
            self._connection.begin()
            context.results.json = self._node.statistics()

        return Immediate(body)

    def shutdown_context(self, context: Context) -> Immediate:
        def run() -> None:
            params = context.params
            if bytes(params.bootId) != self._node.health().boot_id:
                raise BadRequest("the boot id is not this daemon's: ask for its health", "bootId")
            self._node.shutdown(int(params.graceMillis), self._connection.peer)

        return self._now("shutdown", context, run, _nothing)


def is_unreadable(exc: Exception) -> bool:
    """Whether a reader met pointers or text that can't be: the peer's doing, not a bug of ours."""
    return is_rpc_error(exc) or isinstance(exc, UnicodeDecodeError)


def negotiate(request: m.OpenRequest) -> int:
    """The highest protocol version that both ends speak, or :exc:`VersionMismatch`."""
    version = min(request.protocol_max, m.PROTOCOL_MAX)
    if version < max(request.protocol_min, m.PROTOCOL_MIN):
        raise VersionMismatch(
            f"the client speaks protocol {request.protocol_min}..{request.protocol_max}, "
            f"this daemon {m.PROTOCOL_MIN}..{m.PROTOCOL_MAX}: upgrade the older one"
        )
    return version


async def serve_node(
    loop: KjLoop,
    listeners: Sequence[socket.socket],
    handler: NodeHandler,
    limits: Limits,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the node protocol on listening sockets until cancelled."""
    await serve(
        loop,
        listeners,
        lambda connection: NodeServer(handler, connection),
        limits,
        task_status=task_status,
    )
