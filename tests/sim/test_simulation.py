"""A fixed handful of simulated worlds; ten thousand are a command away."""

from __future__ import annotations

import json

import pytest

from pegaflow.testing import sim_engine, simulate

SEEDS = range(12)


def test_a_handful_of_worlds_keeps_every_promise() -> None:
    total, failures = simulate.run_seeds(SEEDS, jobs=1)
    assert failures == []
    # It is no use unless it does something, and something goes wrong.
    assert total.loads_verified > 10
    assert total.blocks_verified > 100
    assert total.evictions > 0
    assert total.faults["handler_cancelled"] > 0
    assert total.validations > 200


def test_a_seed_gives_the_same_run_each_time() -> None:
    for seed in (3, 9):
        assert simulate.run_seed(seed) == simulate.run_seed(seed)


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--seeds", "5:7"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["seeds"] == 2
    assert line["failures"] == []


def test_a_wrong_byte_is_noticed_and_replayable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The canary: a device that swaps the halves of what it loads."""
    real = sim_engine.SimCopyEngine._move

    def liar(self, direction, memory, layout, block, offset, *, first_half):  # type: ignore[no-untyped-def]
        real(self, direction, memory, layout, block, offset, first_half=first_half)
        if direction == "load" and not first_half:
            run = layout.runs[0]
            memory.arrays[run.region][run.base_bytes + block * run.stride_bytes] ^= 1

    monkeypatch.setattr(sim_engine.SimCopyEngine, "_move", liar)
    assert simulate.main(["--seeds", "0:12"]) == 1
    out, err = capsys.readouterr()
    failures = json.loads(out.splitlines()[-1])["failures"]
    assert failures
    assert "wrong bytes" in err
    assert f"--seeds {failures[0]}:{failures[0] + 1}" in err


def test_a_host_that_forgets_to_pin_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from pegaflow.policy.eviction import LeafFirst

    monkeypatch.setattr(LeafFirst, "pin", lambda self, shelf, rows: None)
    _, failures = simulate.run_seeds(SEEDS, jobs=1)
    assert failures


def fails_within(count: int) -> bool:
    return any(simulate.run_seed(seed)[2] for seed in range(count))


@pytest.mark.slow
def test_a_save_that_ignores_its_deadline_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the deadline the engine computes something else into the same blocks."""
    from pegaflow.node import flows

    monkeypatch.setattr(flows, "_deadline", lambda node, deadline_ns: 1e9)
    assert fails_within(200)


@pytest.mark.slow
def test_a_rank_of_another_process_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted engine whose registration failed must not use the memory of the dead one."""
    from pegaflow.policy.instances import Instances

    def lenient(self, session, rank):  # type: ignore[no-untyped-def]
        return self.of(session).ranks.get(rank) or missing(self, session, rank)

    missing = Instances.rank
    monkeypatch.setattr(Instances, "rank", lenient)
    assert fails_within(600)
