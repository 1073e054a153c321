"""The scheduler half: what is promised, held, loaded, given back."""

from __future__ import annotations

import attrs
import pytest

from pegaflow.connector.common import ConnectorConfig
from pegaflow.errors import LeaseExpired, NotReady
from tests.connector.fakes import SIZE, Bench, Output, request

CONFIG = ConnectorConfig("unix:/nowhere")


def test_hit_is_block_aligned_and_leaves_a_token_to_compute() -> None:
    bench = Bench()
    whole = request(tokens=4 * SIZE)
    bench.store(whole, 4)
    assert bench.half.match(whole, 0) == (3 * SIZE, True)
    longer = request("l", tokens=4 * SIZE + 1)
    assert bench.half.match(longer, 0) == (4 * SIZE, True)


def test_only_hashes_behind_the_local_hit_are_asked_with_their_parent() -> None:
    bench = Bench()
    asked = request()
    bench.store(asked, 4)
    assert bench.half.match(asked, 2 * SIZE) == (2 * SIZE, True)
    query = bench.daemon.queries[-1]
    assert query.parent == asked.block_hashes[1]
    assert query.hashes == asked.block_hashes[2:4]


@pytest.mark.parametrize("tokens", [1, SIZE - 1, SIZE])
def test_a_prompt_within_one_block_asks_nothing(tokens: int) -> None:
    bench = Bench()
    assert bench.half.match(request(tokens=tokens), 0) == (0, False)
    assert bench.daemon.queries == []


def test_a_miss_is_no_asynchronous_load() -> None:
    bench = Bench()
    assert bench.half.match(request(), 0) == (0, False)  # (0, True) is illegal
    assert bench.tally.total("miss_blocks") == 4


def test_a_hit_of_part_of_a_block_locally_asks_nothing() -> None:
    bench = Bench()
    assert bench.half.match(request(), SIZE + 1) == (0, False)
    assert bench.daemon.queries == []


def test_save_only_and_requests_that_must_not_read_ask_nothing() -> None:
    bench = Bench(attrs.evolve(CONFIG, mode="save_only"))
    stored = request()
    bench.store(stored, 4)
    assert bench.half.match(stored, 0) == (0, False)
    bench = Bench()
    bench.store(stored, 4)
    stored.skip_reading_prefix_cache = True
    assert bench.half.match(stored, 0) == (0, False)
    assert bench.daemon.queries == []


def test_the_same_question_is_asked_once() -> None:
    bench = Bench()
    asked = request()
    bench.store(asked, 3)
    answers = {bench.half.match(asked, 0) for _ in range(5)}
    assert answers == {(3 * SIZE, True)}
    assert len(bench.daemon.queries) == 1


def test_a_different_question_gives_the_old_lease_back() -> None:
    bench = Bench()
    asked = request()
    bench.store(asked, 4)
    bench.half.match(asked, 0)
    assert bench.half.match(asked, SIZE) == (3 * SIZE, True)
    bench.half.step(Output())
    assert bench.daemon.released == [(1).to_bytes(16, "big")]


def test_a_lease_is_renewed_in_the_second_half_of_its_life() -> None:
    bench = Bench()
    asked = request()
    bench.store(asked, 4)
    bench.half.match(asked, 0)
    bench.clock.now += 200
    bench.half.match(asked, 0)
    assert bench.daemon.renewed == []
    bench.clock.now += 200
    assert bench.half.match(asked, 0) == (4 * SIZE, True)
    assert len(bench.daemon.renewed) == 1
    assert len(bench.daemon.queries) == 1


def test_a_lease_that_is_gone_is_asked_for_again() -> None:
    bench = Bench()
    asked = request()
    bench.store(asked, 4)
    bench.half.match(asked, 0)
    bench.clock.now += 400
    bench.daemon.trouble = LeaseExpired("gone")
    assert bench.half.match(asked, 0) == (0, False)  # the fake fails the new query too
    bench.daemon.trouble = None
    bench.clock.now += 1
    assert bench.half.match(asked, 0) == (4 * SIZE, True)


def test_a_miss_is_kept_for_a_moment_only() -> None:
    bench = Bench()
    asked = request()
    bench.half.match(asked, 0)
    bench.half.match(asked, 0)
    assert len(bench.daemon.queries) == 1
    bench.store(asked, 4)
    bench.clock.now += 0.2
    assert bench.half.match(asked, 0) == (4 * SIZE, True)


def test_loading_asks_again_but_not_for_ever() -> None:
    bench = Bench()
    asked = request()
    bench.daemon.still_loading = True
    assert bench.half.match(asked, 0) == (None, False)
    bench.clock.now += 1
    assert bench.half.match(asked, 0) == (None, False)
    bench.clock.now += 1.1
    assert bench.half.match(asked, 0) == (0, False)


def test_ranks_that_register_just_now_are_a_miss_that_opens_no_breaker() -> None:
    bench = Bench()
    bench.daemon.trouble = NotReady("1 of 2")
    assert bench.half.match(request(), 0) == (0, False)
    assert bench.breaker.closed


def test_the_load_goes_where_vllm_allocated_behind_the_local_hit() -> None:
    bench = Bench()
    asked = request()
    bench.store(asked, 4)
    bench.half.match(asked, SIZE)
    bench.half.allocated(asked, [10, 11, 12, 13, 14], 3 * SIZE)
    bench.half.allocated(asked, [10, 11, 12, 13, 14], 0)  # the second call ends nothing
    (order,) = bench.half.step(Output()).loads
    assert order.block_ids == (11, 12, 13)
    assert order.lease == (1).to_bytes(16, "big")
    assert bench.half.step(Output()).loads == ()


def test_the_lease_is_given_back_when_all_ranks_have_loaded() -> None:
    bench = Bench()
    asked = request()
    bench.store(asked, 4)
    bench.half.match(asked, 0)
    bench.half.allocated(asked, [1, 2, 3, 4], 4 * SIZE)
    bench.half.step(Output())
    assert bench.daemon.released == []
    bench.half.loads_ended({"r"}, set(), set())
    bench.half.step(Output())
    assert len(bench.daemon.released) == 1


def test_another_connector_of_the_engine_won_the_lease_is_given_back() -> None:
    bench = Bench()
    asked = request()
    bench.store(asked, 4)
    bench.half.match(asked, 0)
    bench.half.allocated(asked, [1, 2, 3, 4], 0)
    orders = bench.half.step(Output())
    assert orders.loads == ()
    assert len(bench.daemon.released) == 1


def test_a_load_that_nobody_promised_fails_instead_of_raising() -> None:
    bench = Bench()
    bench.half.allocated(request(), [1, 2, 3, 4], 2 * SIZE)
    (order,) = bench.half.step(Output()).loads
    assert order.lease == b""
    assert order.block_ids == (3, 4)
    assert bench.tally.total("load_mismatches") == 1


def test_a_request_whose_load_failed_is_promised_nothing_again() -> None:
    """Else vLLM takes the promise, fails, asks again, takes the promise ... for ever."""
    bench = Bench()
    asked, other = request(), request("other", seed=1)
    for one in (asked, other):
        bench.store(one, 4)
        bench.half.match(one, 0)
    bench.half.allocated(asked, [1, 2, 3, 4], 4 * SIZE)
    bench.half.allocated(other, [5, 6, 7, 8], 4 * SIZE)
    bench.half.step(Output())
    bench.half.loads_ended({"r", "other"}, {3}, set())
    assert bench.half.match(asked, 0) == (0, False)
    assert bench.half.match(other, 0) == (4 * SIZE, True)
    bench.half.finished(asked, [])
    again = request("again")  # the same tokens under another name may try
    assert bench.half.match(again, 0) == (4 * SIZE, True)


def test_failure_by_request_is_remembered_too() -> None:
    bench = Bench()
    asked = request()
    bench.store(asked, 4)
    bench.half.match(asked, 0)
    bench.half.allocated(asked, [1, 2, 3, 4], 4 * SIZE)
    bench.half.loads_ended({"r"}, set(), {"r"})
    assert bench.half.match(asked, 0) == (0, False)


def test_an_abort_before_admission_gives_the_lease_back() -> None:
    bench = Bench()
    asked = request()
    bench.store(asked, 4)
    bench.half.match(asked, 0)
    assert bench.half.finished(asked, []) is False
    bench.half.step(Output())
    assert len(bench.daemon.released) == 1


def test_an_abort_during_a_load_holds_no_blocks_twice() -> None:
    """vLLM itself keeps the blocks until the load is reported: they would be freed twice."""
    bench = Bench()
    asked = request()
    bench.store(asked, 4)
    bench.half.match(asked, 0)
    bench.half.allocated(asked, [1, 2, 3, 4], 4 * SIZE)
    bench.half.step(Output())
    assert bench.half.finished(asked, [1, 2, 3, 4]) is False
    bench.half.loads_ended({"r"}, {1, 2, 3, 4}, set())
    assert bench.half.step(Output()).finished == frozenset()
    assert len(bench.daemon.released) == 1


def test_unknown_requests_are_ignored() -> None:
    bench = Bench()
    bench.half.loads_ended({"nobody"}, {7}, {"nobody"})
    assert bench.half.finished(request("never seen"), [1]) is False


def test_closing_ends_the_session_and_with_it_all_leases() -> None:
    bench = Bench()
    asked = request()
    bench.store(asked, 4)
    bench.half.match(asked, 0)
    bench.half.close()
    assert all(session.closed for session in bench.daemon.sessions)
