"""The scheduler half: decides what to load and what to save.  Touches no tensor, never waits long.

A request here is a live vLLM object; only the few attributes in :class:`Request` are read.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import attrs

from pegaflow.connector.common import (
    NULL_BLOCK,
    ConnectorConfig,
    LoadOrder,
    SaveOrder,
    StepOrders,
)
from pegaflow.connector.querier import Budget, Lease, Querier
from pegaflow.connector.tally import Tally
from pegaflow.model.keys import BlockHash
from pegaflow.model.messages import QueryRequest, Ready

OFFERED_MAX, OFFERED_S = 1 << 16, 60.0
"""Blocks that were offered to the daemon this recently are not offered again by another request."""

MISS_VALID_S = 0.1
LOADING_PATIENCE_S = 2.0


class Request(Protocol):
    """What is read of vLLM's request."""

    @property
    def request_id(self) -> str: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...


class NewRequest(Protocol):
    """What is read of ``NewRequestData``."""

    @property
    def req_id(self) -> str: ...
    @property
    def block_ids(self) -> tuple[list[int], ...]: ...


class CachedRequests(Protocol):
    """What is read of ``CachedRequestData``."""

    @property
    def req_ids(self) -> Sequence[str]: ...
    @property
    def resumed_req_ids(self) -> Collection[str]: ...
    @property
    def new_block_ids(self) -> Sequence[tuple[list[int], ...] | None]: ...


class SchedulerOutput(Protocol):
    """What is read of one step's ``SchedulerOutput`` in every version."""

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequest]: ...
    @property
    def scheduled_cached_reqs(self) -> CachedRequests: ...
    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...


@attrs.frozen
class Probe:
    """An answer of the daemon and its question: hashes are chained, the last one says all."""

    first: int
    count: int
    last_hash: bytes
    hit_blocks: int
    lease: Lease | None
    asked_at: float

    def answers(self, first: int, hashes: Sequence[bytes]) -> bool:
        """Was the question the same?"""
        return self.first == first and self.count == len(hashes) and self.last_hash == hashes[-1]


@attrs.define(eq=False)
class Tracked:
    """One request between its first hook and ``request_finished``."""

    request: Request
    probe: Probe | None = None
    loading: LoadOrder | None = None
    load_lease: Lease | None = None
    refused: bool = False
    """A load of it failed: it is never promised anything again, or it would ask for ever."""
    patient_until: float = 0.0
    table: list[int] = attrs.Factory(list)
    cursor: int = -1
    """Leading blocks that were dealt with; -1 before it runs for the first time, or again."""
    owes: bool = False
    """Saves were ordered and no worker reported that they are settled."""


class SchedulerHalf:
    """All methods run on the engine's scheduler thread."""

    def __init__(
        self,
        config: ConnectorConfig,
        block_tokens: int,
        querier: Querier,
        tally: Tally,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``querier`` is this half's door to the daemon."""
        self._config = config
        self._block_tokens = block_tokens
        self._querier = querier
        self._tally = tally
        self._clock = clock
        self._requests: dict[str, Tracked] = {}
        self._loading: dict[str, Tracked] = {}
        self._new_loads: list[LoadOrder] = []
        self._last_saves: list[SaveOrder] = []
        self._finished: set[str] = set()
        self._offered: OrderedDict[bytes, float] = OrderedDict()
        self._boot_id = b""

    # --- matching and loading --------------------------------------------------------------------

    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens behind ``local_tokens`` that the cache holds; (None, False): ask again.

        Asked every step until the request is admitted, so an answer is kept as long as the question
        stays the same.  At least one token is left to compute.
        """
        tracked = self._track(request)
        hashes = self._wanted(tracked, local_tokens)
        if not hashes:
            self._drop_probe(tracked)
            return 0, False
        budget = Budget(self._config.hook_budget_s, self._clock)
        first = local_tokens // self._block_tokens
        probe = tracked.probe
        if probe is None or not probe.answers(first, hashes) or not self._fresh(probe, budget):
            self._drop_probe(tracked)
            probe = self._ask(tracked, first, hashes, budget)
            if probe is None:
                return self._not_now(tracked)
            tracked.probe = probe
        tracked.patient_until = 0.0
        return probe.hit_blocks * self._block_tokens, probe.hit_blocks > 0

    def _wanted(self, tracked: Tracked, local_tokens: int) -> list[BlockHash]:
        """Hashes worth asking for: behind the local hit, at least one token before the end."""
        request = tracked.request
        if (
            not self._config.loads
            or tracked.refused
            or tracked.loading is not None
            or local_tokens % self._block_tokens
            or getattr(request, "skip_reading_prefix_cache", False)
        ):
            return []
        limit = (request.num_tokens - 1) // self._block_tokens
        return [
            BlockHash(h) for h in request.block_hashes[local_tokens // self._block_tokens : limit]
        ]

    def _fresh(self, probe: Probe, budget: Budget) -> bool:
        """May the kept answer still be given?  Renews a lease in the second half of its life."""
        age = self._clock() - probe.asked_at
        if probe.lease is None:
            return age < MISS_VALID_S
        return self._querier.keep(probe.lease, budget)

    def _ask(
        self, tracked: Tracked, first: int, hashes: list[BlockHash], budget: Budget
    ) -> Probe | None:
        """One query.  None: the cache is still loading."""
        request = tracked.request
        parent = request.block_hashes[first - 1] if first else b""
        reply = self._querier.query(QueryRequest(0, hashes, parent, request.request_id), budget)
        if reply is not None and not isinstance(reply, Ready):
            return None
        hit = min(reply.hit_count, len(hashes)) if reply is not None else 0
        lease = self._querier.lease_of(reply) if reply is not None and hit else None
        self._tally.add("hit_blocks", hit)
        self._tally.add("miss_blocks", len(hashes) - hit)
        return Probe(first, len(hashes), hashes[-1], hit, lease, self._clock())

    def _not_now(self, tracked: Tracked) -> tuple[int | None, bool]:
        """The daemon fetches from a lower tier: wait, but not for ever."""
        now = self._clock()
        if not tracked.patient_until:
            tracked.patient_until = now + LOADING_PATIENCE_S
        if now < tracked.patient_until:
            return None, False
        return 0, False

    def allocated(self, request: Request, block_ids: Sequence[int], external_tokens: int) -> None:
        """vLLM allocated the whole table; ``external_tokens`` of it are ours to fill.

        Called a second time, with 0, when the load has ended.
        """
        tracked = self._track(request)
        probe, tracked.probe = tracked.probe, None
        if external_tokens <= 0:
            self._give_back(probe.lease if probe is not None else None)
            return
        count = external_tokens // self._block_tokens
        first = probe.first if probe is not None else len(block_ids) - count
        token = probe.lease.token if probe is not None and probe.lease is not None else b""
        if probe is None or count > probe.hit_blocks:
            # Promised by nobody: the workers report it failed, and vLLM computes it.
            self._tally.add("load_mismatches")
            token = b""
        order = LoadOrder(request.request_id, token, tuple(block_ids[first : first + count]))
        if token:
            self._watch_daemon()
            self._note_offered(request.block_hashes[first : first + count])
        tracked.loading = order
        tracked.load_lease = probe.lease if probe is not None else None
        self._loading[request.request_id] = tracked
        self._new_loads.append(order)

    def loads_ended(
        self, done: Iterable[str], invalid_blocks: Collection[int], failed: Collection[str]
    ) -> None:
        """Reports of all workers on loads; a request with a failed block is remembered."""
        bad = frozenset(invalid_blocks)
        for request_id, tracked in self._loading.items():
            blocks = tracked.loading.block_ids if tracked.loading is not None else ()
            if request_id in failed or not bad.isdisjoint(blocks):
                tracked.refused = True
        for request_id in done:
            ended = self._loading.pop(request_id, None)
            if ended is not None:
                ended.loading = None
                self._give_back(ended.load_lease)
                ended.load_lease = None

    # --- saving ----------------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepOrders:
        """The orders of one step.  ``output`` is only read."""
        self._querier.settle(Budget(self._config.hook_budget_s, self._clock))
        self._watch_daemon()
        self._follow_tables(output)
        saves, self._last_saves = self._last_saves, []
        for request_id, tokens in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is not None and self._config.saves:
                saves += self._due(tracked, tracked.request.num_computed_tokens + tokens)
        revoked = frozenset(getattr(output, "preempted_req_ids", None) or ())
        for request_id in revoked:
            self._rebase(request_id)
        loads, self._new_loads = self._new_loads, []
        finished, self._finished = frozenset(self._finished), set()
        return StepOrders(
            loads=tuple(loads),
            saves=tuple(saves),
            revoked=revoked,
            finished=finished,
            identity_wanted=not self._querier.has_identity,
        )

    def _watch_daemon(self) -> None:
        """Another daemon has nothing of what was offered to the one before."""
        if self._querier.boot_id != self._boot_id:
            self._boot_id = self._querier.boot_id
            self._offered.clear()

    def _follow_tables(self, output: SchedulerOutput) -> None:
        """Block tables are told as differences; from 0.29 the live table can be read as well."""
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None:
                tracked.table = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            if request_id in cached.resumed_req_ids:
                self._rebase(request_id)
                tracked.table = list(new_ids[0]) if new_ids else []
            elif new_ids is not None:
                tracked.table.extend(new_ids[0])
        state = getattr(output, "kv_connector_block_state", None)
        if state is None:
            return
        for request_id in output.num_scheduled_tokens:
            tracked = self._requests.get(request_id)
            live = state.get_block_ids(request_id) if tracked is not None else None
            if tracked is not None and live is not None:
                tracked.table = list(live[0])

    def _rebase(self, request_id: str) -> None:
        """Its blocks are gone: whatever runs next starts from a new table."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.cursor, tracked.table = -1, []

    def _due(self, tracked: Tracked, computed_tokens: int) -> list[SaveOrder]:
        """Blocks that are full, hashed and computed once this step has run, not dealt with before.

        Hashes lag behind under asynchronous scheduling, tables under preemption; the cursor waits
        for the slowest of the three.
        """
        request = tracked.request
        size = self._block_tokens
        if tracked.cursor < 0:
            tracked.cursor = self._skip_offered(tracked, request.num_computed_tokens // size)
        end = min(len(request.block_hashes), len(tracked.table), computed_tokens // size)
        start, tracked.cursor = tracked.cursor, max(tracked.cursor, end)
        orders: list[SaveOrder] = []
        at = start
        while at < end:
            stop = at
            while stop < end and tracked.table[stop] != NULL_BLOCK:
                stop += 1
            if stop > at:
                orders.append(self._save_order(tracked, at, stop))
            at = stop + 1
        return orders

    def _save_order(self, tracked: Tracked, start: int, stop: int) -> SaveOrder:
        request = tracked.request
        hashes = tuple(request.block_hashes[start:stop])
        self._note_offered(hashes)
        tracked.owes = True
        parent = request.block_hashes[start - 1] if start else b""
        return SaveOrder(request.request_id, parent, hashes, tuple(tracked.table[start:stop]))

    def _skip_offered(self, tracked: Tracked, ready_blocks: int) -> int:
        """How many of the blocks that were there before the first step need no offer.

        They were loaded from the daemon, or hit in the engine's own cache; the latter are offered
        again if that was long ago or to another daemon, which then has the whole prefix.
        """
        since = self._clock() - OFFERED_S
        for i, block_hash in enumerate(tracked.request.block_hashes[:ready_blocks]):
            if self._offered.get(block_hash, float("-inf")) < since:
                return i
        return ready_blocks

    def _note_offered(self, hashes: Iterable[bytes]) -> None:
        now = self._clock()
        for block_hash in hashes:
            self._offered[block_hash] = now
            self._offered.move_to_end(block_hash)
        while len(self._offered) > OFFERED_MAX:
            self._offered.popitem(last=False)

    # --- ends ------------------------------------------------------------------------------------

    def finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Also for aborted and never scheduled ones.  True: keep its blocks until workers report.

        While a load runs vLLM keeps the blocks anyway, until that is reported; holding them twice
        would free them twice.
        """
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        self._drop_probe(tracked)
        if tracked.loading is not None:
            return False
        if self._config.saves and tracked.cursor >= 0 and block_ids:
            tracked.table = list(block_ids)
            self._last_saves += self._due(tracked, request.num_computed_tokens)
        if tracked.owes:
            self._finished.add(request.request_id)
        return tracked.owes

    def close(self) -> None:
        """Give back what nobody will use."""
        for tracked in self._requests.values():
            self._drop_probe(tracked)
        self._requests.clear()
        self._querier.close()

    def _track(self, request: Request) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = self._requests[request.request_id] = Tracked(request)
        elif tracked.request is not request:  # a session that goes on under the same name
            tracked.request = request
        return tracked

    def _drop_probe(self, tracked: Tracked) -> None:
        probe, tracked.probe = tracked.probe, None
        self._give_back(probe.lease if probe is not None else None)

    def _give_back(self, lease: Lease | None) -> None:
        if lease is not None:
            self._querier.give_back(lease)
