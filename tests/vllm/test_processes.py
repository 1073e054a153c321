"""Engines in several processes: two tensor-parallel ranks, and the HTTP server with a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Json = dict[str, Any]  # type: ignore[explicit-any]

pytestmark = [pytest.mark.vllm, pytest.mark.newest_only]

Outcome = Callable[[str, str], Json]


def test_two_ranks(version: str, outcome: Outcome) -> None:
    """Each rank saves and loads its part of every block; tokens as with one rank alone."""
    ranks = outcome(version, "ranks")
    reference = outcome(version, "basics")["reference"]["prompts"]["tokens"]
    assert ranks["cold"]["tokens"] == reference
    assert ranks["cold"]["cached"] == [0, 0, 0]
    assert ranks["forgot"] is True
    assert ranks["warm"]["tokens"] == reference
    assert ranks["warm"]["cached"] == [288, 288, 288]
    assert ranks["daemon"]["unsealed"] == 0


def test_http_server_finds_its_cache_after_a_restart(version: str, outcome: Outcome) -> None:
    server = outcome(version, "server")
    cold, warm = server["cold"], server["warm"]
    assert cold["text"] == warm["text"]
    assert cold["cached_tokens"] == 0
    assert warm["cached_tokens"] == 192
    assert warm["hits"] == 192


def test_metrics_reach_vllms_own_endpoint(version: str, outcome: Outcome) -> None:
    server = outcome(version, "server")
    cold, warm = server["cold"]["metrics"], server["warm"]["metrics"]
    assert cold["vllm:pega_save_stored_blocks_total"] >= 6
    assert warm["vllm:pega_hit_blocks_total"] == 6
    assert warm["vllm:pega_load_success_total"] == 1
    assert warm["vllm:pega_load_bytes_total"] > 0
    assert warm["vllm:pega_breaker_open"] == 0
    assert warm["vllm:pega_load_duration_seconds_count"] == 1
