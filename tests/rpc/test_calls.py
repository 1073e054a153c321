"""Calls over a real socket: answers, typed errors, order, sessions that end, cancellation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from fake_node import (
    BOOT_ID,
    MANIFEST,
    FakeNode,
    FakeSession,
    load_request,
    open_blocking,
    save_request,
    serving,
    until,
)

from pegaflow import errors
from pegaflow.client.blocking import BlockingNode, BlockingSession
from pegaflow.client.session import open_session
from pegaflow.model import messages as m
from pegaflow.model.keys import BlockHash, InstanceId, LeaseToken, Namespace
from pegaflow.model.layout import GroupLayout, HandedOver, Region, Run
from pegaflow.rpc import calls
from pegaflow.rpc.server import negotiate

HASHES = [BlockHash(bytes([i]) * 32) for i in range(3)]
REGISTER = m.RegisterRequest(
    0, 0, 1, (Region(4096, HandedOver(b"t" * 16, 0, 0)),), (GroupLayout(0, 4, (Run(0, 0, 8, 8),)),)
)


async def in_thread(work: Callable[[], object]) -> object:
    return await trio.to_thread.run_sync(work)


async def test_every_method_answers() -> None:
    node = FakeNode()

    def client(address: str) -> list[object]:
        with open_blocking(address) as s:
            out: list[object] = [
                s.opened,
                s.query(m.QueryRequest(0, HASHES, b"p" * 32, "r"), 5),
                s.load(load_request(), 5).failed.tolist(),
                s.save(save_request(), 5),
                s.register(REGISTER, 5),
                s.renew(LeaseToken(b"l" * 16), 5),
                s.ping(5),
                s.health(5).pool_total_bytes,
                s.statistics(5),
            ]
            s.release([LeaseToken(b"l" * 16), LeaseToken(b"short")], 5)
            s.unregister(5)
            return out

    async with serving(node) as (address, _):
        got = await in_thread(lambda: client(address))
    assert got == [
        m.Opened(1, BOOT_ID, "@nowhere", "0"),
        m.Ready(3, LeaseToken(b"l" * 16), 5),
        [1],
        m.Saved(1, 2, 3, 4),
        3,
        7,
        BOOT_ID,
        2,
        "{}",
    ]
    assert node.sessions[0].heard == [
        "query r", "load", "save", "register", "renew", "release 1", "unregister",
    ]  # fmt: skip
    assert {status for _, status in node.observations} == {"ok"}


@pytest.mark.parametrize(
    "error",
    [
        errors.BadRequest("wrong", "field-name"),
        errors.UnknownInstance("who"),
        errors.NotReady("later"),
        errors.LeaseExpired("over"),
        errors.ManifestMismatch("differs", "dtype"),
        errors.Overloaded("busy"),
        errors.OutOfSpace("full"),
        errors.DeadlineExceeded("late"),
        errors.MemoryGone("gone"),
        errors.ShuttingDown("bye"),
        errors.BadRequest("lone \udc80 surrogate, \0 and " + "x" * 100_000_000, "f\udc80"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_keep_their_kind_text_and_field(error: errors.PegaflowError) -> None:
    def fail(session: FakeSession) -> None:
        session.error = error

    def client(address: str) -> list[BaseException]:
        caught: list[BaseException] = []
        with open_blocking(address) as s:
            calls_to_try: list[Callable[[], object]] = [
                lambda: s.query(m.QueryRequest(0, HASHES, b"", "r"), 5),
                lambda: s.load(load_request(), 5),
                lambda: s.renew(LeaseToken(b"l" * 16), 5),
            ]
            for call in calls_to_try:
                try:
                    call()
                except errors.PegaflowError as exc:
                    caught.append(exc)
            assert s.ping(5) == BOOT_ID  # the connection lives
        return caught

    async with serving(FakeNode(prepare=fail)) as (address, _):
        caught = await in_thread(lambda: client(address))
    assert isinstance(caught, list)
    assert [type(exc) for exc in caught] == [type(error)] * 3
    for exc in caught:
        assert str(exc)[:4] == str(error)[:4]
        assert getattr(exc, "field", "")[:1] == getattr(error, "field", "")[:1]


async def test_a_bug_in_a_handler_is_answered_without_its_text() -> None:
    def fail(session: FakeSession) -> None:
        session.error = ValueError("secret detail")

    def client(address: str) -> list[str]:
        texts = []
        with open_blocking(address) as s:
            calls_to_try: list[Callable[[], object]] = [
                lambda: s.query(m.QueryRequest(0, HASHES, b"", "r"), 5),
                lambda: s.save(save_request(), 5),
            ]
            for call in calls_to_try:
                with pytest.raises(errors.PegaflowError) as caught:
                    call()
                assert type(caught.value) is errors.PegaflowError
                texts.append(str(caught.value))
        return texts

    node = FakeNode(prepare=fail)
    async with serving(node) as (address, _):
        texts = await in_thread(lambda: client(address))
    assert isinstance(texts, list)
    assert all("internal" in text and "secret" not in text for text in texts)
    assert ("save", "internal") in node.observations


async def test_a_broken_invariant_ends_the_service() -> None:
    def fail(session: FakeSession) -> None:
        session.error = AssertionError("state is broken")

    def client(address: str) -> None:
        with open_blocking(address) as s, pytest.raises(errors.PegaflowError):
            s.query(m.QueryRequest(0, HASHES, b"", "r"), 5)

    with pytest.RaisesGroup(
        pytest.RaisesExc(AssertionError, match="state is broken"), flatten_subgroups=True
    ):
        async with serving(FakeNode(prepare=fail)) as (address, _):
            await in_thread(lambda: client(address))
            await trio.sleep(5)


def versions(low: int, high: int) -> m.OpenRequest:
    return m.OpenRequest(low, high, "c", InstanceId("i"), Namespace("n"), MANIFEST, 1, 0)


def test_the_highest_common_version_is_taken() -> None:
    assert negotiate(versions(0, 99)) == m.PROTOCOL_MAX
    assert negotiate(versions(1, 1)) == 1
    for low, high in ((m.PROTOCOL_MAX + 1, 99), (0, 0), (5, 2)):
        with pytest.raises(errors.VersionMismatch, match="upgrade the older one"):
            negotiate(versions(low, high))


async def test_shutdown_needs_the_boot_id() -> None:
    node = FakeNode()

    def client(address: str) -> None:
        with BlockingNode(address, 5) as n:
            n.shutdown(1234, 5)
            with pytest.raises(errors.BadRequest, match="boot id"):
                n._wire.call("node", *calls.shutdown(1, b"other"), time.monotonic() + 5)

    async with serving(node) as (address, _):
        await in_thread(lambda: client(address))
    assert node.shut_down == [1234]


async def test_calls_in_place_keep_their_order() -> None:
    node = FakeNode()
    async with (
        serving(node) as (address, loop),
        open_session(
            loop, address, instance=InstanceId("i"), namespace=Namespace("n"), manifest=MANIFEST,
            world_size=1, timeout_s=5,
        ) as session,
        trio.open_nursery() as nursery,
    ):  # fmt: skip
        for number in range(50):
            request = m.QueryRequest(0, HASHES, b"", str(number))
            nursery.start_soon(session.query, request, 5)
            await trio.lowlevel.checkpoint()
    heard = [int(text.split()[1]) for text in node.sessions[0].heard]
    assert sorted(heard) == list(range(50))


async def test_a_session_ends_once_however_it_ends() -> None:
    node = FakeNode()

    def drop_without_close(address: str) -> None:
        session = open_blocking(address)
        session.ping(5)
        del session

    async with serving(node) as (address, _):
        await in_thread(lambda: open_blocking(address).close())
        await until(lambda: node.sessions[0].closed_times == 1)
        await in_thread(lambda: drop_without_close(address))
        await until(lambda: node.sessions[1].closed_times == 1)
        with spawn(address) as child:
            await until(lambda: len(node.sessions) == 3)
            os.kill(child.pid, signal.SIGKILL)
        await until(lambda: node.sessions[2].closed_times == 1)
        kept: list[BlockingSession] = []
        await in_thread(lambda: kept.append(open_blocking(address)))
        assert node.sessions[3].closed_times == 0
    await until(lambda: node.sessions[3].closed_times == 1)  # the daemon stopped
    assert [session.closed_times for session in node.sessions] == [1, 1, 1, 1]


CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
from fake_node import open_blocking, load_request
s = open_blocking(sys.argv[1])
sys.stdin.readline()
"""


def spawn(address: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CHILD, address, str(Path(__file__).parent)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


async def test_cancelling_a_call_cancels_its_handler_and_nothing_else() -> None:
    def slow(session: FakeSession) -> None:
        session.seconds = 60

    node = FakeNode(prepare=slow)

    def client(address: str) -> bytes:
        with open_blocking(address) as s:
            with pytest.raises(errors.DeadlineExceeded):
                s.save(save_request(), 0.05)
            return bytes(s.ping(5))

    async with serving(node) as (address, loop):
        assert await in_thread(lambda: client(address)) == BOOT_ID
        await until(lambda: node.sessions[0].cancelled == ["save"])
        async with open_session(
            loop, address, instance=InstanceId("i"), namespace=Namespace("n"), manifest=MANIFEST,
            world_size=1, timeout_s=5,
        ) as session:  # fmt: skip
            with trio.move_on_after(0.05) as scope:
                await session.load(load_request(), 60)
            assert scope.cancelled_caught
            await until(lambda: node.sessions[1].cancelled == ["load"])
            assert await session.ping(5) == BOOT_ID
