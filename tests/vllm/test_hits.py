"""Real engines find their cache again, in every way, with the tokens of an engine without it.

Prompts have 300 tokens in blocks of 32: at most 288 of them can come from the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Json = dict[str, Any]  # type: ignore[explicit-any]

pytestmark = [pytest.mark.vllm]

Outcome = Callable[[str, str], Json]


@pytest.fixture
def basics(version: str, outcome: Outcome) -> Json:
    return outcome(version, "basics")


def test_cold_saves_and_gives_the_right_tokens(basics: Json) -> None:
    assert basics["cold"]["tokens"] == basics["reference"]["prompts"]["tokens"]
    assert basics["cold"]["cached"] == [0, 0, 0]


def test_pieces_of_a_block(version: str, basics: Json) -> None:
    """The wish for one range a block is dropped by the CPU's kernels: one range a layer is left."""
    assert basics["runs_a_block"] == 4


def test_warm_in_the_same_process(basics: Json) -> None:
    assert basics["forgot"] is True
    assert basics["warm_same_process"]["tokens"] == basics["reference"]["prompts"]["tokens"]
    assert basics["warm_same_process"]["cached"] == [288, 288, 288]


def test_what_was_loaded_is_not_saved_again(basics: Json) -> None:
    """Only the blocks computed anew are offered: the prompt's end and the output, 1 each."""
    assert basics["known_after_warm"] <= 3


def test_warm_in_a_new_process(basics: Json) -> None:
    assert basics["new_process"]["warm"]["tokens"] == basics["reference"]["prompts"]["tokens"]
    assert basics["new_process"]["warm"]["cached"] == [288, 288, 288]


def test_partial_prefix(basics: Json) -> None:
    assert basics["partial_prefix"]["tokens"] == basics["reference"]["branches"]["tokens"]
    assert basics["partial_prefix"]["cached"] == [160, 160]


def test_longer_output_over_blocks_saved_while_decoding(basics: Json) -> None:
    assert basics["longer_output"]["tokens"] == basics["reference"]["long"]["tokens"]
    assert basics["longer_output"]["cached"] == [288, 288, 288]


def test_two_engines_share_one_daemon(basics: Json) -> None:
    assert basics["new_process"]["later"]["cached"] == [0]
    assert basics["from_second_engine"]["cached"] == [288]
    assert basics["from_second_engine"]["tokens"] == basics["reference"]["later"]["tokens"]


def test_salted_requests_stay_apart(basics: Json) -> None:
    one, two, again = basics["salted"]
    assert all(run["forgot"] for run in basics["salted"])
    assert [one["cached"], two["cached"], again["cached"]] == [[0], [0], [288]]
    assert one["tokens"] == two["tokens"] == again["tokens"]
    assert one["tokens"] == basics["reference"]["prompts"]["tokens"][:1]


def test_abort_during_a_load_leaks_nothing(basics: Json) -> None:
    abort = basics["abort"]
    assert abort["states"] == ["WAITING_FOR_REMOTE_KVS"]
    assert abort["held_while_loading"] > 0
    assert abort["leaked"] == 0
    assert abort["unfinished"] == 0
    assert basics["after_abort"]["tokens"] == basics["reference"]["prompts"]["tokens"]


def test_preemption(basics: Json) -> None:
    tight = basics["tight"]
    assert tight["cold"]["preemptions"] + tight["warm"]["preemptions"] > 0
    assert tight["cold"]["tokens"] == basics["reference"]["long"]["tokens"]
    assert tight["warm"]["tokens"] == basics["reference"]["long"]["tokens"]
    assert tight["warm"]["totals"]["load_bytes"] > 0


def test_noise_instead_of_the_cache_changes_the_tokens(basics: Json) -> None:
    """The negative control: without it none of the above says anything."""
    reference = basics["reference"]["prompts"]["tokens"]
    assert basics["noise"]["cached"] == [288, 288, 288]
    assert all(a != b for a, b in zip(basics["noise"]["tokens"], reference, strict=True))


def test_no_hook_failed_and_no_load(basics: Json) -> None:
    for totals in (basics["totals"], basics["new_process"]["totals"]):
        assert totals.get("hook_errors", 0) == 0
        assert totals.get("load_failures", 0) == 0
        assert totals.get("save_failures", 0) == 0
        assert totals.get("load_mismatches", 0) == 0


def test_nothing_stays_leased_or_open_in_the_daemon(basics: Json) -> None:
    daemon = basics["daemon"]
    assert daemon["pinned_blocks"] == 0
    assert daemon["open_loads"] == daemon["open_saves"] == daemon["unsealed"] == 0
