"""What one peer may cost: each bound is met and answered, and the others are served on."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from pathlib import Path

import capnp
import pytest
import trio
from fake_node import BOOT_ID, MANIFEST, FakeNode, FakeSession, open_blocking, serving, until

from pegaflow import errors
from pegaflow.client.blocking import BlockingNode
from pegaflow.client.session import open_session
from pegaflow.model import messages as m
from pegaflow.model.keys import BlockHash, InstanceId, Namespace
from pegaflow.rpc import schema
from pegaflow.rpc.connections import Limits


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 5)


def is_closed(sock: socket.socket) -> bool:
    sock.settimeout(0.01)
    with contextlib.suppress(TimeoutError):
        return sock.recv(1) == b""
    return False


async def test_a_peer_that_asks_nothing_is_closed_also_when_it_dribbles() -> None:
    async with serving(FakeNode(), Limits(first_message_seconds=0.3)) as (address, _):
        with connect(address) as silent, connect(address) as dribbling:
            for _ in range(8):
                with contextlib.suppress(OSError):
                    dribbling.send(b"\0")
                await trio.sleep(0.1)
            assert is_closed(silent)
            assert is_closed(dribbling)


async def test_a_silent_session_is_closed_and_a_busy_or_pinging_one_is_not() -> None:
    def slow(session: FakeSession) -> None:
        session.seconds = 1.0

    node = FakeNode(prepare=slow)
    options = {"instance": InstanceId("i"), "namespace": Namespace("n"), "manifest": MANIFEST}
    async with serving(node, Limits(idle_seconds=0.4)) as (address, loop), trio.open_nursery() as n:

        async def silent() -> None:
            async with open_session(loop, address, **options, world_size=1, timeout_s=5):
                await trio.sleep(0.9)

        async def busy() -> None:
            async with open_session(loop, address, **options, world_size=1, timeout_s=5) as s:
                await s.save(m.SaveRequest(0, (), 0), 5)
                for _ in range(6):
                    await trio.sleep(0.2)
                    assert await s.ping(5) == BOOT_ID

        n.start_soon(silent)
        await until(lambda: len(node.sessions) == 1)
        n.start_soon(busy)
        await until(lambda: len(node.sessions) == 2)
        await until(lambda: node.sessions[0].closed_times == 1)
        assert node.sessions[1].closed_times == 0


async def test_calls_beyond_the_bound_are_refused_and_the_connection_lives() -> None:
    def slow(session: FakeSession) -> None:
        session.seconds = 0.5

    node = FakeNode(prepare=slow)
    async with (
        serving(node, Limits(calls_in_flight=4)) as (address, loop),
        open_session(
            loop, address, instance=InstanceId("i"), namespace=Namespace("n"), manifest=MANIFEST,
            world_size=1, timeout_s=5,
        ) as session,
    ):  # fmt: skip
        outcomes: list[str] = []

        async def save() -> None:
            try:
                await session.save(m.SaveRequest(0, (), 0), 5)
                outcomes.append("ok")
            except errors.Overloaded:
                outcomes.append("overloaded")

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(save)
        assert sorted(outcomes) == ["ok"] * 4 + ["overloaded"] * 6
        assert (await session.save(m.SaveRequest(0, (), 0), 5)).stored == 1


async def test_connections_beyond_the_bound_are_closed_at_once() -> None:
    async with serving(FakeNode(), Limits(connections=2)) as (address, _):
        with connect(address) as one, connect(address) as two:
            await trio.sleep(0.1)
            with connect(address) as three:
                await trio.sleep(0.1)
                assert is_closed(three)
            assert not is_closed(one)
            assert not is_closed(two)
        await trio.sleep(0.1)

        def client() -> bytes:
            with BlockingNode(address, 5) as node:
                return node.health(5).boot_id

        assert await trio.to_thread.run_sync(client) == BOOT_ID


async def test_a_message_beyond_the_bound_ends_its_connection_alone() -> None:
    node = FakeNode()

    def client(address: str) -> None:
        hashes = [BlockHash(bytes(32))] * 4000
        with open_blocking(address) as s, open_blocking(address) as other:
            with pytest.raises(errors.PeerGone):
                s.query(m.QueryRequest(0, hashes, b"", "r"), 5)
            assert other.ping(5) == BOOT_ID

    async with serving(node, Limits(message_bytes=32 << 10)) as (address, _):
        await trio.to_thread.run_sync(client, address)
    assert node.sessions[0].heard == []


async def test_an_answer_beyond_the_bound_fails_and_the_daemon_lives() -> None:
    node = FakeNode(statistics_text="x" * (1 << 20))

    def client(address: str) -> None:
        with BlockingNode(address, 5) as n, pytest.raises(errors.PegaflowError):
            n.statistics(5)
        with BlockingNode(address, 5) as n:
            assert n.health(5).boot_id == BOOT_ID

    async with serving(node, Limits(message_bytes=32 << 10)) as (address, _):
        await trio.to_thread.run_sync(client, address)


async def test_a_header_that_promises_gigabytes_costs_nothing() -> None:
    async with serving(FakeNode(), Limits(first_message_seconds=1)) as (address, _):
        before = resident_mb()
        socks = [connect(address) for _ in range(50)]
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.sendall(struct.pack("<II", 0, (4 << 20) // 8) + b"\0" * 100)
        await trio.sleep(0.3)
        assert resident_mb() - before < 50
        for sock in socks:
            sock.close()


async def test_a_peer_that_never_reads_cannot_grow_the_daemon() -> None:
    """Big answers, pipelined, and nobody takes them: reading stops with 1 MiB unread."""
    node = FakeNode(statistics_text="x" * 100_000)
    asked = 2000
    flooded, done = threading.Event(), threading.Event()

    def flood(address: str) -> None:
        stream, sent = b"".join(statistics_calls(asked)), 0
        with connect(address) as sock:
            sock.settimeout(1.0)
            with contextlib.suppress(OSError):
                while sent < len(stream):
                    sent += sock.send(stream[sent : sent + 65536])
            flooded.set()
            done.wait(5)

    async with serving(node) as (address, _), trio.open_nursery() as nursery:
        before = resident_mb()
        nursery.start_soon(trio.to_thread.run_sync, flood, address)
        await until(flooded.is_set, 30)
        await trio.sleep(0.2)
        grown = resident_mb() - before
        done.set()
    assert grown < 60, f"{asked * 100_000 >> 20} MB were asked for, {grown:.0f} MB are held"


def statistics_calls(count: int) -> list[bytes]:
    """Raw messages: a client of ours would read."""
    site = str(Path(capnp.__file__).resolve().parent.parent)
    rpc = capnp.load(str(Path(capnp.__file__).parent / "rpc.capnp"), imports=[site])
    first = rpc.Message.new_message()
    first.init("bootstrap").questionId = 0
    out = [first.to_bytes()]
    for number in range(1, count + 1):
        message = rpc.Message.new_message()
        call = message.init("call")
        call.questionId = number
        call.init("target").init("promisedAnswer").questionId = 0
        call.interfaceId = schema.node.Node.schema.node.id
        call.methodId = 2
        call.init("params")
        out.append(message.to_bytes())
    return out


def resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError
