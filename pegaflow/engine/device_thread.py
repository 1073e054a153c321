"""A device thread that a nursery owns: batches go in, completions come back in bulk."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar, cast

import attrs
import outcome
import trio

from pegaflow.errors import DeviceLost, Overloaded, ShuttingDown

T = TypeVar("T")


@attrs.define(eq=False)
class _Job:
    """One call on its way through the thread; ``result`` is set there, read on the Trio side."""

    fn: Callable[[], object]
    task: trio.lowlevel.Task
    queued_at: float
    began_at: float = 0.0
    ended_at: float = 0.0
    result: outcome.Outcome[object] | None = None


@attrs.define(eq=False)
class DeviceThread:
    """One OS thread that owns one device handle and runs its calls in the order they came.

    ``capacity`` calls may wait behind the running one; another is refused at once.  Bookkeeping
    lives on the Trio thread; the OS thread sees two queues and nothing else.  ``setup`` runs
    first on the new thread (select the device); what it raises ends :meth:`run`.
    """

    name: str
    capacity: int = 64
    setup: Callable[[], None] | None = None
    busy_seconds: float = attrs.field(init=False, default=0.0)
    wait_seconds: float = attrs.field(init=False, default=0.0)
    _incoming: queue.SimpleQueue[_Job | None] = attrs.field(init=False, factory=queue.SimpleQueue)
    _done: deque[_Job] = attrs.field(init=False, factory=deque)
    _waiting: dict[trio.lowlevel.Task, _Job] = attrs.field(init=False, factory=dict)
    _token: trio.lowlevel.TrioToken | None = attrs.field(init=False, default=None)
    _accepting: bool = attrs.field(init=False, default=False)

    @property
    def in_flight(self) -> int:
        """Calls that wait or run."""
        return len(self._waiting)

    @property
    def queued(self) -> int:
        """Calls the thread has not taken yet."""
        return self._incoming.qsize()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled.  Never returns before the OS thread has ended.

        Calls that were accepted before the cancellation are still carried out.
        """
        self._token = trio.lowlevel.current_trio_token()
        started = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._stop_when_cancelled)
                nursery.start_soon(self._report_start, started, task_status)
                await trio.to_thread.run_sync(
                    self._serve, started, thread_name=self.name, limiter=trio.CapacityLimiter(1)
                )
                nursery.cancel_scope.cancel()
        finally:
            self._accepting = False
            self._reap()
            for job in list(self._waiting.values()):  # a dead thread leaves no waiter behind
                self._finish(job, outcome.Error(DeviceLost(f"thread {self.name} has ended")))

    async def call(self, fn: Callable[[], T], *, urgent: bool = False) -> T:
        """Run ``fn`` on the thread and return what it returns.

        Cancelling the caller does not cut ``fn`` short: the device may still be writing into the
        caller's buffer, so the caller waits and is cancelled at its next checkpoint.  ``urgent``
        calls (opening, closing) pass the bound on the queue.  Raises :exc:`Overloaded` at once
        when the queue is full, :exc:`ShuttingDown` when the thread takes no more calls, and
        :exc:`DeviceLost` when it died.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._accepting:
            raise ShuttingDown(f"thread {self.name} takes no more calls")
        if not urgent and self._incoming.qsize() >= self.capacity:
            raise Overloaded(f"{self.capacity} batches wait for {self.name} already")
        job = _Job(fn, trio.lowlevel.current_task(), time.monotonic())
        self._waiting[job.task] = job
        self._incoming.put(job)
        result = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        return cast(T, result)

    async def _report_start(self, started: trio.Event, task_status: trio.TaskStatus[None]) -> None:
        await started.wait()
        task_status.started()

    async def _stop_when_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self._accepting = False
            self._incoming.put(None)

    def _accept(self, started: trio.Event) -> None:
        self._accepting = True
        started.set()

    def _serve(self, started: trio.Event) -> None:
        """The OS thread."""
        token = self._token
        assert token is not None
        if self.setup is not None:
            self.setup()
        token.run_sync_soon(self._accept, started)
        while (job := self._incoming.get()) is not None:
            job.began_at = time.monotonic()
            job.result = outcome.capture(job.fn)
            job.ended_at = time.monotonic()
            self._done.append(job)
            # Idempotent: however many calls end before Trio looks, it is woken once.
            token.run_sync_soon(self._reap, idempotent=True)

    def _reap(self) -> None:
        """Wake everybody whose call has ended."""
        while self._done:
            job = self._done.popleft()
            self.wait_seconds += job.began_at - job.queued_at
            self.busy_seconds += job.ended_at - job.began_at
            assert job.result is not None, self.name
            self._finish(job, job.result)

    def _finish(self, job: _Job, result: outcome.Outcome[object]) -> None:
        del self._waiting[job.task]
        trio.lowlevel.reschedule(job.task, result)
