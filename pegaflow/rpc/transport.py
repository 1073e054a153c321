"""A non-blocking socket under Trio, as pycapnp's stream protocol wants its transport."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Protocol

import trio

from pegaflow.rpc.kjloop import KjLoop

WRITE_HIGH_BYTES = 1 << 20
WRITE_LOW_BYTES = 1 << 18
DIRECT_READ_BYTES = 65536
"""A buffer of KJ's this large is the rest of a big message: read straight into it."""


class StreamProtocol(Protocol):
    """What we call of pycapnp's ``_PyAsyncIoStreamProtocol`` (pinned by a contract test)."""

    def connection_made(self, transport: Transport) -> None: ...
    def connection_lost(self, exc: BaseException | None) -> None: ...
    def get_buffer(self, size_hint: int) -> memoryview: ...
    def buffer_updated(self, size: int) -> None: ...
    def eof_received(self) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class Transport:
    """Owns one socket: reads ahead into one buffer, coalesces writes, one send a KJ turn.

    ``gate`` (servers): read no further requests while the peer does not read our replies, so that
    it can't grow us.  A client must always read, or two full pipes would wait for each other.
    """

    def __init__(
        self, loop: KjLoop, sock: socket.socket, protocol: StreamProtocol, *, gate: bool = False
    ) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop, self._sock, self._gate = loop, sock, gate
        self._protocol: StreamProtocol | None = protocol
        self._left = b""  # read, but not wanted by KJ yet (rare)
        self._reading = False
        self._delivering = False
        self._closing = False
        self._lost = False
        self._error: OSError | None = None
        self._want_eof = False
        self._out: list[bytes | memoryview] = []
        self._out_bytes = 0
        self._writing_paused = False
        self._room: trio.lowlevel.Task | None = None  # the reader, parked until KJ wants more
        self._writer: trio.lowlevel.Task | None = None  # the writer, parked until a send came short
        self._blocked = False  # a send came short
        self._scope = trio.CancelScope()

    # -- called by pycapnp, inside a KJ turn ----------------------------------------------------
    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        if self._left and not self._delivering:
            left, self._left = self._left, b""
            self._deliver(memoryview(left))
        if self._reading:
            self._wake_reader()

    def is_reading(self) -> bool:
        return self._reading

    def is_closing(self) -> bool:
        return self._closing

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._sock if name == "socket" else default

    def can_write_eof(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        if self._closing:
            return
        if not self._out and not self._blocked:
            self._loop.dirty.append(self)
            if not self._loop.draining:
                self._loop.kick()
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes > WRITE_HIGH_BYTES and not self._writing_paused and self._protocol:
            self._writing_paused = True
            self._protocol.pause_writing()

    def write_eof(self) -> None:
        self._want_eof = True
        if not self._out:
            self._shutdown()

    def close(self) -> None:
        if not self._closing:
            self.flush()
            self._closing = True
            self._scope.cancel()

    # -- inside -----------------------------------------------------------------------------------
    def _shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _wake_reader(self) -> None:
        task, self._room = self._room, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def _deliver(self, data: memoryview) -> None:
        """Hand bytes to the protocol while it wants any; keep a copy of the rest."""
        protocol, done, size = self._protocol, 0, len(data)
        assert protocol is not None
        self._delivering = True
        try:
            while done < size and self._reading and not self._closing:
                room = protocol.get_buffer(-1)
                n = min(len(room), size - done)
                room[:n] = data[done : done + n]
                done += n
                protocol.buffer_updated(n)
        finally:
            self._delivering = False
        if done < size:
            self._left = bytes(data[done:]) + self._left

    def flush(self) -> None:
        """Send what waits, as far as the kernel takes it.  Never blocks."""
        if self._blocked or not self._out or self._lost:
            return
        out, self._out = self._out, []
        data = out[0] if len(out) == 1 else b"".join(out)
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as exc:
            self._fail(exc)
            return
        self._out_bytes -= sent
        if sent < len(data):
            self._out.insert(0, memoryview(data)[sent:])
            self._blocked = True
            task, self._writer = self._writer, None
            if task is not None:
                trio.lowlevel.reschedule(task)
            return
        if self._want_eof:
            self._shutdown()
        if self._writing_paused and self._out_bytes <= WRITE_LOW_BYTES and not self._closing:
            self._writing_paused = False
            if self._protocol is not None:
                self._protocol.resume_writing()
            self._wake_reader()

    def _fail(self, exc: OSError) -> None:
        self._error = exc.with_traceback(None)  # its frames hold our data
        self._closing = True
        self._out, self._out_bytes = [], 0
        self._scope.cancel()

    async def run(self) -> None:
        """Read, write what did not fit, and say ``connection_lost`` exactly once."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_loop)
                    await self._read_loop()
                    nursery.cancel_scope.cancel()
        finally:
            self._closing = True
            if not self._lost:
                self._lost = True
                assert self._protocol is not None
                self._protocol.connection_lost(self._error)
            self._sock.close()
            self._loop.drain()
            self._out, self._left, self._protocol = [], b"", None  # no cycles with big buffers

    async def _read_loop(self) -> None:
        turns = 0
        while not self._closing:
            if not self._reading or self._left or (self._gate and self._writing_paused):
                await self._wait_for_room()
                continue
            assert self._protocol is not None
            room = self._protocol.get_buffer(-1)
            direct = len(room) >= DIRECT_READ_BYTES
            try:
                got = self._sock.recv_into(room if direct else self._loop.scratch)
            except BlockingIOError:
                turns = 0
                await trio.lowlevel.wait_readable(self._sock)
                continue
            except OSError as exc:
                self._error = exc.with_traceback(None)
                return
            if not got:
                self._end_of_stream()
                return
            self._loop.will_drain = True
            try:
                if direct:
                    self._protocol.buffer_updated(got)
                else:
                    self._deliver(self._loop.scratch[:got])
            finally:
                self._loop.will_drain = False
            self._loop.drain()
            if direct and got == len(room) and turns < 16:
                turns += 1  # more of one big message
                continue
            turns = 0
            # Let the handlers of this batch run before the next one is parsed: without this
            # the throughput at 256 calls in flight halves.
            if got < DIRECT_READ_BYTES // 2:
                await trio.lowlevel.wait_readable(self._sock)
            else:
                await trio.lowlevel.checkpoint()

    def _end_of_stream(self) -> None:
        # `closing` is set before the protocol hears of EOF: pycapnp dereferences a null
        # fulfiller when KJ starts a read after EOF, so such a read must be refused.
        self._closing = True
        if self._reading and self._protocol is not None:
            self._protocol.eof_received()
        self._loop.drain()

    async def _wait_for_room(self) -> None:
        """Park the reader: KJ, or the gate, wants nothing now."""

        def abort(_: object) -> trio.lowlevel.Abort:
            self._room = None
            return trio.lowlevel.Abort.SUCCEEDED

        self._room = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _write_loop(self) -> None:
        def abort(_: object) -> trio.lowlevel.Abort:
            self._writer = None
            return trio.lowlevel.Abort.SUCCEEDED

        while True:
            if not self._blocked:
                self._writer = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(abort)
                continue
            await trio.lowlevel.wait_writable(self._sock)
            self._blocked = False
            self.flush()
            self._loop.drain()


Factory = Callable[[], StreamProtocol]
