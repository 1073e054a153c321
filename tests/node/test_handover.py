"""Taking descriptors over a Unix-domain socket: bounded, expiring, never leaking one."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from pegaflow.client.memory import hand_over
from pegaflow.errors import BadRequest, PeerGone
from pegaflow.node.handover import FDS_MAX, PENDING_SECONDS, TOKEN_BYTES, Handover


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def serving(clock: Clock, name: str = "") -> AsyncIterator[tuple[Handover, str]]:
    shown = name or f"@pegaflow-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name or "\0" + shown[1:])
        listener.listen(8)
        handover = Handover(clock)
        with contextlib.closing(handover):
            async with trio.open_nursery() as nursery:
                await nursery.start(handover.serve, listener)
                yield handover, shown
                nursery.cancel_scope.cancel()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def give(address: str, fds: list[int]) -> bytes:
    return await trio.to_thread.run_sync(hand_over, address, fds, 5.0)


async def send_raw(address: str, data: bytes, fds: list[int]) -> bytes:
    """What a broken client might send; returns the answer, b"" for a closed connection."""

    def work() -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect("\0" + address[1:])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]
            sock.sendmsg([data], rights if fds else [])
            with contextlib.suppress(ConnectionResetError):
                return sock.recv(1)
            return b""

    return await trio.to_thread.run_sync(work)


@pytest.mark.parametrize("beside_a_path", [False, True])
async def test_descriptors_arrive_under_their_token_once(
    beside_a_path: bool, tmp_path: Path
) -> None:
    name = str(tmp_path / "x.memory") if beside_a_path else ""
    async with serving(Clock(), name) as (handover, address):
        with open(tmp_path / "a", "w+b") as one, open(tmp_path / "b", "w+b") as two:  # noqa: ASYNC230, PTH123
            token = await give(address, [one.fileno(), two.fileno()])
            taken = handover.claim(token)
            for fd, file in zip(taken, (one, two), strict=True):
                assert os.path.sameopenfile(fd, file.fileno())  # noqa: ASYNC240 - fstat does not wait
                assert fd != file.fileno()
                assert not os.get_inheritable(fd)
                os.close(fd)
            with pytest.raises(BadRequest, match="under this token"):
                handover.claim(token)


async def test_unclaimed_descriptors_are_closed_in_time() -> None:
    clock = Clock()
    async with serving(clock) as (handover, address):
        fd = os.memfd_create("x")
        before = open_descriptors()
        token = await give(address, [fd, fd, fd])
        assert open_descriptors() >= before + 3
        clock.now += PENDING_SECONDS - 1
        assert handover.expire(clock.now) == 0
        clock.now += 1
        assert handover.expire(clock.now) == 1
        await trio.testing.wait_all_tasks_blocked()
        assert open_descriptors() == before
        with pytest.raises(BadRequest):
            handover.claim(token)
        os.close(fd)


@pytest.mark.parametrize(
    ("data", "count"),
    [(b"short", 1), (b"x" * (TOKEN_BYTES + 1), 1), (b"x" * TOKEN_BYTES, 0)],
)
async def test_bad_messages_leave_no_descriptor(data: bytes, count: int) -> None:
    async with serving(Clock()) as (_, address):
        fd = os.memfd_create("x")
        before = open_descriptors()
        assert await send_raw(address, data, [fd] * count) == b""
        await trio.testing.wait_all_tasks_blocked()
        assert open_descriptors() == before
        os.close(fd)


async def test_too_many_descriptors_are_refused_and_closed() -> None:
    async with serving(Clock()) as (_, address):
        fd = os.memfd_create("x")
        before = open_descriptors()
        assert await send_raw(address, b"t" * TOKEN_BYTES, [fd] * (FDS_MAX + 1)) == b""
        await trio.testing.wait_all_tasks_blocked()
        assert open_descriptors() == before
        assert await send_raw(address, b"t" * TOKEN_BYTES, [fd] * FDS_MAX) == b"\x01"
        os.close(fd)


async def test_a_token_can_not_be_replaced() -> None:
    async with serving(Clock()) as (handover, address):
        one, two = os.memfd_create("one"), os.memfd_create("two")
        token = b"t" * TOKEN_BYTES
        assert await send_raw(address, token, [one]) == b"\x01"
        assert await send_raw(address, token, [two]) == b""
        (taken,) = handover.claim(token)
        assert os.path.sameopenfile(taken, one)  # noqa: ASYNC240 - fstat does not wait
        for fd in (one, two, taken):
            os.close(fd)


async def test_nobody_there_is_peer_gone() -> None:
    with pytest.raises(PeerGone):
        await give("@pegaflow-nobody", [0])


async def test_a_silent_client_stops_nobody() -> None:
    async with serving(Clock()) as (handover, address):
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect("\0" + address[1:])
            fd = os.memfd_create("x")
            for taken in handover.claim(await give(address, [fd])):
                os.close(taken)
            os.close(fd)
