"""Loads sent by the engine's own thread, which asks for their answers once a step.

While a request waits for its load the engine steps as fast as it can and holds Python's lock: a
thread of ours that has to send the call and read the answer waits for that lock each time, up to
5 ms (measured: 1.1 ms for a load became 5.6 to 10.8 ms).  So the call is sent from here and its
answer read in passing.  What can't be sent, and loads whose connection breaks, go to the lane.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import attrs

from pegaflow.client.blocking import BlockingSession
from pegaflow.connector.common import ConnectorConfig, LoadOrder
from pegaflow.connector.guard import Complaints
from pegaflow.connector.tally import Tally
from pegaflow.connector.vllm.lanes import (
    DEADLINE_MARGIN_S,
    IDLE_S,
    LoadJob,
    LoadLane,
    Rank,
    count_load,
    load_request,
)
from pegaflow.errors import PeerGone, PegaflowError

CONNECT_TIMEOUT_S = 0.020
SEND_TIMEOUT_S = 0.005
RETRY_S = 1.0


@attrs.frozen(eq=False)
class _UnderWay:
    order: LoadOrder
    number: int
    began: float
    end: float


class DirectLoads:
    """All methods run on the engine's worker thread."""

    def __init__(
        self,
        rank: Rank,
        config: ConnectorConfig,
        tally: Tally,
        complaints: Complaints,
        lane: LoadLane,
        report: Callable[[LoadOrder, Iterable[int]], None],
    ) -> None:
        """``report(order, failed block ids)`` is called exactly once for each order, or by
        ``lane`` for those that it was handed."""
        self._rank, self._config = rank, config
        self._tally, self._complaints = tally, complaints
        self._lane, self._report = lane, report
        self._session: BlockingSession | None = None
        self._boot_id = b""
        self._under_way: list[_UnderWay] = []
        self._next_try = 0.0
        self._used_at = 0.0

    def connect(self, timeout_s: float) -> None:
        """At engine start, when there is time; later by itself."""
        if self._lane.registered:
            self._connect(timeout_s)

    def submit(self, order: LoadOrder) -> None:
        """Its deadline starts now."""
        began = time.monotonic()
        end = began + self._config.load_timeout_s
        session = self._ready(began) if order.lease else None
        if session is None:
            self._lane.submit(LoadJob(order, end))
            return
        boot_id = session.opened.boot_id
        try:
            number = session.begin_load(load_request(self._rank, order, end), SEND_TIMEOUT_S)
        except RuntimeError as exc:  # opened by another thread than this one: nothing was sent
            self._lost(exc)
            self._lane.submit(LoadJob(order, end))
            return
        except PegaflowError as exc:
            # It may have got there whole: its blocks are let go of as those of a broken call.
            self._lost(exc)
            self._lane.submit(LoadJob(order, end, boot_id))
            return
        self._used_at = began
        self._under_way.append(_UnderWay(order, number, began, end))

    def poll(self) -> None:
        """Report what has ended."""
        under_way, self._under_way = self._under_way, []
        for load in under_way:
            if not self._ended(load):
                self._under_way.append(load)

    def close(self) -> None:
        """Loads that are under way are reported as failed by whoever waits for them."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _ended(self, load: _UnderWay) -> bool:
        session, order = self._session, load.order
        if session is None:  # the connection broke for an earlier one of them
            self._lane.submit(LoadJob(order, load.end, self._boot_id))
            return True
        try:
            loaded = session.poll_load(load.number)
        except PeerGone as exc:
            self._lost(exc)
            self._lane.submit(LoadJob(order, load.end, self._boot_id))
            return True
        except PegaflowError as exc:
            self._complaints.warn("load", f"a load failed: {exc}")
            self._finish(load, order.block_ids)
            return True
        if loaded is not None:
            self._finish(load, [order.block_ids[i] for i in loaded.failed.tolist()])
            return True
        if time.monotonic() < load.end + DEADLINE_MARGIN_S:
            return False
        # The daemon begins no copy behind the deadline, so the blocks are ours again.
        self._complaints.warn("load", "a load ran into its deadline: the daemon does not answer")
        session.abandon(load.number)
        self._finish(load, order.block_ids)
        return True

    def _finish(self, load: _UnderWay, failed: Iterable[int]) -> None:
        bad = list(failed)
        count_load(self._tally, self._rank, load.order, bad, time.monotonic() - load.began)
        self._report(load.order, bad)

    def _ready(self, now: float) -> BlockingSession | None:
        """The session, if there is one or can be in no time."""
        stale = self._boot_id != self._lane.boot_id or now - self._used_at > IDLE_S
        if self._session is not None and not self._under_way and stale:
            self.close()  # of a daemon that was restarted, or closed for having been silent
        if self._session is None and self._lane.registered and now >= self._next_try:
            self._connect(CONNECT_TIMEOUT_S)
        return self._session

    def _connect(self, timeout_s: float) -> None:
        try:
            self._session = self._rank.connect(timeout_s)
        except (PegaflowError, RuntimeError) as exc:
            self._complaints.warn("direct", f"loads take the slower way for a while: {exc}")
            self._next_try = time.monotonic() + RETRY_S
            return
        self._boot_id = self._session.opened.boot_id
        self._used_at = time.monotonic()

    def _lost(self, exc: Exception) -> None:
        self._complaints.warn("load", f"a load's connection is of no use any more: {exc}")
        self._next_try = time.monotonic() + RETRY_S
        self.close()
