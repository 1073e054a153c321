"""Time limits, breaker and sessions on the scheduler's path."""

from __future__ import annotations

import itertools

from pegaflow.connector.breaker import PAUSE_MAX_S, Breaker
from pegaflow.errors import DeadlineExceeded, NotReady, Overloaded, PeerGone, UnknownInstance
from tests.connector.fakes import SIZE, Bench, Output, identity, request


def is_closed(breaker: Breaker) -> bool:
    return breaker.closed


def test_breaker_opens_on_a_failure_and_closes_on_a_probe_begun_later() -> None:
    breaker = Breaker()
    assert not is_closed(breaker)
    breaker.probe_worked(began=1, now=2)
    assert is_closed(breaker)
    breaker.call_failed(now=5)
    breaker.probe_worked(began=4, now=6)  # asked before the failure: says nothing about it
    assert not is_closed(breaker)
    breaker.probe_worked(began=5.1, now=6)
    assert is_closed(breaker)
    breaker.probe_failed(now=7)
    assert not is_closed(breaker)


def test_breaker_pauses_longer_after_each_failure_up_to_a_bound() -> None:
    breaker = Breaker()
    now, pauses = 0.0, []
    for _ in range(12):
        breaker.probe_worked(now, now)
        breaker.call_failed(now)
        start = now
        while not breaker.closed:
            now += 0.05
            breaker.probe_worked(now, now)
        pauses.append(now - start)
    assert pauses[0] <= 0.05 + 1e-9
    assert all(a <= b + 1e-6 for a, b in itertools.pairwise(pauses))
    assert PAUSE_MAX_S <= pauses[-1] <= PAUSE_MAX_S + 0.1
    breaker.probe_worked(now, now)
    breaker.call_worked()
    breaker.call_failed(now)
    breaker.probe_worked(now + 0.01, now + 0.01)
    assert breaker.closed


def test_a_daemon_that_hangs_costs_one_time_limit_then_nothing() -> None:
    bench = Bench()
    bench.daemon.delay_s = 60
    bench.daemon.trouble = DeadlineExceeded("slow")
    before = bench.clock.now
    for i in range(100):
        assert bench.half.match(request(str(i), seed=i), 0) == (0, False)
        bench.half.step(Output())
    assert bench.clock.now - before <= bench.config.query_timeout_s + 1e-9
    assert bench.tally.total("queries_skipped") == 99


def test_one_hook_never_exceeds_its_budget_whatever_is_due() -> None:
    """A renewal that hangs, then a query that would need a new session."""
    bench = Bench()
    asked = request()
    bench.store(asked, 4)
    bench.half.match(asked, 0)
    bench.clock.now += 400
    bench.daemon.delay_s = 60
    bench.daemon.trouble = bench.daemon.refuse = DeadlineExceeded("slow")
    before = bench.clock.now
    assert bench.half.match(asked, 0) == (0, False)
    assert bench.clock.now - before <= bench.config.hook_budget_s + 1e-9


def test_a_session_lost_while_idle_is_replaced_within_the_same_question() -> None:
    bench = Bench()
    asked = request()
    bench.store(asked, 4)
    first = bench.daemon.sessions[0]

    def gone(*_: object) -> None:
        raise PeerGone("idle for too long")

    first.query = gone  # type: ignore[method-assign, assignment]
    assert bench.half.match(asked, 0) == (4 * SIZE, True)
    assert first.closed
    assert len(bench.daemon.sessions) == 2


def test_a_dead_daemon_is_tried_once() -> None:
    bench = Bench()
    bench.daemon.trouble = bench.daemon.refuse = PeerGone("refused")
    for i in range(10):
        assert bench.half.match(request(str(i), seed=i), 0) == (0, False)
    assert not bench.breaker.closed
    assert len(bench.daemon.queries) == 1


def test_leases_of_a_lost_session_are_not_promised_again() -> None:
    bench = Bench()
    a, b = request("a"), request("b", seed=1)
    for one in (a, b):
        bench.store(one, 4)
    bench.half.match(a, 0)
    bench.daemon.trouble = PeerGone("reset")
    bench.half.match(b, 0)
    bench.daemon.trouble = None
    assert bench.half.match(a, 0) == (0, False)
    bench.breaker.probe_worked(bench.clock.now + 1, bench.clock.now + 1)
    bench.clock.now += 1
    assert bench.half.match(a, 0) == (4 * SIZE, True)


def test_a_session_with_an_unanswered_query_ends_with_its_last_lease() -> None:
    """The daemon may answer late and lease blocks for nobody: only the session's end frees them."""
    bench = Bench()
    a, b = request("a"), request("b", seed=1)
    for one in (a, b):
        bench.store(one, 4)
    bench.half.match(a, 0)
    bench.half.allocated(a, [1, 2, 3, 4], 4 * SIZE)
    bench.half.step(Output())
    bench.daemon.trouble = DeadlineExceeded("slow")
    bench.half.match(b, 0)
    assert not bench.daemon.sessions[0].closed  # the workers still load with its lease
    bench.daemon.trouble = None
    bench.half.loads_ended({"a"}, set(), set())
    bench.half.step(Output())
    assert bench.daemon.sessions[0].closed


def test_an_unknown_instance_means_a_new_session() -> None:
    bench = Bench()
    bench.daemon.trouble = UnknownInstance("restarted")
    bench.half.match(request(), 0)
    assert bench.daemon.sessions[0].closed
    assert bench.breaker.closed


def test_overload_opens_the_breaker_and_missing_ranks_do_not() -> None:
    bench = Bench()
    bench.daemon.trouble = NotReady("1 of 2")
    bench.half.match(request(), 0)
    assert bench.breaker.closed
    bench.daemon.trouble = Overloaded("64 calls")
    bench.half.match(request("b", seed=1), 0)
    assert not bench.breaker.closed


def test_absent_at_start_nothing_is_tried_until_a_probe_works() -> None:
    bench = Bench(identified=False)
    bench.daemon.refuse = PeerGone("refused")
    bench.querier.identify(identity())
    attempts = len(bench.daemon.timeouts)
    asked = request()
    bench.store(asked, 4)
    bench.half.match(asked, 0)
    assert len(bench.daemon.timeouts) == attempts
    bench.daemon.refuse = None
    bench.breaker.probe_worked(bench.clock.now + 1, bench.clock.now + 1)
    bench.clock.now += 1
    assert bench.half.match(asked, 0) == (4 * SIZE, True)
    assert all(t <= bench.config.query_timeout_s for t in bench.daemon.timeouts[attempts:])
