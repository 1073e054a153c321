"""Calls that are begun and polled: for a thread that does not want to wait."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest
import trio
from fake_node import FakeNode, FakeSession, load_request, open_blocking, serving, until

from pegaflow import errors
from pegaflow.client.blocking import BlockingSession
from pegaflow.client.session import open_kj_loop
from pegaflow.model import messages as m

SHORT_S = 0.05


def slow(session: FakeSession) -> None:
    session.seconds = SHORT_S


async def in_thread(work: Callable[[], object]) -> object:
    return await trio.to_thread.run_sync(work)


def answer_of(session: BlockingSession, number: int) -> m.Loaded:
    end = time.monotonic() + 5
    while (loaded := session.poll_load(number)) is None:
        assert time.monotonic() < end
        time.sleep(0.001)  # sleep: what the engine's own work stands for
    return loaded


async def test_a_call_is_answered_while_others_are_made() -> None:
    def client(address: str) -> None:
        with open_blocking(address) as session:
            first = session.begin_load(load_request(), 1)
            second = session.begin_load(load_request(), 1)
            assert session.poll_load(first) is None
            assert session.ping(5)  # a call in between neither loses nor gets their answers
            assert answer_of(session, second).failed.tolist() == [1]
            assert answer_of(session, first).failed.tolist() == [1]
            with pytest.raises(errors.PegaflowError):
                session.poll_load(first)

    async with serving(FakeNode(prepare=slow)) as (address, _):
        await in_thread(lambda: client(address))


async def test_errors_come_once_and_leave_the_connection() -> None:
    def fail(session: FakeSession) -> None:
        session.error = errors.LeaseExpired("over")

    def client(address: str) -> None:
        with open_blocking(address) as session:
            number = session.begin_load(load_request(), 1)
            with pytest.raises(errors.LeaseExpired, match="over"):
                answer_of(session, number)
            assert session.ping(5)

    async with serving(FakeNode(prepare=fail)) as (address, _):
        await in_thread(lambda: client(address))


async def test_an_abandoned_call_is_cancelled_at_the_peer() -> None:
    node = FakeNode(prepare=slow)

    def client(address: str) -> None:
        with open_blocking(address) as session:
            number = session.begin_load(load_request(), 1)
            for _ in range(3):  # by then its task has begun
                assert session.ping(5)
            session.abandon(number)
            assert session.ping(5)

    async with serving(node) as (address, _):
        await in_thread(lambda: client(address))
        await until(lambda: node.sessions[0].cancelled == ["load"])


async def test_closing_or_dropping_with_calls_under_way_is_safe() -> None:
    def client(address: str) -> None:
        session = open_blocking(address)
        session.begin_load(load_request(), 1)
        session.close()
        dropped = open_blocking(address)
        dropped.begin_load(load_request(), 1)
        del dropped
        gc.collect()
        open_blocking(address).close()

    async with serving(FakeNode(prepare=slow)) as (address, _):
        await in_thread(lambda: client(address))


async def test_a_peer_that_goes_away_is_noticed_by_the_next_poll() -> None:
    begun, gone, raised = threading.Event(), threading.Event(), []

    def client(address: str) -> None:
        session = open_blocking(address)
        number = session.begin_load(load_request(), 1)
        begun.set()
        gone.wait(5)
        for ask in (
            lambda: answer_of(session, number),
            lambda: session.begin_load(load_request(), 1),
        ):
            try:
                ask()
            except errors.PegaflowError as exc:
                raised.append(type(exc))
        session.close()

    async with serving(FakeNode(prepare=slow)) as (address, _):
        thread = threading.Thread(target=client, args=(address,))
        thread.start()
        await trio.to_thread.run_sync(begun.wait)
    gone.set()
    await trio.to_thread.run_sync(thread.join)
    assert raised == [errors.PeerGone, errors.PeerGone]


async def test_a_loop_beside_an_open_blocking_client_is_refused_and_aborts_nobody() -> None:
    def client(address: str) -> None:
        async def second_loop() -> None:
            async with open_kj_loop():
                pass

        with open_blocking(address), pytest.raises(RuntimeError, match="blocking client"):
            trio.run(second_loop)
        trio.run(second_loop)  # and behind it there is room

    async with serving(FakeNode()) as (address, _):
        await in_thread(lambda: client(address))
