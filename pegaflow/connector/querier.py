"""The scheduler thread's door to the daemon: every call has a budget, the breaker is asked first.

A second thread with a connection of its own probes the daemon, so that the scheduler thread never
spends time on one that is dead, stopped or not there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from pegaflow.connector.breaker import Breaker
from pegaflow.connector.common import ConnectorConfig
from pegaflow.connector.guard import Complaints
from pegaflow.connector.identity import Identity
from pegaflow.connector.tally import Tally
from pegaflow.errors import (
    DeadlineExceeded,
    LeaseExpired,
    NotReady,
    Overloaded,
    PeerGone,
    PegaflowError,
    ShuttingDown,
    UnknownInstance,
)
from pegaflow.model.keys import LeaseToken
from pegaflow.model.messages import Opened, QueryReply, QueryRequest, Ready

RETIRED_MAX = 4
MIN_CALL_S = 0.002
"""With less than this left of a budget a call is not begun."""


class Session(Protocol):
    """What is used of :class:`pegaflow.client.blocking.BlockingSession`."""

    opened: Opened

    def query(self, request: QueryRequest, timeout_s: float) -> QueryReply:
        """Ask."""

    def release(self, leases: Sequence[LeaseToken], timeout_s: float) -> None:
        """Give back."""

    def renew(self, lease: LeaseToken, timeout_s: float) -> int:
        """Start its time anew."""

    def ping(self, timeout_s: float) -> bytes:
        """Boot id."""

    def close(self) -> None:
        """Ends all that the session owned."""


Connect = Callable[[Identity, float], Session]
"""Opens a session within so many seconds; raises of the error tree."""


class Budget:
    """What is left of the time that one hook may take."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts now."""
        self._clock = clock
        self._end = clock() + seconds

    def left(self, at_most: float) -> float:
        """Seconds, at most ``at_most``; not positive when it is used up."""
        return min(at_most, self._end - self._clock())


@attrs.define(eq=False)
class _Line:
    """A session with the leases that depend on it: they end with it."""

    session: Session
    alive: bool = True
    leases: int = 0
    to_release: list[LeaseToken] = attrs.Factory(list)


@attrs.define(eq=False)
class Lease:
    """Blocks held for one request, until handed out to the workers or given back."""

    token: LeaseToken
    line: _Line
    ttl_s: float
    since: float
    ended: bool = False


class Querier:
    """Used by the scheduler thread alone, but for ``breaker`` and ``boot_id``."""

    def __init__(
        self,
        config: ConnectorConfig,
        connect: Connect,
        tally: Tally,
        complaints: Complaints,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Idle until :meth:`identify`."""
        self._config = config
        self._connect = connect
        self._tally = tally
        self._complaints = complaints
        self._clock = clock
        self._identity: Identity | None = None
        self._line: _Line | None = None
        self._retired: list[_Line] = []
        self._last: _Line | None = None
        self.breaker = Breaker()
        self.boot_id = b""

    @property
    def has_identity(self) -> bool:
        """Do we know whose keys to ask for?"""
        return self._identity is not None

    def identify(self, identity: Identity) -> None:
        """Once, at engine start: there is time now, so the first connection is made here."""
        if self._identity is not None:
            return
        self._identity = identity
        began = self._clock()
        if self._open(self._config.attach_timeout_s) is not None:
            self.breaker.probe_worked(self._clock(), self._clock())
        self._tally.observe("attach_seconds", self._clock() - began)

    # --- calls -----------------------------------------------------------------------------------

    def query(self, request: QueryRequest, budget: Budget) -> QueryReply | None:
        """None: no answer, which is a miss."""
        if not self.breaker.closed:
            self._tally.add("queries_skipped")
            return None
        for attempt in (0, 1):
            fresh = self._line is None
            line = self._ready_line(budget)
            timeout = budget.left(self._config.query_timeout_s)
            if line is None or timeout < MIN_CALL_S:
                return None
            began = self._clock()
            try:
                reply = line.session.query(request, timeout)
            except PeerGone as exc:
                if not fresh and attempt == 0:
                    # Idle for long, or another daemon by now; the prober says that one serves.
                    self._lose(line)
                    continue
                self._failed(line, exc, "query")
                return None
            except PegaflowError as exc:
                self._failed(line, exc, "query")
                return None
            self.breaker.call_worked()
            self._tally.add("queries")
            self._tally.observe("query_seconds", self._clock() - began)
            self._last = line
            return reply
        return None

    def lease_of(self, ready: Ready) -> Lease:
        """The lease of the answer that :meth:`query` gave just now."""
        line = self._last
        assert line is not None
        line.leases += 1
        return Lease(ready.lease, line, ready.ttl_ms / 1000, self._clock())

    def keep(self, lease: Lease, budget: Budget) -> bool:
        """Is it still ours?  In the second half of its life it is renewed first."""
        if not lease.line.alive:
            return False
        age = self._clock() - lease.since
        if age < lease.ttl_s / 2:
            return True
        timeout = budget.left(self._config.query_timeout_s)
        if not self.breaker.closed or timeout < MIN_CALL_S:
            return age < lease.ttl_s * 0.9
        try:
            lease.ttl_s = lease.line.session.renew(lease.token, timeout) / 1000
        except LeaseExpired:
            return False
        except PegaflowError as exc:
            self._failed(lease.line, exc, "renew")
            return False
        lease.since = self._clock()
        return True

    def give_back(self, lease: Lease) -> None:
        """It was used, or nobody will use it: released at the next :meth:`settle`."""
        if lease.ended:
            return
        lease.ended = True
        lease.line.leases -= 1
        if lease.line.alive:
            lease.line.to_release.append(lease.token)

    def settle(self, budget: Budget) -> None:
        """Once a step: release what was given back, tell the gauges."""
        self._tally.set("breaker_open", 0.0 if self.breaker.closed else 1.0)
        for line in [line for line in self._retired if line.leases <= 0]:
            self._lose(line)  # its end releases all that is left
        for line in [*self._retired, *([self._line] if self._line is not None else [])]:
            timeout = budget.left(self._config.query_timeout_s)
            if not line.to_release or not self.breaker.closed or timeout < MIN_CALL_S:
                continue
            tokens, line.to_release = line.to_release, []
            try:
                line.session.release(tokens, timeout)
            except PegaflowError as exc:
                self._failed(line, exc, "release")

    def close(self) -> None:
        """Ends everything that was leased.  On the scheduler thread."""
        for line in [*self._retired, *([self._line] if self._line else [])]:
            line.alive = False
            line.session.close()
        self._line, self._retired = None, []

    # --- connections -----------------------------------------------------------------------------

    def _ready_line(self, budget: Budget) -> _Line | None:
        if self._line is not None:
            return self._line
        timeout = budget.left(self._config.query_timeout_s)
        return self._open(timeout) if timeout >= MIN_CALL_S else None

    def _open(self, timeout_s: float) -> _Line | None:
        if self._identity is None:
            return None
        try:
            session = self._connect(self._identity, timeout_s)
        except PegaflowError as exc:
            self.breaker.call_failed(self._clock())
            self._tally.add("query_failures")
            self._complaints.warn("open", f"no session with the daemon: {exc}")
            return None
        self.boot_id = session.opened.boot_id
        self._line = _Line(session)
        return self._line

    def _failed(self, line: _Line, exc: PegaflowError, what: str) -> None:
        """Sort a failure: does the connection live, and is it worth asking again soon?"""
        if isinstance(exc, NotReady):  # some rank registers just now: a miss
            self._tally.add("queries_not_ready")
            return
        self._tally.add("query_failures")
        self._complaints.warn(what, f"{what} failed, treated as a miss: {exc}")
        if isinstance(exc, (PeerGone, UnknownInstance)):
            self._lose(line)
        elif isinstance(exc, DeadlineExceeded):
            # The daemon may still answer it and lease blocks for nobody: end this session as soon
            # as no other request's lease hangs on it.
            self._retire(line)
        if isinstance(exc, (PeerGone, DeadlineExceeded, Overloaded, ShuttingDown)):
            self.breaker.call_failed(self._clock())

    def _lose(self, line: _Line) -> None:
        line.alive = False
        line.session.close()
        if self._line is line:
            self._line = None
        elif line in self._retired:
            self._retired.remove(line)

    def _retire(self, line: _Line) -> None:
        if self._line is line:
            self._line = None
        if line.leases <= 0:
            self._lose(line)
        elif line not in self._retired:
            self._retired.append(line)
        while len(self._retired) > RETIRED_MAX:
            self._lose(self._retired[0])


class Prober(threading.Thread):
    """Asks the daemon ten times a second whether it lives; owns a connection of its own."""

    def __init__(
        self,
        config: ConnectorConfig,
        identity: Identity,
        connect: Connect,
        querier: Querier,
        complaints: Complaints,
    ) -> None:
        """``querier.breaker`` and ``querier.boot_id`` are told."""
        super().__init__(name="pegaflow-prober", daemon=True)
        self._config = config
        self._identity = identity
        self._connect = connect
        self._querier = querier
        self._complaints = complaints
        self._end = threading.Event()

    def run(self) -> None:
        """Until :meth:`stop`."""
        session: Session | None = None
        while not self._end.is_set():
            began = time.monotonic()
            try:
                if session is None:
                    session = self._connect(self._identity, self._config.probe_timeout_s)
                    boot_id = session.opened.boot_id
                else:
                    boot_id = session.ping(self._config.probe_timeout_s)
            except Exception as exc:
                self._querier.breaker.probe_failed(time.monotonic())
                if not isinstance(exc, (PeerGone, DeadlineExceeded)):
                    self._complaints.warn("probe", f"the daemon refuses this engine: {exc}")
                if session is not None:
                    session.close()
                session = None
            else:
                self._querier.boot_id = boot_id
                self._querier.breaker.probe_worked(began, time.monotonic())
            self._end.wait(self._config.probe_interval_s)
        if session is not None:
            session.close()

    def stop(self) -> None:
        """Ask it to end; it is a daemon thread and holds nothing that matters."""
        self._end.set()
