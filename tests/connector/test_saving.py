"""The scheduler half: which blocks are offered to the daemon, when, and how long they are held."""

from __future__ import annotations

import attrs

from pegaflow.connector.common import ConnectorConfig, SaveOrder, StepOrders
from tests.connector.fakes import (
    SIZE,
    Bench,
    Cached,
    FakeRequest,
    LiveOutput,
    LiveState,
    New,
    Output,
    request,
)

CONFIG = ConnectorConfig("unix:/nowhere")


def admit(bench: Bench, one: FakeRequest, table: list[int], tokens: int) -> StepOrders:
    """The first step of a request that computes ``tokens``."""
    bench.half.match(one, one.num_computed_tokens)
    bench.half.allocated(one, table, 0)
    name = one.request_id
    orders = bench.half.step(Output([New(name, (table,))], Cached(), {name: tokens}))
    one.num_computed_tokens += tokens
    return orders


def go_on(bench: Bench, one: FakeRequest, tokens: int, new: list[int] | None = None) -> StepOrders:
    name = one.request_id
    cached = Cached([name], set(), [None if new is None else (new,)])
    orders = bench.half.step(Output([], cached, {name: tokens}))
    one.num_computed_tokens += tokens
    return orders


def blocks(orders: StepOrders) -> list[int]:
    return [block for order in orders.saves for block in order.block_ids]


def test_full_blocks_of_the_prompt_with_hashes_and_parents() -> None:
    bench = Bench()
    one = request(tokens=14)
    orders = admit(bench, one, [5, 6, 7, 8], 14)
    assert orders.saves == (SaveOrder("r", b"", tuple(one.block_hashes[:3]), (5, 6, 7)),)


def test_chunked_prefill_saves_each_block_once() -> None:
    bench = Bench()
    one = request(tokens=14)
    assert blocks(admit(bench, one, [5, 6], 6)) == [5]
    orders = go_on(bench, one, 6, [7])
    assert blocks(orders) == [6, 7]
    assert orders.saves[0].parent == one.block_hashes[0]
    assert blocks(go_on(bench, one, 2, [8])) == []


def test_decode_blocks_are_saved_when_they_are_full() -> None:
    bench = Bench()
    one = request(tokens=4)
    assert blocks(admit(bench, one, [5], 4)) == [5]
    saved: list[int] = []
    for i in range(9):
        one.tokens.append(900 + i)
        new = [6 + i // SIZE] if one.num_computed_tokens % SIZE == 0 else None
        saved += blocks(go_on(bench, one, 1, new))
    assert saved == [6, 7]


def test_hashes_that_lag_behind_are_waited_for() -> None:
    """Asynchronous scheduling: the step is planned before the last token is known."""
    bench = Bench()
    one = request(tokens=4)
    admit(bench, one, [5], 4)
    one.tokens += [900, 901, 902, 903, 904]
    one.lag = 2
    one.num_computed_tokens = 7
    assert blocks(go_on(bench, one, 1, [6])) == []
    one.lag = 0
    assert blocks(go_on(bench, one, 1, [7])) == [6]


def test_the_null_block_is_never_saved() -> None:
    bench = Bench()
    one = request(tokens=18)
    orders = admit(bench, one, [0, 6, 0, 8], 18)
    assert blocks(orders) == [6, 8]
    assert [order.parent for order in orders.saves] == [one.block_hashes[0], one.block_hashes[2]]


def test_what_was_loaded_is_not_saved_again() -> None:
    bench = Bench()
    one = request(tokens=18)
    bench.store(one, 3)
    assert bench.half.match(one, 0) == (3 * SIZE, True)
    bench.half.allocated(one, [5, 6, 7, 8, 9], 3 * SIZE)
    bench.half.step(Output())
    bench.half.loads_ended({"r"}, set(), set())
    one.num_computed_tokens = 3 * SIZE
    orders = bench.half.step(Output([New("r", ([5, 6, 7, 8, 9],))], Cached(), {"r": 6}))
    assert blocks(orders) == [8]


def test_blocks_of_a_failed_load_are_saved_when_they_were_recomputed() -> None:
    bench = Bench()
    one = request(tokens=18)
    bench.store(one, 3)
    bench.half.match(one, 0)
    bench.half.allocated(one, [5, 6, 7, 8, 9], 3 * SIZE)
    bench.half.step(Output())
    bench.half.loads_ended({"r"}, {6}, set())
    one.num_computed_tokens = SIZE  # vLLM goes back to the first failed block
    orders = bench.half.step(Output([New("r", ([5, 6, 7, 8, 9],))], Cached(), {"r": 14}))
    assert blocks(orders) == [6, 7, 8]


def test_blocks_of_a_local_hit_are_offered_unless_they_were_lately() -> None:
    bench = Bench()
    first = request("a", tokens=18)
    admit(bench, first, [5, 6, 7, 8, 9], 18)
    again = request("b", tokens=18)
    again.num_computed_tokens = 3 * SIZE
    assert blocks(admit(bench, again, [5, 6, 7, 10, 11], 6)) == [10]
    bench.clock.now += 120
    third = request("c", tokens=18)
    third.num_computed_tokens = 4 * SIZE
    assert blocks(admit(bench, third, [5, 6, 7, 8, 12], 2)) == [5, 6, 7, 8]


def test_a_new_daemon_is_offered_everything() -> None:
    bench = Bench()
    admit(bench, request("a", tokens=18), [5, 6, 7, 8, 9], 18)
    bench.querier.boot_id = b"2" * 16
    again = request("b", tokens=18)
    again.num_computed_tokens = 4 * SIZE
    assert blocks(admit(bench, again, [5, 6, 7, 8, 10], 2)) == [5, 6, 7, 8]


def test_a_resumed_request_starts_with_its_new_table() -> None:
    bench = Bench()
    one = request(tokens=14)
    admit(bench, one, [5, 6, 7, 8], 14)
    bench.half.step(Output(preempted_req_ids={"r"}))
    one.tokens += [900, 901]
    one.num_computed_tokens = 0
    resumed = Cached(["r"], {"r"}, [([20, 21, 22, 23],)])
    assert blocks(bench.half.step(Output([], resumed, {"r": 16}))) == [20, 21, 22, 23]


def test_preempted_requests_are_revoked_in_the_same_step() -> None:
    bench = Bench()
    admit(bench, request(tokens=14), [5, 6, 7, 8], 14)
    assert bench.half.step(Output(preempted_req_ids={"r"})).revoked == {"r"}


def test_the_live_table_wins_where_there_is_one() -> None:
    bench = Bench()
    one = request(tokens=14)
    bench.half.match(one, 0)
    bench.half.allocated(one, [5, 6, 7, 8], 0)
    output = LiveOutput([New("r", ([5, 6, 7, 8],))], Cached(), {"r": 14})
    output.kv_connector_block_state = LiveState({"r": ([0, 6, 7, 8],)})
    assert blocks(bench.half.step(output)) == [6, 7]


def test_finished_requests_hold_their_blocks_until_the_worker_reported() -> None:
    bench = Bench()
    one = request(tokens=14)
    admit(bench, one, [5, 6, 7, 8], 14)
    assert bench.half.finished(one, [5, 6, 7, 8]) is True
    assert bench.half.step(Output()).finished == {"r"}
    assert bench.half.step(Output()).finished == frozenset()


def test_requests_without_saves_hold_nothing() -> None:
    bench = Bench()
    one = request(tokens=3)
    admit(bench, one, [5], 3)
    assert bench.half.finished(one, [5]) is False


def test_the_last_blocks_are_saved_at_the_end() -> None:
    """Their hashes may have come with the last token, when nothing is scheduled any more."""
    bench = Bench()
    one = request(tokens=4)
    admit(bench, one, [5], 4)
    one.tokens += [900, 901, 902, 903]
    one.num_computed_tokens = 8
    assert bench.half.finished(one, [5, 6]) is True
    assert blocks(bench.half.step(Output())) == [6]


def test_read_only_saves_and_holds_nothing() -> None:
    bench = Bench(attrs.evolve(CONFIG, mode="read_only"))
    one = request(tokens=14)
    assert admit(bench, one, [5, 6, 7, 8], 14).saves == ()
    assert bench.half.finished(one, [5, 6, 7, 8]) is False


def test_save_only_saves() -> None:
    bench = Bench(attrs.evolve(CONFIG, mode="save_only"))
    assert blocks(admit(bench, request(tokens=14), [5, 6, 7, 8], 14)) == [5, 6, 7]


def test_the_identity_is_asked_for_until_it_is_known() -> None:
    assert Bench(identified=False).half.step(Output()).identity_wanted
    assert not Bench().half.step(Output()).identity_wanted
