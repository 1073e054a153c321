"""The bridge between Trio and a device thread: nobody is forgotten, whatever the order."""

from __future__ import annotations

import os
import random
import threading

import pytest
import trio

from pegaflow.engine.device_thread import DeviceThread
from pegaflow.errors import DeviceLost, Overloaded, ShuttingDown

SEED = 4
WAITERS = int(os.environ.get("PEGAFLOW_WAITERS", "20000"))
"""1,000,000 is what the fault's report asks for; that takes about a minute."""


@pytest.mark.slow
async def test_t10_no_waiter_is_forgotten() -> None:
    """Callers come, are cancelled and share one thread; each gets its own answer or its cancel."""
    dice = random.Random(SEED)
    answered = cancelled = 0

    async def caller(number: int, cancel_after: int | None) -> None:
        nonlocal answered, cancelled
        with trio.CancelScope() as scope:
            if cancel_after is not None:
                trio.lowlevel.current_trio_token().run_sync_soon(scope.cancel)
            for _ in range(cancel_after or 0):
                await trio.lowlevel.cancel_shielded_checkpoint()
            got = await thread.call(lambda: number)
            assert got == number
            answered += 1
            await trio.lowlevel.checkpoint()
        cancelled += scope.cancelled_caught

    thread = DeviceThread("waiters", capacity=WAITERS)
    with trio.fail_after(300):
        async with trio.open_nursery() as service:
            await service.start(thread.run)
            left = WAITERS
            while left:
                together = min(left, dice.randrange(1, 200))
                left -= together
                async with trio.open_nursery() as nursery:
                    for number in range(together):
                        after = dice.randrange(4) if dice.random() < 0.3 else None
                        nursery.start_soon(caller, number, after)
                assert thread.in_flight == 0
            service.cancel_scope.cancel()
    assert answered >= WAITERS // 2
    assert cancelled > WAITERS // 10


async def test_a_cancelled_caller_returns_when_the_call_has_ended() -> None:
    gate, ended = threading.Event(), []
    thread = DeviceThread("slow")
    async with trio.open_nursery() as service:
        await service.start(thread.run)
        async with trio.open_nursery() as nursery:

            def work() -> None:
                gate.wait(5)
                ended.append(True)

            nursery.start_soon(thread.call, work)
            await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
            gate.set()
        assert ended
        service.cancel_scope.cancel()


async def test_a_full_queue_refuses_at_once_and_urgent_calls_pass() -> None:
    gate, running = threading.Event(), threading.Event()
    thread = DeviceThread("full", capacity=1)

    def block() -> None:
        running.set()
        gate.wait(5)

    async with trio.open_nursery() as service:
        await service.start(thread.run)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(thread.call, block)
            await trio.to_thread.run_sync(running.wait)
            nursery.start_soon(thread.call, block)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(Overloaded):
                await thread.call(lambda: None)
            async with trio.open_nursery() as passing:
                passing.start_soon(lambda: thread.call(lambda: None, urgent=True))
                gate.set()
        service.cancel_scope.cancel()
    with pytest.raises(ShuttingDown):
        await thread.call(lambda: None)


async def test_a_thread_that_can_not_begin_ends_its_service() -> None:
    def refuse() -> None:
        raise DeviceLost("no device")

    with pytest.RaisesGroup(pytest.RaisesExc(DeviceLost), flatten_subgroups=True):
        async with trio.open_nursery() as service:
            await service.start(DeviceThread("none", setup=refuse).run)
