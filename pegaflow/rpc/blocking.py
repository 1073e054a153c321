"""pycapnp for synchronous code: no event loop, no thread; each call pumps its socket until it is
done.

Two and a half times faster than a loop in another thread, and without contention for the GIL,
which is what an engine's scheduler wants.

An engine process runs its own garbage collection in whatever thread it likes, and a capnp object
that is freed outside its thread aborts the process.  So no capnp object is ever reachable from an
object that a caller holds: callers get a :class:`Wire` with a number, the objects live in a table
that only their own thread touches, and neither results nor exceptions carry any of them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import itertools
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import TypeVar

import attrs
import capnp

from pegaflow.errors import DeadlineExceeded, PeerGone, PegaflowError
from pegaflow.rpc.connections import Limits
from pegaflow.rpc.kjloop import Handle, blocking_clients

T = TypeVar("T")

READ_BUFFER_BYTES = 1 << 16
WATCH_SECONDS = 300e-6
"""How long an ``impatient`` call watches its socket before it sleeps.  A processor that has gone to
sleep takes 50 us and more to wake, on either side: that was a third of a query's round trip."""


class _Future:
    """What pycapnp's promise-to-future code needs."""

    _asyncio_future_blocking = False
    __slots__ = ("__weakref__", "callbacks", "kjpromise", "state", "value")
    PENDING, DONE, FAILED, CANCELLED = range(4)

    def __init__(self) -> None:
        self.state = self.PENDING
        self.value: object = None
        self.callbacks: list[Callable[[object], object]] = []

    def done(self) -> bool:
        return self.state != self.PENDING

    def cancelled(self) -> bool:
        return self.state == self.CANCELLED

    def _settle(self, state: int, value: object) -> None:
        if self.state == self.PENDING:
            self.state, self.value = state, value
            callbacks, self.callbacks = self.callbacks, []
            for callback in callbacks:
                callback(self)

    def set_result(self, value: object) -> None:
        self._settle(self.DONE, value)

    def set_exception(self, exc: BaseException) -> None:
        self._settle(self.FAILED, exc)

    def cancel(self, msg: object = None) -> None:
        self._settle(self.CANCELLED, None)

    def add_done_callback(
        self, callback: Callable[[object], object], *, context: object = None
    ) -> None:
        if self.done():
            callback(self)
        else:
            self.callbacks.append(callback)

    def __await__(self) -> Generator[_Future, None, object]:
        if not self.done():
            yield self
        if isinstance(self.value, BaseException):
            raise self.value
        if self.state == self.DONE:
            return self.value
        raise RuntimeError("cancelled")


class _Transport:
    """One socket, read and written only while its owner pumps."""

    def __init__(self, sock: socket.socket, protocol: object) -> None:
        self.sock, self.protocol = sock, protocol
        self._buffer = memoryview(bytearray(READ_BUFFER_BYTES))
        self._start = self._end = 0
        self.reading = self._delivering = self.closing = False
        self.out: list[bytes] = []

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
        if not self._delivering:
            self.deliver()

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        if not self.closing:
            self.out.append(data)

    def close(self) -> None:
        self.closing = True

    def flush(self, end: float) -> None:
        """Send everything; :exc:`TimeoutError` when the peer does not take it by ``end``."""
        if not self.out:
            return
        out, self.out = self.out, []
        try:
            self.sock.settimeout(max(end - time.monotonic(), 1e-4))
            self.sock.sendall(out[0] if len(out) == 1 else b"".join(out))
        except OSError:
            self.closing = True  # half a message may be out: nothing can follow it
            raise

    def receive(self, end: float, watch_until: float) -> bool:
        """Read once; False at the end of the stream; :exc:`TimeoutError` at ``end``."""
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        room = self._buffer[self._end :]
        if not room:  # full and unwanted: KJ reads on when it wants more
            return True
        got = self._watch(room, watch_until)
        if got is None:
            self.sock.settimeout(left)
            got = self.sock.recv_into(room)
        self._end += got
        if got:
            self.deliver()
        return got > 0

    def receive_now(self) -> bool:
        """Read what is there; False at the end of the stream."""
        room = self._buffer[self._end :]
        if not room:
            return True
        self.sock.settimeout(0)
        try:
            got = self.sock.recv_into(room)
        except BlockingIOError:
            return True
        self._end += got
        if got:
            self.deliver()
        return got > 0

    def _watch(self, room: memoryview, until: float) -> int | None:
        """Read without sleeping, leaving the core to whoever else wants it; None: not by then."""
        if time.monotonic() >= until:
            return None
        self.sock.settimeout(0)
        while time.monotonic() < until:
            try:
                return self.sock.recv_into(room)
            except BlockingIOError:
                os.sched_yield()
        return None

    def deliver(self) -> None:
        """Hand bytes to KJ while it wants any."""
        protocol = self.protocol
        self._delivering = True
        try:
            while self.reading and self._start < self._end and not self.closing:
                room = protocol.get_buffer(-1)  # type: ignore[attr-defined]  # pycapnp's protocol
                n = min(len(room), self._end - self._start)
                room[:n] = self._buffer[self._start : self._start + n]
                self._start += n
                if self._start == self._end:
                    self._start = self._end = 0
                protocol.buffer_updated(n)  # type: ignore[attr-defined]  # pycapnp is untyped
        finally:
            self._delivering = False


class _Loop:
    """What pycapnp takes for the running asyncio loop; one a thread, shared by connections."""

    def __init__(self) -> None:
        self.ready: collections.deque[Handle] = collections.deque()
        self.users = 0
        self.manager: object = None

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: object = None
    ) -> Handle:
        handle = Handle(callback, args)
        self.ready.append(handle)
        return handle

    def create_future(self) -> _Future:
        return _Future()

    def create_task(self, coroutine: object, **kwargs: object) -> object:
        raise RuntimeError("a blocking client serves no methods")

    def call_exception_handler(self, context: dict[str, object]) -> None:
        """Whatever pycapnp reports here also fails the call that waits."""

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    async def create_server(self, factory: object, *args: object, **kwargs: object) -> object:
        return factory

    def turn(self) -> None:
        """Run all that is ready."""
        while self.ready:
            handle = self.ready.popleft()
            if handle.fn is not None:
                handle.fn(*handle.args)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Stand in for the thread's asyncio loop, if it has one, while this lasts."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)  # type: ignore[arg-type]  # a facade
        try:
            yield
        finally:
            asyncio._set_running_loop(before)


def _now(coroutine: Coroutine[object, None, T]) -> T:
    """Run a coroutine of pycapnp that has nothing to wait for."""
    try:
        waited_for = coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError(f"pycapnp wanted to wait for {waited_for!r}")


@attrs.frozen(eq=False)
class _Begun:
    """A call that nobody waits for."""

    waiting: Generator[_Future, None, object]
    future: _Future
    read: Callable[[object], object]


@attrs.define(eq=False)
class _Connection:
    """The capnp objects of one connection.  Never leaves the thread that made it."""

    loop: _Loop
    transport: _Transport
    client: object
    stream: object
    capabilities: dict[str, object] = attrs.field(factory=dict)
    begun: dict[int, _Begun] = attrs.field(factory=dict)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.loop: _Loop | None = None
        self.connections: dict[int, _Connection] = {}
        self.orphans: collections.deque[int] = collections.deque()
        """Numbers of wires that were dropped without close(); any thread appends."""


_thread = _Thread()
_numbers = itertools.count(1)
_incref, _decref = ctypes.pythonapi.Py_IncRef, ctypes.pythonapi.Py_DecRef
for _fn in (_incref, _decref):
    _fn.argtypes, _fn.restype = [ctypes.py_object], None


def _enter() -> _Loop:
    loop = _thread.loop
    if loop is None:
        loop = _Loop()
        with loop.running():
            loop.manager = capnp.kj_loop()
            _now(loop.manager.__aenter__())  # type: ignore[attr-defined]  # pycapnp is untyped
        # If the thread, or the interpreter, ends without close(), leaking is the safe end: whoever
        # tears down thread-locals and modules is not the owning thread.
        _incref(loop)
        _thread.loop = loop
        blocking_clients.open = True
    loop.users += 1
    return loop


def _leave(loop: _Loop) -> None:
    loop.users -= 1
    if loop.users:
        return
    with loop.running():
        leaving = loop.manager.__aexit__(None, None, None)  # type: ignore[attr-defined]  # pycapnp is untyped
        with contextlib.suppress(StopIteration):
            while True:
                leaving.send(None)
                loop.turn()
    loop.manager = None
    _thread.loop = None
    blocking_clients.open = False
    _decref(loop)


class Wire:
    """A connection, as its owner sees it: a number.  Use and close it in the thread that opened it.

    Dropping the last reference elsewhere is safe: the socket is shut down, so that the peer
    notices, and the capnp objects stay until their thread opens or closes another connection.
    """

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        """Take over a connected socket."""
        self._thread_id = threading.get_ident()
        self._socket = sock
        self._number = 0
        self._orphans = _thread.orphans
        try:
            loop = _enter()
        except BaseException:
            sock.close()
            raise
        _collect_orphans()
        with loop.running():
            box: list[object] = []
            factory = _now(capnp.AsyncIoStream.create_server(box.append))
            protocol = factory()
            transport = _Transport(sock, protocol)
            protocol.connection_made(transport)
            client = capnp.TwoPartyClient(box[0], **limits.capnp)
        connection = _Connection(loop, transport, client, box.pop())
        _incref(connection)
        self._number = next(_numbers)
        _thread.connections[self._number] = connection

    @property
    def open(self) -> bool:
        """Not closed by us; the peer may be gone all the same."""
        return self._number in _thread.connections

    def bootstrap(self, interface: object, name: str) -> None:
        """Keep the peer's main capability under ``name``."""
        connection = self._connection()
        with connection.loop.running():
            capability = connection.client.bootstrap()  # type: ignore[attr-defined]  # pycapnp is untyped
            connection.capabilities[name] = capability.cast_as(interface)

    def call(
        self,
        capability: str,
        start: Callable[[object], object],
        read: Callable[[object], T],
        end: float,
        *,
        keep: tuple[str, Callable[[object], object]] | None = None,
        impatient: bool = False,
    ) -> T:
        """Start a call, pump until it is answered, read plain values out of the answer.

        ``keep`` is a name and how to get a capability out of the answer, to be kept under it.
        ``impatient``: somebody waits, and the answer comes at once; see ``WATCH_SECONDS``.
        ``end`` is in ``time.monotonic()`` seconds.  After :exc:`DeadlineExceeded` the call is
        dropped and the connection stays usable, unless part of a message is unsent; after
        :exc:`PeerGone` it is of no use.  Whatever ``read`` raises of our own error tree is passed
        on.
        """
        watch_s = WATCH_SECONDS if impatient else 0.0
        return self._guarded(
            lambda connection: _exchange(connection, capability, start, read, end, keep, watch_s)
        )

    def begin(
        self,
        capability: str,
        start: Callable[[object], object],
        read: Callable[[object], object],
        end: float,
    ) -> int:
        """Send a call and return its number, for :meth:`poll`; ``end`` is for the sending alone.

        For a thread that has other work and Python's lock: handing the call to another thread
        costs that lock several times, 5 ms each when this one computes.  Raises as :meth:`call`.
        """
        return self._guarded(lambda connection: _begin(connection, capability, start, read, end))

    def poll(self, number: int) -> tuple[object] | None:
        """What was read out of a call's answer, once; None while there is none.  Never waits.

        Raises as :meth:`call`; the call is over then.
        """
        return self._guarded(lambda connection: _poll(connection, number))

    def abandon(self, number: int) -> None:
        """Wait for it no longer: the peer sees a cancelled call."""
        connection = _thread.connections.get(self._number)
        if connection is not None and number in connection.begun:
            with connection.loop.running():
                _abandon(connection, number)

    def _guarded(self, work: Callable[[_Connection], T]) -> T:
        """Run it as the thread's loop, and turn what it raises into our own error tree."""
        connection = self._connection()
        outcome: T | PegaflowError
        try:
            with connection.loop.running():
                outcome = work(connection)
        except PegaflowError as exc:
            outcome = exc.with_traceback(None)
            outcome.__context__ = None  # its frames hold capnp objects too
        except TimeoutError:
            outcome = DeadlineExceeded("no answer within the deadline")
        except (OSError, capnp.KjException) as exc:
            outcome = PeerGone(f"the connection broke: {_describe(exc)}")
        except Exception as exc:
            outcome = PeerGone(f"the peer's answer can't be read: {type(exc).__name__}")
        if isinstance(outcome, PegaflowError):
            if isinstance(outcome, PeerGone):
                connection.transport.closing = True
            del connection  # this frame goes with the exception wherever the caller takes it
            raise outcome
        return outcome

    def _connection(self) -> _Connection:
        connection = _thread.connections.get(self._number)
        if connection is None:
            if threading.get_ident() != self._thread_id:
                raise RuntimeError("a blocking connection belongs to the thread that opened it")
            raise PeerGone("this connection is closed")
        if connection.transport.closing:
            raise PeerGone("the peer has closed the connection")
        return connection

    def close(self) -> None:
        """Drop every capability and the socket.  May be repeated."""
        if self._number in _thread.connections:
            _close(self._number)
            self._number = 0
        _collect_orphans()

    def __del__(self) -> None:
        if not self._number:  # closed, or never opened
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._orphans.append(self._number)


def _collect_orphans() -> None:
    """Close what was dropped without close() and belongs to this thread."""
    while _thread.orphans:
        _close(_thread.orphans.popleft())


def _close(number: int) -> None:
    connection = _thread.connections.pop(number, None)
    if connection is None:
        return
    loop, transport = connection.loop, connection.transport
    with loop.running():
        for begun in list(connection.begun):
            _abandon(connection, begun)
        connection.capabilities.clear()
        connection.client.close()  # type: ignore[attr-defined]  # pycapnp is untyped
        with contextlib.suppress(OSError, capnp.KjException):
            loop.turn()
            transport.flush(time.monotonic() + 0.05)
        connection.stream.close()  # type: ignore[attr-defined]  # pycapnp is untyped
        loop.turn()
        connection.client = connection.stream = None
        transport.protocol = None
    transport.sock.close()
    _decref(connection)
    del connection
    _leave(loop)


def _exchange(
    connection: _Connection,
    capability: str,
    start: Callable[[object], object],
    read: Callable[[object], T],
    end: float,
    keep: tuple[str, Callable[[object], object]] | None,
    watch_s: float,
) -> T:
    """One call, start to end.  All capnp objects of it are locals of this frame and die with it."""
    awaitable = start(connection.capabilities[capability])
    assert isinstance(awaitable, Awaitable) or hasattr(awaitable, "__await__")
    waiting = awaitable.__await__()
    answer: object = None
    try:
        future = next(waiting)
    except StopIteration as stop:
        answer = stop.value
    else:
        _pump(connection, future, end, time.monotonic() + watch_s)
        try:
            next(waiting)
        except StopIteration as stop:
            answer = stop.value
    value = read(answer)
    if keep is not None:
        connection.capabilities[keep[0]] = keep[1](answer)
    return value


def _begin(
    connection: _Connection,
    capability: str,
    start: Callable[[object], object],
    read: Callable[[object], object],
    end: float,
) -> int:
    """Send a call; its capnp objects stay in the connection's table."""
    awaitable = start(connection.capabilities[capability])
    assert isinstance(awaitable, Awaitable) or hasattr(awaitable, "__await__")
    waiting = awaitable.__await__()
    future = next(waiting)
    number = next(_numbers)
    connection.begun[number] = _Begun(waiting, future, read)
    try:
        connection.loop.turn()
        connection.transport.flush(end)
    except BaseException:
        _abandon(connection, number)
        raise
    return number


def _poll(connection: _Connection, number: int) -> tuple[object] | None:
    """Turn KJ and read what is there; the answer of one call, if it has come."""
    loop, transport, begun = connection.loop, connection.transport, connection.begun[number]
    if not begun.future.done():
        if not transport.receive_now():
            transport.closing = True
            if transport.reading:
                transport.protocol.eof_received()  # type: ignore[attr-defined]  # pycapnp is untyped
        loop.turn()
        transport.flush(time.monotonic() + 0.001)
    if not begun.future.done() and not transport.closing:
        return None
    del connection.begun[number]
    if not begun.future.done() or begun.future.cancelled():
        begun.future.cancel()
        loop.turn()
        raise ConnectionError("the peer closed the connection")
    try:
        next(begun.waiting)
    except StopIteration as stop:
        return (begun.read(stop.value),)
    raise RuntimeError("pycapnp wanted to wait for more")


def _abandon(connection: _Connection, number: int) -> None:
    connection.begun.pop(number).future.cancel()
    with contextlib.suppress(OSError, capnp.KjException):
        connection.loop.turn()
        connection.transport.flush(time.monotonic() + 0.001)


def _pump(connection: _Connection, future: _Future, end: float, watch_until: float) -> None:
    """Turn KJ and the socket until the future is settled."""
    loop, transport = connection.loop, connection.transport
    try:
        loop.turn()
        transport.flush(end)
        while not future.done():
            if not transport.receive(end, watch_until):
                transport.closing = True
                if transport.reading:
                    transport.protocol.eof_received()  # type: ignore[attr-defined]  # pycapnp is untyped
                loop.turn()
                break
            loop.turn()
            transport.flush(end)
    finally:
        if not future.done():
            future.cancel()  # drops the promise: the peer sees a cancelled call
            loop.turn()
            with contextlib.suppress(OSError):
                transport.flush(time.monotonic() + 0.001)
    if future.cancelled():
        raise ConnectionError("the peer closed the connection")


def _describe(exc: BaseException) -> str:
    """A short text without capnp's stack addresses."""
    text = str(getattr(exc, "description", None) or exc)
    return (text.strip().splitlines() or [type(exc).__name__])[0][:200]
