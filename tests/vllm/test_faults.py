"""A live engine outlives everything that happens to its daemon (field faults T9, T11, T12, T13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Json = dict[str, Any]  # type: ignore[explicit-any]

pytestmark = [pytest.mark.vllm]

Outcome = Callable[[str, str], Json]

HOOK_LIMIT_MS = 50.0
SAVING_AGAIN_LIMIT_S = 2.0

SITUATIONS = [
    "absent at start",
    "with the daemon",
    "killed",
    "restarted",
    "killed in the middle of a load",
    "filled again",
    "stopped",
    "stopped in the middle of a load",
    "black hole",
    "garbage",
    "pool full",
]


@pytest.fixture
def faults(version: str, outcome: Outcome) -> Json:
    return outcome(version, "faults")


@pytest.mark.parametrize("situation", SITUATIONS)
def test_right_tokens(faults: Json, situation: str) -> None:
    assert faults["right"][situation] is True


def test_each_situation_was_met_without_the_engines_own_cache(faults: Json) -> None:
    assert len(faults["forgot"]) == len(SITUATIONS)
    assert all(faults["forgot"])


def test_no_exception_in_the_engine(faults: Json) -> None:
    assert faults["totals"].get("hook_errors", 0) == 0
    assert "Traceback" not in "\n".join(
        line for line in faults["log"].splitlines() if "pegaflow" in line.lower()
    )


def test_saving_again_within_two_seconds(faults: Json) -> None:
    print(faults["seconds_to_saving"])  # noqa: T201  # for -s and for the report of a failure
    late = {k: s for k, s in faults["seconds_to_saving"].items() if s > SAVING_AGAIN_LIMIT_S}
    assert not late


def test_no_scheduler_hook_over_50_ms(faults: Json) -> None:
    """Slowest call of each hook; time in which the thread waited for a processor does not count."""
    for hook, (wall, own, cpu) in faults["hooks_ms"].items():
        print(  # noqa: T201
            f"{hook}: p100 {wall} ms, without waiting for a processor {own}, processor {cpu}"
        )
    assert "get_num_new_matched_tokens" in faults["hooks_ms"]
    late = {hook: row for hook, row in faults["hooks_ms"].items() if row[1] > HOOK_LIMIT_MS}
    assert not late


def test_failed_loads_were_seen_and_survived(faults: Json) -> None:
    assert faults["totals"]["load_failed_blocks"] > 0
    assert faults["totals"]["registrations"] >= 4


def test_a_failed_block_fails_no_request_although_vllm_defaults_to_it(faults: Json) -> None:
    """The engine was started with kv_load_failure_policy="fail"; the connector says so once."""
    assert faults["policy"] is True
    assert faults["log"].count("kv_load_failure_policy is 'fail'") == 1


def test_the_small_pool_was_full(faults: Json) -> None:
    pool = faults["small_pool"]
    assert pool["evictions"] + pool["rejections"] > 0
