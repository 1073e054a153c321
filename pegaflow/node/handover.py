"""Takes file descriptors of engine memory over a Unix-domain socket (SCM_RIGHTS).

Possession of the descriptor is the proof of access: a number and a process id would let any local
user have another process's files copied.  A message is a 16-byte token plus the descriptors,
answered by one byte; a registration names the token.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Callable

import attrs
import trio

from pegaflow.errors import BadRequest
from pegaflow.observe import log

TOKEN_BYTES = 16
FDS_MAX = 64
ACCEPTED = b"\x01"
PENDING_MAX = 1024
PENDING_SECONDS = 10.0
RECEIVE_SECONDS = 5.0


@attrs.define(eq=False)
class Handover:
    """Descriptors that arrived and were not claimed yet; bounded in number and time."""

    clock: Callable[[], float]
    _pending: dict[bytes, tuple[float, list[int]]] = attrs.field(factory=dict)

    def claim(self, token: bytes) -> list[int]:
        """The descriptors of a token, once; the caller closes them."""
        found = self._pending.pop(token, None)
        if found is None:
            raise BadRequest(
                "no memory was handed over under this token, or it came over "
                f"{PENDING_SECONDS:g} s ago",
                "regions.token",
            )
        return found[1]

    def expire(self, now: float) -> int:
        """Close what nobody claimed in time; returns how many messages that were."""
        old = [token for token, (due, _) in self._pending.items() if due <= now]
        for token in old:
            _close_all(self._pending.pop(token)[1])
        return len(old)

    def close(self) -> None:
        """Close everything."""
        self.expire(float("inf"))

    async def serve(
        self,
        listener: socket.socket,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept until cancelled.  The listener stays the caller's."""
        listener.setblocking(False)
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                try:
                    sock, _ = listener.accept()
                except BlockingIOError:
                    await trio.lowlevel.wait_readable(listener)
                    continue
                except OSError as exc:
                    log.warning("handover.accept_failed", error=exc.strerror)
                    await trio.sleep(0.1)
                    continue
                nursery.start_soon(self._one, sock)

    async def _one(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with sock, trio.move_on_after(RECEIVE_SECONDS):
            await trio.lowlevel.wait_readable(sock)
            with contextlib.suppress(OSError):
                if self._take(sock):
                    sock.send(ACCEPTED)

    def _take(self, sock: socket.socket) -> bool:
        """Receive one message.  Descriptors of a bad one are closed."""
        size = array.array("i").itemsize
        token, ancillary, flags, _ = sock.recvmsg(
            TOKEN_BYTES + 1, socket.CMSG_LEN(FDS_MAX * size), socket.MSG_CMSG_CLOEXEC
        )
        fds = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % size])
        taken = list(fds)
        bad = (
            len(token) != TOKEN_BYTES
            or not taken
            or flags & socket.MSG_CTRUNC
            or token in self._pending
            or len(self._pending) >= PENDING_MAX
        )
        if bad:
            _close_all(taken)
            return False
        self._pending[token] = (self.clock() + PENDING_SECONDS, taken)
        return True


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
