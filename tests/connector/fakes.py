"""Fakes of what vLLM's scheduler hands to a connector, and of the daemon's session."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs

from pegaflow.connector.breaker import Breaker
from pegaflow.connector.common import ConnectorConfig
from pegaflow.connector.guard import Complaints
from pegaflow.connector.identity import Identity, make_identity
from pegaflow.connector.querier import Querier
from pegaflow.connector.tally import Tally
from pegaflow.connector.vllm.scheduler import SchedulerHalf
from pegaflow.errors import PegaflowError
from pegaflow.model.keys import LeaseToken
from pegaflow.model.messages import Loading, Opened, QueryReply, QueryRequest, Ready

SIZE = 4
"""Tokens a block."""

FIELDS = {
    "model": "org/model",
    "revision": "r1",
    "dtype": "bfloat16",
    "kv-layout": "f" * 64,
    "rank-geometry": "tp=1 pp=1 dcp=1 pcp=1",
    "block-size-tokens": str(SIZE),
    "hash-algorithm": "sha256",
    "hash-seed-check": "a1",
}


def identity() -> Identity:
    return make_identity(FIELDS)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def block_hashes(tokens: Sequence[int]) -> list[bytes]:
    """Chained, one a full block."""
    hashes: list[bytes] = []
    for end in range(SIZE, len(tokens) + 1, SIZE):
        parent = hashes[-1] if hashes else b""
        text = parent + repr(tuple(tokens[end - SIZE : end])).encode()
        hashes.append(hashlib.sha256(text).digest())
    return hashes


@attrs.define(eq=False)
class FakeRequest:
    request_id: str
    tokens: list[int]
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    lag: int = 0
    """Sampled tokens whose hashes are not there yet (asynchronous scheduling)."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return block_hashes(self.tokens[: len(self.tokens) - self.lag])


@attrs.define
class New:
    req_id: str
    block_ids: tuple[list[int], ...]


@attrs.define
class Cached:
    req_ids: list[str] = attrs.Factory(list)
    resumed_req_ids: set[str] = attrs.Factory(set)
    new_block_ids: list[tuple[list[int], ...] | None] = attrs.Factory(list)


@attrs.define
class Output:
    """``SchedulerOutput`` of 0.28: no live block state."""

    scheduled_new_reqs: list[New] = attrs.Factory(list)
    scheduled_cached_reqs: Cached = attrs.Factory(Cached)
    num_scheduled_tokens: dict[str, int] = attrs.Factory(dict)
    preempted_req_ids: set[str] | None = None


@attrs.define
class LiveState:
    tables: dict[str, tuple[list[int], ...]]

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...] | None:
        return self.tables.get(request_id)


@attrs.define
class LiveOutput(Output):
    """From 0.29."""

    kv_connector_block_state: LiveState | None = None


class FakeSession:
    """Answers from a set of hashes; counts; takes time on a fake clock."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.opened = Opened(1, daemon.boot_id, "@h", "0")
        self.closed = False

    def _call(self, timeout_s: float) -> None:
        self.daemon.timeouts.append(timeout_s)
        self.daemon.clock.now += min(self.daemon.delay_s, timeout_s)
        if self.daemon.trouble is not None:
            raise self.daemon.trouble

    def query(self, request: QueryRequest, timeout_s: float) -> QueryReply:
        self.daemon.queries.append(request)
        self._call(timeout_s)
        if self.daemon.still_loading:
            return Loading()
        hit = 0
        while hit < len(request.hashes) and request.hashes[hit] in self.daemon.held:
            hit += 1
        token = LeaseToken(len(self.daemon.queries).to_bytes(16, "big"))
        return Ready(hit, token if hit else LeaseToken(b""), 600_000)

    def release(self, leases: Sequence[LeaseToken], timeout_s: float) -> None:
        self._call(timeout_s)
        self.daemon.released += leases

    def renew(self, lease: LeaseToken, timeout_s: float) -> int:
        self._call(timeout_s)
        self.daemon.renewed.append(lease)
        return 600_000

    def ping(self, timeout_s: float) -> bytes:
        self._call(timeout_s)
        return self.daemon.boot_id

    def close(self) -> None:
        self.closed = True


class FakeDaemon:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.boot_id = b"1" * 16
        self.held: set[bytes] = set()
        self.still_loading = False
        self.delay_s = 0.0
        self.trouble: PegaflowError | None = None
        self.refuse: PegaflowError | None = None
        self.queries: list[QueryRequest] = []
        self.released: list[LeaseToken] = []
        self.renewed: list[LeaseToken] = []
        self.timeouts: list[float] = []
        self.sessions: list[FakeSession] = []

    def connect(self, identity: Identity, timeout_s: float) -> FakeSession:
        self.timeouts.append(timeout_s)
        if self.refuse is not None:
            self.clock.now += min(self.delay_s, timeout_s)
            raise self.refuse
        self.sessions.append(FakeSession(self))
        return self.sessions[-1]


class Bench:
    """A scheduler half on a fake daemon."""

    def __init__(self, config: ConnectorConfig | None = None, *, identified: bool = True) -> None:
        self.clock = Clock()
        self.daemon = FakeDaemon(self.clock)
        self.tally = Tally()
        self.config = config or ConnectorConfig("unix:/nowhere")
        self.querier = Querier(
            self.config, self.daemon.connect, self.tally, Complaints(), self.clock
        )
        if identified:
            self.querier.identify(identity())
        self.half = SchedulerHalf(self.config, SIZE, self.querier, self.tally, self.clock)

    @property
    def breaker(self) -> Breaker:
        return self.querier.breaker

    def store(self, request: FakeRequest, blocks: int) -> None:
        self.daemon.held.update(request.block_hashes[:blocks])


def request(name: str = "r", tokens: int = 18, seed: int = 0) -> FakeRequest:
    return FakeRequest(name, [seed * 1000 + i for i in range(tokens)])
