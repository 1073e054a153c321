"""pycapnp's KJ event loop driven by Trio: no asyncio loop in the process.

pycapnp asks little of "the asyncio loop".  It looks it up with ``asyncio.get_running_loop()``,
keeps its KJ loop in an attribute of it, and calls ``call_soon``, ``create_future``,
``create_task``, ``create_server``, ``create_connection`` and ``call_exception_handler``.
:class:`KjLoop` offers exactly that, so that

* KJ turns run inline, in whichever Trio task made KJ runnable;
* futures that pycapnp returns are awaitable from Trio, and cancelling the Trio scope drops the KJ
  promise, which sends Finish to the peer;
* server methods run in place (:class:`Immediate`) or as Trio tasks of their connection
(:class:`Call`).

Hazards that shape this file (each is tested in tests/rpc/test_hazards.py): a ``_CallContext``
dangles once its call is over; a capnp object released outside the loop's thread aborts the
process, also when Python's cyclic collector does it; an exception's text reaches the peer.
"""

from __future__ import annotations

import asyncio
import collections
import collections.abc
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Protocol

import capnp
import trio

from pegaflow.observe import log

if TYPE_CHECKING:
    from pegaflow.rpc.transport import Transport

WIRE_TEXT_MAX = 2000
blocking_clients = threading.local()
"""``open`` is true in a thread whose blocking clients have a KJ loop: see rpc/blocking.py."""
READ_BUFFER_BYTES = 256 * 1024


class WireError(Exception):
    """The only exception whose text a peer sees."""


def wire_error(exc: object) -> WireError:
    """What may be told to a peer: no traceback, no cause, text that always encodes and fits.

    pycapnp sends ``traceback.format_exception`` of what a method raised; a text longer than the
    connection's own limit aborts the process, a lone surrogate leaves the call unanswered for ever.
    """
    text = str(exc) if isinstance(exc, WireError) else "internal error"
    clean = text.encode("utf-8", "backslashreplace").decode().replace("\0", "?")
    return WireError(clean[:WIRE_TEXT_MAX])


class Handle:
    """What ``call_soon`` returns: one callback that may be cancelled before it runs."""

    __slots__ = ("args", "fn")

    def __init__(self, fn: Callable[..., object], args: tuple[object, ...]) -> None:
        self.fn: Callable[..., object] | None = fn
        self.args = args

    def cancel(self) -> None:
        """Never run it."""
        self.fn = None


class _Pending:
    """The part that futures and tasks share: a state, a value, callbacks."""

    _asyncio_future_blocking = False
    __slots__ = ("_callbacks", "_loop", "_state", "_value")

    PENDING, DONE, FAILED, CANCELLED = range(4)

    def __init__(self, loop: KjLoop) -> None:
        self._loop = loop
        self._state = self.PENDING
        self._value: object = None
        self._callbacks: list[Callable[[object], object]] = []

    def get_loop(self) -> KjLoop:
        return self._loop

    def done(self) -> bool:
        return self._state != self.PENDING

    def cancelled(self) -> bool:
        return self._state == self.CANCELLED

    def _settle(self, state: int, value: object) -> bool:
        if self._state != self.PENDING:
            return False
        self._state, self._value = state, value
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
        return True


class Future(_Pending):
    """What pycapnp's promise-to-future code needs; awaitable by one Trio task."""

    __slots__ = ("__weakref__", "_task", "kjpromise")

    def __init__(self, loop: KjLoop) -> None:
        super().__init__(loop)
        self._task: trio.lowlevel.Task | None = None

    def _settle(self, state: int, value: object) -> bool:
        settled = super()._settle(state, value)
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)
        return settled

    def set_result(self, value: object) -> None:
        self._settle(self.DONE, value)

    def set_exception(self, exc: BaseException) -> None:
        self._settle(self.FAILED, exc)

    def cancel(self, msg: object = None) -> bool:
        return self._settle(self.CANCELLED, None)

    def add_done_callback(
        self, callback: Callable[[object], object], *, context: object = None
    ) -> None:
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def exception(self) -> BaseException | None:
        return self._value if isinstance(self._value, BaseException) else None

    def result(self) -> object:
        if self._state == self.DONE:
            return self._value
        if isinstance(self._value, BaseException):
            raise self._value
        raise RuntimeError("future is cancelled or not done")

    def __await__(self) -> Generator[object, None, object]:
        if not self.done():
            self._loop.drain()
        if not self.done():
            if self._task is not None:
                raise RuntimeError("a pycapnp future may be awaited by one task only")

            def abort(_: object) -> trio.lowlevel.Abort:
                self._task = None
                self.cancel()  # destroys the KJ promise: Finish goes to the peer
                self._loop.kick()
                return trio.lowlevel.Abort.SUCCEEDED

            self._task = trio.lowlevel.current_task()
            yield from trio.lowlevel.wait_task_rescheduled(abort).__await__()  # noqa: ASYNC105  # awaited by hand
        return self.result()

    __iter__ = __await__


class Call(Coroutine[object, object, object]):
    """Returned by a server method instead of a coroutine: run ``fn(*args)`` as a Trio task.

    ``args`` were parsed out of the call's context before this object is made; ``fn`` never sees the
    context, and ``fill(results, value)`` runs only while the call is still alive.
    """

    __slots__ = ("args", "context", "ended", "fill", "fn", "nursery")

    def __init__(
        self,
        nursery: trio.Nursery,
        fn: Callable[..., Awaitable[object]],
        args: tuple[object, ...],
        context: _CallContext,
        fill: Callable[..., None],
        ended: Callable[[], None],
    ) -> None:
        """``ended`` is called exactly once, also when the call is over before ``fn`` began."""
        self.nursery, self.fn, self.args = nursery, fn, args
        self.context, self.fill, self.ended = context, fill, ended

    # asyncio.iscoroutine() accepts any collections.abc.Coroutine; nobody runs these.
    def send(self, value: object) -> object:
        raise RuntimeError

    def throw(self, *args: object) -> object:
        raise RuntimeError

    def close(self) -> None:
        pass

    def __await__(self) -> Generator[object, object, object]:
        raise RuntimeError


class Immediate(Call):
    """A handler that never waits: run in place, in the KJ turn, without a task."""

    __slots__ = ()

    def __init__(self, fn: Callable[..., object], *args: object) -> None:
        self.fn, self.args = fn, args  # type: ignore[assignment]  # a plain function here


class _CallContext(Protocol):
    @property
    def results(self) -> object: ...


class Task(_Pending):
    """What pycapnp's task-to-promise adapter needs, over a Trio task."""

    __slots__ = ("__weakref__", "_context_dead", "_fulfiller", "_scope")

    def __init__(self, loop: KjLoop) -> None:
        super().__init__(loop)
        self._scope: trio.CancelScope | None = None
        self._fulfiller: object = None  # pycapnp sets it
        self._context_dead = False

    def add_done_callback(
        self, callback: Callable[[object], object], *, context: object = None
    ) -> None:
        if not self.done():
            self._callbacks.append(callback)
        elif self._fulfiller is None:  # an Immediate: pycapnp's own callback, in place
            callback(self)
        else:
            self._loop.call_soon(callback, self)

    def cancel(self, msg: object = None) -> bool:
        """pycapnp calls this whenever the call's promise is destroyed: the context dangles now."""
        self._context_dead = True
        if not self.done() and self._scope is not None:
            self._scope.cancel()
        return False

    def exception(self) -> BaseException | None:
        return wire_error(self._value) if self._state == self.FAILED else None

    def result(self) -> object:
        if isinstance(self._value, BaseException):
            raise self._value
        return None

    def run_in_place(self, call: Immediate) -> None:
        try:
            call.fn(*call.args)
        except Exception as exc:
            self._loop.report(exc)
            self._state, self._value = self.FAILED, exc.with_traceback(None)
        else:
            self._state = self.DONE

    def _end(self, state: int, value: object) -> None:
        if self._settle(state, value):
            self._loop.drain()

    async def run(self, call: Call) -> None:
        try:
            await self._run(call)
        finally:
            call.ended()

    async def _run(self, call: Call) -> None:
        if self._context_dead:  # cancelled before it began
            self._state = self.CANCELLED
            return
        assert self._scope is not None
        try:
            with self._scope:
                value = await call.fn(*call.args)
                if not self._context_dead:
                    call.fill(call.context.results, value)
        except Exception as exc:
            self._loop.report(exc)
            self._end(self.FAILED, exc.with_traceback(None))
        except BaseException:
            # Cancelled from outside: the connection goes away, and its server is closed before the
            # driver runs this, so the peer sees DISCONNECTED and no failed call.
            self._loop.call_soon(self._end, self.CANCELLED, None)
            raise
        else:
            self._end(self.CANCELLED if self._scope.cancelled_caught else self.DONE, None)

    async def run_coroutine(self, coroutine: Awaitable[object]) -> None:
        """A coroutine of pycapnp's own; none of ours takes this way."""
        assert self._scope is not None
        try:
            with self._scope:
                await coroutine
        except Exception as exc:
            self._end(self.FAILED, exc.with_traceback(None))
        else:
            self._end(self.CANCELLED if self._scope.cancelled_caught else self.DONE, None)


class KjLoop:
    """The object that pycapnp takes for the running asyncio loop."""

    def __init__(self) -> None:
        self._ready: collections.deque[Handle] = collections.deque()
        self._draining = False
        self.will_drain = False
        """Whoever set it drains next: waking the driver would only cost a turn of Trio."""
        self._parked: trio.lowlevel.Task | None = None  # the driver
        self.dirty: list[Transport] = []  # transports with bytes to flush after this turn
        self.nursery: trio.Nursery | None = None
        # One read buffer for all connections: KJ takes its bytes at once.
        self.scratch = memoryview(bytearray(READ_BUFFER_BYTES))

    # -- what pycapnp calls ---------------------------------------------------------------------
    def call_soon(
        self, callback: Callable[..., object], *args: object, context: object = None
    ) -> Handle:
        handle = Handle(callback, args)
        self._ready.append(handle)
        if not self._draining:
            self.kick()
        return handle

    def create_future(self) -> Future:
        return Future(self)

    def create_task(
        self, coroutine: Awaitable[object], *, name: object = None, context: object = None
    ) -> Task:
        task = Task(self)
        if isinstance(coroutine, Immediate):
            task.run_in_place(coroutine)
            return task
        task._scope = trio.CancelScope()
        try:
            if isinstance(coroutine, Call):
                coroutine.nursery.start_soon(task.run, coroutine)
            else:
                assert self.nursery is not None
                self.nursery.start_soon(task.run_coroutine, coroutine)
        except RuntimeError:  # "nursery is closed to new arrivals"
            task._state = Task.CANCELLED
            if isinstance(coroutine, Call):
                coroutine.ended()
        return task

    def call_exception_handler(self, context: dict[str, object]) -> None:
        log.warning("rpc.loop_exception", message=str(context.get("message"))[:WIRE_TEXT_MAX])

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def time(self) -> float:
        return trio.current_time()

    async def create_server(self, factory: object, *args: object, **kwargs: object) -> object:
        """No listening by pycapnp: it gets its protocol factory back and we accept."""
        return factory

    create_unix_server = create_server

    # -- turning ----------------------------------------------------------------------------------
    def report(self, exc: Exception) -> None:
        """A handler of ours raised what it should have turned into an answer.

        A broken invariant ends the process; it can't be raised through KJ's frames, so a task of
        the loop's nursery raises it.
        """
        log.error("rpc.handler_raised", error=repr(exc)[:WIRE_TEXT_MAX])
        if isinstance(exc, AssertionError) and self.nursery is not None:
            self.nursery.start_soon(_raise, exc)

    def kick(self) -> None:
        """Wake the driver task, if it sleeps and nobody else drains next."""
        if self.will_drain:
            return
        task, self._parked = self._parked, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def drain(self) -> None:
        """Run all that KJ has ready, then flush the transports.  Not re-entered."""
        if self._draining:
            return
        self._draining = True
        try:
            while self._ready or self.dirty:
                while self._ready:
                    handle = self._ready.popleft()
                    if handle.fn is not None:
                        handle.fn(*handle.args)
                dirty, self.dirty = self.dirty, []
                for transport in dirty:
                    transport.flush()
        finally:
            self._draining = False

    @property
    def draining(self) -> bool:
        """A KJ turn is running: what it made ready is flushed when it ends."""
        return self._draining

    async def drive(self) -> None:
        """The task that turns KJ when nobody else does."""

        def abort(_: object) -> trio.lowlevel.Abort:
            self._parked = None
            return trio.lowlevel.Abort.SUCCEEDED

        while True:
            self.drain()
            if self._ready:
                await trio.lowlevel.checkpoint()
                continue
            self._parked = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(abort)


async def _raise(exc: Exception) -> None:
    raise exc


async def _drive_asyncio_style(coroutine: Coroutine[Future | None, None, object]) -> None:
    """Run a coroutine of pycapnp that awaits asyncio-flavoured futures: entering, leaving KJ."""
    try:
        future = coroutine.send(None)
        while True:
            if future is None:
                await trio.lowlevel.checkpoint()
            else:
                settled = trio.Event()
                future.add_done_callback(lambda _, event=settled: event.set())  # type: ignore[misc]  # a default argument binds it
                await settled.wait()
            future = coroutine.send(None)
    except StopIteration:
        pass


@contextlib.asynccontextmanager
async def open_kj_loop() -> AsyncIterator[KjLoop]:
    """Run KJ in this Trio thread while the block lasts; one at a time in a thread.

    All capnp objects of the thread must be gone when the block ends.
    """
    if asyncio._get_running_loop() is not None or getattr(blocking_clients, "open", False):
        # A second KJ loop in one thread aborts the process.
        raise RuntimeError("an event loop, or an open blocking client, is in this thread already")
    loop = KjLoop()
    asyncio._set_running_loop(loop)  # type: ignore[arg-type]  # a facade, not a real loop
    try:
        async with trio.open_nursery() as driver:
            driver.start_soon(loop.drive)
            manager = capnp.kj_loop()
            await _drive_asyncio_style(manager.__aenter__())
            try:
                async with trio.open_nursery() as work:
                    loop.nursery = work
                    yield loop
                    work.cancel_scope.cancel()
            finally:
                loop.nursery = None
                # Every handler has ended, so leaving KJ has nothing to wait for.
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                    await _drive_asyncio_style(manager.__aexit__(None, None, None))
                    loop.drain()
                driver.cancel_scope.cancel()
    finally:
        asyncio._set_running_loop(None)
