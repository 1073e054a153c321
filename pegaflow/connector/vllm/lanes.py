"""Two threads of a worker, each with a connection of its own: one loads, one saves.

The load lane also registers the rank's KV memory, keeps the heartbeat and registers again by
itself when the daemon has come back.  A block is let go only when the daemon answered, is known to
be dead, or the deadline that it was given has passed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import attrs
import numpy as np

from pegaflow.client.blocking import BlockingSession
from pegaflow.client.memory import hand_over
from pegaflow.connector.common import ConnectorConfig, LoadOrder, SaveOrder
from pegaflow.connector.guard import Complaints
from pegaflow.connector.identity import Identity
from pegaflow.connector.tally import Tally
from pegaflow.connector.vllm.adapter import Allocation
from pegaflow.errors import DeadlineExceeded, PeerGone, PegaflowError
from pegaflow.model.keys import BlockHash, InstanceId, LeaseToken
from pegaflow.model.layout import CudaIpc, GroupLayout, HandedOver, Region
from pegaflow.model.messages import LoadRequest, RegisterRequest, SaveRequest, SaveRun

HEARTBEAT_S = 0.5
RETRY_S = 0.25
IDLE_S = 20.0
"""A save session that was silent for so long is closed: the daemon would do it."""

DEADLINE_MARGIN_S = 0.25
"""A copy that was begun just before its deadline gets this long to end."""

SAVE_AGE_MAX = 4.0
"""A save that waited this many save time-outs in the queue is dropped: its blocks are held."""


@attrs.frozen
class Rank:
    """Who this worker is, what memory it has, and as whom it speaks to the daemon."""

    address: str
    instance: InstanceId
    identity: Identity
    world_size: int
    rank: int
    slot_index: int
    slot_count: int
    stripe: tuple[int, int]
    allocations: tuple[Allocation, ...]
    layout: GroupLayout

    def connect(self, timeout_s: float) -> BlockingSession:
        """A session of this engine."""
        return BlockingSession(
            self.address,
            instance=self.instance,
            namespace=self.identity.namespace,
            manifest=self.identity.manifest,
            world_size=self.world_size,
            timeout_s=timeout_s,
        )

    def register(self, session: BlockingSession, timeout_s: float) -> int:
        """Hand the memory over and register; how many ranks are still missing."""
        fds = [allocation.fd for allocation in self.allocations if allocation.fd >= 0]
        token = hand_over(session.opened.handover, fds, timeout_s) if fds else b""
        regions, index = [], 0
        for allocation in self.allocations:
            source: HandedOver | CudaIpc
            if allocation.fd >= 0:
                source = HandedOver(token, index, allocation.offset_bytes)
                index += 1
            else:
                source = CudaIpc(
                    allocation.cuda_handle, allocation.device_uuid, allocation.offset_bytes
                )
            regions.append(Region(allocation.size_bytes, source))
        request = RegisterRequest(
            self.rank, self.slot_index, self.slot_count, tuple(regions), (self.layout,)
        )
        return session.register(request, timeout_s)


class _Lane(threading.Thread):
    """A thread with a session that may be lost; daemonic, so it keeps no engine from ending."""

    def __init__(
        self, name: str, rank: Rank, config: ConnectorConfig, tally: Tally, complaints: Complaints
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.rank = rank
        self.config = config
        self.tally = tally
        self.complaints = complaints
        self.changed = threading.Condition()
        self.ending = False
        self.session: BlockingSession | None = None
        self.boot_id = b""

    def stop(self, wait_s: float) -> None:
        """Ask it to end, and wait a little."""
        with self.changed:
            self.ending = True
            self.changed.notify_all()
        if self.is_alive():
            self.join(wait_s)

    def drop_session(self) -> None:
        """Close; the daemon ends what it owned."""
        session, self.session = self.session, None
        if session is not None:
            session.close()

    def wait_for_release(self, boot_id: bytes, end: float) -> None:
        """The connection broke during a call: wait until that daemon can't touch our memory.

        That is: it is dead (nothing listens, or another daemon does), or ``end`` has passed.
        """
        while time.monotonic() < end and not self.ending:
            try:
                with self.rank.connect(self.config.attach_timeout_s) as session:
                    if session.opened.boot_id != boot_id:
                        return
            except PeerGone:
                return  # refused: a process that is gone copies nothing
            except PegaflowError:
                pass
            time.sleep(0.02)


@attrs.frozen(eq=False)
class LoadJob:
    """A load to be carried out, or one whose connection to daemon ``lost_boot_id`` broke."""

    order: LoadOrder
    end: float
    lost_boot_id: bytes = b""


class LoadLane(_Lane):
    """Registration, heartbeat, and the loads that :mod:`.direct` could not send itself."""

    def __init__(
        self,
        rank: Rank,
        config: ConnectorConfig,
        tally: Tally,
        complaints: Complaints,
        report: Callable[[LoadOrder, Iterable[int]], None],
    ) -> None:
        """``report(order, failed block ids)`` is called exactly once for each submitted order."""
        super().__init__("pegaflow-load", rank, config, tally, complaints)
        self._report = report
        self._queue: deque[LoadJob] = deque()
        self.attempted = threading.Event()
        """The first attempt to register has ended, one way or the other."""
        self.registered = False

    def submit(self, job: LoadJob) -> None:
        """From the engine's thread."""
        with self.changed:
            self._queue.append(job)
            self.changed.notify_all()

    def run(self) -> None:
        """Until stopped.  Whatever is still queued then is reported as failed."""
        next_beat = 0.0
        while True:
            with self.changed:
                while not self._queue and not self.ending and time.monotonic() < next_beat:
                    self.changed.wait(max(0.0, next_beat - time.monotonic()))
                if self.ending:
                    break
                job = self._queue.popleft() if self._queue else None
            try:
                if job is not None:
                    self._load(job)
                if time.monotonic() >= next_beat:
                    self._beat()
                    next_beat = time.monotonic() + (HEARTBEAT_S if self.registered else RETRY_S)
            except Exception:
                self.tally.add("hook_errors")
                self.complaints.warn("load lane", "the load lane stumbled", trace=True)
                next_beat = time.monotonic() + RETRY_S
        for job in self._queue:
            self._report(job.order, job.order.block_ids)
        self.drop_session()

    def _beat(self) -> None:
        """Ping, or register."""
        try:
            if self.session is None:
                self._attach()
            else:
                self.session.ping(self.config.attach_timeout_s)
        except PegaflowError as exc:
            if self.registered:
                self.complaints.warn("lost", f"the daemon is gone, going on without: {exc}")
            elif not isinstance(exc, (PeerGone, DeadlineExceeded)):
                self.complaints.warn("refused", f"the daemon refuses this rank: {exc}")
            self._detach()
        finally:
            self.attempted.set()

    def _attach(self) -> None:
        self.session = self.rank.connect(self.config.attach_timeout_s)
        self.boot_id = self.session.opened.boot_id
        self.rank.register(self.session, self.config.attach_timeout_s)
        self.registered = True
        self.tally.add("registrations")
        self.tally.set("registered", 1)

    def _detach(self) -> None:
        self.registered = False
        self.tally.set("registered", 0)
        self.drop_session()

    def _load(self, job: LoadJob) -> None:
        """One order, reported exactly once whatever happens."""
        order, end = job.order, job.end
        failed: Iterable[int] = order.block_ids
        began = time.monotonic()
        try:
            if job.lost_boot_id:
                self.wait_for_release(job.lost_boot_id, end + DEADLINE_MARGIN_S)
            elif order.lease and self.session is not None and began < end:
                failed = self._call(self.session, order, end)
        except DeadlineExceeded as exc:
            self.complaints.warn("load", f"a load ran into its deadline: {exc}")
            if time.monotonic() >= end:  # not answered: a daemon that hangs is left alone
                self._detach()
        except PeerGone as exc:
            self.complaints.warn("load", f"the daemon went away during a load: {exc}")
            self._detach()
            self.wait_for_release(self.boot_id, end + DEADLINE_MARGIN_S)
        except PegaflowError as exc:
            self.complaints.warn("load", f"a load failed: {exc}")
        finally:
            failed = list(failed)
            count_load(self.tally, self.rank, order, failed, time.monotonic() - began)
            self._report(order, failed)

    def _call(self, session: BlockingSession, order: LoadOrder, end: float) -> list[int]:
        request = load_request(self.rank, order, end)
        loaded = session.load(request, end - time.monotonic() + DEADLINE_MARGIN_S)
        return [order.block_ids[i] for i in loaded.failed.tolist()]


def load_request(rank: Rank, order: LoadOrder, end: float) -> LoadRequest:
    """All blocks of the lease, in order."""
    return LoadRequest(
        rank=rank.rank,
        lease=LeaseToken(order.lease),
        group=0,
        positions=np.arange(len(order.block_ids), dtype=np.uint32),
        block_ids=np.array(order.block_ids, np.uint32),
        deadline_ns=int(end * 1e9),
    )


def count_load(
    tally: Tally, rank: Rank, order: LoadOrder, failed: Sequence[int], seconds: float
) -> None:
    """For the connector's statistics."""
    good = len(order.block_ids) - len(failed)
    tally.add("load_failures" if failed else "loads")
    tally.add("load_failed_blocks", len(failed))
    tally.add("load_bytes", good * rank.layout.slot_bytes)
    tally.observe("load_seconds", seconds)
    tally.observe("load_blocks", good)


@attrs.define(eq=False)
class SaveJob:
    """What one engine step wants saved, and what to wait for before it may be read."""

    orders: list[SaveOrder]
    ready: Callable[[], None] | None
    queued_at: float


class SaveLane(_Lane):
    """Saves.  Its queue is bounded: what does not fit is dropped and counted."""

    def __init__(
        self,
        rank: Rank,
        config: ConnectorConfig,
        tally: Tally,
        complaints: Complaints,
        available: Callable[[], bool],
    ) -> None:
        """``available()``: is this rank registered now?  Otherwise saves are dropped at once."""
        super().__init__("pegaflow-save", rank, config, tally, complaints)
        self._available = available
        self._queue: deque[SaveJob] = deque()
        self._unsettled: dict[str, int] = {}
        self._sending: set[str] = set()
        self._sending_until = 0.0
        self._revoked: set[str] = set()
        self._blocks_a_call = max(1, config.save_call_bytes // rank.layout.slot_bytes)

    # --- the engine's thread ---------------------------------------------------------------------

    def submit(self, orders: Sequence[SaveOrder], ready: Callable[[], None] | None) -> None:
        """Take one step's orders; never waits."""
        orders = self._striped(orders)
        if not orders:
            return
        with self.changed:
            if (
                len(self._queue) >= self.config.save_queue_jobs
                or self.ending
                or not self._available()
            ):
                self._drop(orders, "save_dropped_blocks")
                return
            for order in orders:
                self._unsettled[order.request_id] = self._unsettled.get(order.request_id, 0) + 1
            self._queue.append(SaveJob(list(orders), ready, time.monotonic()))
            self.tally.set("pending_saves", len(self._queue))
            self.changed.notify_all()

    def settled(self, request_id: str) -> bool:
        """Has every save of this request been answered, dropped, or outlived its deadline?"""
        with self.changed:
            return request_id not in self._unsettled

    def revoke(self, request_ids: Iterable[str]) -> None:
        """Their blocks are about to be overwritten: drop what waits, wait for what is being read.

        Returns at the latest a little after the deadline of the call that is on its way.
        """
        wanted = set(request_ids)
        with self.changed:
            for job in self._queue:
                gone = [order for order in job.orders if order.request_id in wanted]
                if gone:
                    job.orders = [order for order in job.orders if order.request_id not in wanted]
                    self._settle(gone)
                    self._drop(gone, "save_revoked_blocks")
            self._revoked |= wanted & self._sending
            while wanted & self._sending:
                left = self._sending_until + DEADLINE_MARGIN_S - time.monotonic()
                if left <= 0:
                    break
                self.changed.wait(left)

    # --- the lane's thread -----------------------------------------------------------------------

    def run(self) -> None:
        """Until stopped; what is still queued then is dropped."""
        while True:
            with self.changed:
                while not self._queue and not self.ending:
                    if not self.changed.wait(IDLE_S):
                        self.drop_session()  # before the daemon does; a new one costs a few ms
                if self.ending:
                    break
                orders, ready = self._take()
            try:
                self._save(orders, ready)
            except Exception:
                self.tally.add("hook_errors")
                self.complaints.warn("save lane", "the save lane stumbled", trace=True)
                self.drop_session()
            finally:
                with self.changed:
                    self._sending.clear()
                    self._revoked.clear()
                    self._settle(orders)
        with self.changed:
            while self._queue:
                self._settle(self._queue.popleft().orders)
        self.drop_session()

    def _take(self) -> tuple[list[SaveOrder], Callable[[], None] | None]:
        """All that waits, up to one call's size, and the youngest event: they are in order."""
        orders: list[SaveOrder] = []
        ready: Callable[[], None] | None = None
        blocks = 0
        oldest = time.monotonic() - SAVE_AGE_MAX * self.config.save_timeout_s
        while self._queue and (not orders or blocks < self._blocks_a_call):
            job = self._queue.popleft()
            if job.queued_at < oldest:
                self._settle(job.orders)
                self._drop(job.orders, "save_dropped_blocks")
                continue
            orders += job.orders
            blocks += sum(len(order.hashes) for order in job.orders)
            ready = job.ready or ready
        self._sending = {order.request_id for order in orders}
        self._sending_until = time.monotonic() + self.config.save_timeout_s
        self.tally.set("pending_saves", len(self._queue))
        return orders, ready

    def _save(self, orders: list[SaveOrder], ready: Callable[[], None] | None) -> None:
        if orders and ready is not None:
            ready()
        for part in cut(orders, self._blocks_a_call):
            with self.changed:
                part = [order for order in part if order.request_id not in self._revoked]
                if self.ending or not part:
                    continue
                end = self._sending_until = time.monotonic() + self.config.save_timeout_s
            self._send(part, end)

    def _send(self, orders: list[SaveOrder], end: float) -> None:
        """One call; returns when the daemon no longer reads our memory."""
        blocks = sum(len(order.hashes) for order in orders)
        began = time.monotonic()
        try:
            if self.session is None:
                if not self._available():
                    self._drop(orders, "save_dropped_blocks")
                    return
                self.session = self.rank.connect(min(self.config.attach_timeout_s, end - began))
                self.boot_id = self.session.opened.boot_id
            runs = tuple(save_run(order) for order in orders)
            request = SaveRequest(self.rank.rank, runs, int(end * 1e9))
            saved = self.session.save(request, end - time.monotonic() + DEADLINE_MARGIN_S)
        except PegaflowError as exc:
            self._failed(exc, blocks, end)
            return
        self.tally.add("saves")
        self.tally.add("save_stored_blocks", saved.stored)
        self.tally.add("save_known_blocks", saved.known)
        self.tally.add("save_rejected_blocks", saved.rejected + saved.failed)
        self.tally.add("save_bytes", saved.stored * self.rank.layout.slot_bytes)
        self.tally.observe("save_seconds", time.monotonic() - began)
        self.tally.observe("save_blocks", blocks)

    def _failed(self, exc: PegaflowError, blocks: int, end: float) -> None:
        self.tally.add("save_failures")
        self.tally.add("save_failed_blocks", blocks)
        self.complaints.warn("save", f"a save failed: {exc}")
        if isinstance(exc, PeerGone):
            self.drop_session()
            self.wait_for_release(self.boot_id, end)
        elif isinstance(exc, DeadlineExceeded) and time.monotonic() >= end:
            self.drop_session()

    # --- helpers, with the lock held -------------------------------------------------------------

    def _settle(self, orders: Iterable[SaveOrder]) -> None:
        for order in orders:
            left = self._unsettled.get(order.request_id, 1) - 1
            if left > 0:
                self._unsettled[order.request_id] = left
            else:
                self._unsettled.pop(order.request_id, None)
        self.changed.notify_all()

    def _drop(self, orders: Iterable[SaveOrder], counter: str) -> None:
        self.tally.add(counter, sum(len(order.hashes) for order in orders))

    def _striped(self, orders: Sequence[SaveOrder]) -> Sequence[SaveOrder]:
        """Of ranks with equal bytes each saves its share of the blocks."""
        index, count = self.rank.stripe
        return (
            orders if count == 1 else [p for order in orders for p in stripe(order, index, count)]
        )


def save_run(order: SaveOrder) -> SaveRun:
    """As the protocol has it."""
    hashes = [BlockHash(block_hash) for block_hash in order.hashes]
    return SaveRun(0, hashes, order.parent, np.array(order.block_ids, np.uint32))


def part_of(order: SaveOrder, start: int, stop: int) -> SaveOrder:
    """Blocks ``start`` to ``stop`` of an order, with the right parent."""
    parent = order.hashes[start - 1] if start else order.parent
    return SaveOrder(
        order.request_id, parent, order.hashes[start:stop], order.block_ids[start:stop]
    )


def stripe(order: SaveOrder, index: int, count: int) -> list[SaveOrder]:
    """The consecutive parts of an order whose block ids are ``index`` modulo ``count``."""
    parts, at = [], 0
    mine = [block % count == index for block in order.block_ids]
    while at < len(mine):
        stop = at
        while stop < len(mine) and mine[stop]:
            stop += 1
        if stop > at:
            parts.append(part_of(order, at, stop))
        at = stop + 1
    return parts


def cut(orders: Iterable[SaveOrder], blocks_max: int) -> list[list[SaveOrder]]:
    """Calls of at most ``blocks_max`` blocks each, in order."""
    calls: list[list[SaveOrder]] = []
    room = 0
    for order in orders:
        at = 0
        while at < len(order.hashes):
            if not room:
                calls.append([])
                room = blocks_max
            stop = min(len(order.hashes), at + room)
            calls[-1].append(part_of(order, at, stop))
            room -= stop - at
            at = stop
    return calls
