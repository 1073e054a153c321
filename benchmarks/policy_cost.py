"""What does bookkeeping cost a block, and is that the same with 10 thousand and 1 million resident?

Would disprove: saving, querying and loading cost the same for each block whatever is in the pool.
No byte moves: this is ``Host`` alone, in one thread.  Batches of 640 blocks of a prompt that is new
each time.  Keys end in ``_us_per_block_RESIDENT``: ``save`` is reserve + commit with room left,
``save_evicting`` the same in a full pool (640 leave for each 640), ``look`` a query with its lease,
``load`` that query plus redeeming it.  ``..._flatness`` is the 1 M figure over the 10 k figure.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable

import attrs
import numpy as np

from benchmarks.harness import Figure, emit, progress
from pegaflow.model.keys import BlockHash, InstanceId, LeaseToken, Manifest, Namespace, SessionId
from pegaflow.model.messages import Ready, SaveRun
from pegaflow.policy.host import Host, SaveOrder

BATCH_BLOCKS = 640
SLOT_BYTES = 4096
ROUNDS = 60
HASH_BYTES = 32
SPACE, ENGINE, OWNER = Namespace("bench"), InstanceId("bench"), SessionId(1)
IDS = np.arange(BATCH_BLOCKS, dtype=np.uint32)
POSITIONS = np.arange(BATCH_BLOCKS)
NONE_FAILED = np.zeros(BATCH_BLOCKS, np.bool_)


@attrs.frozen
class Cost:
    """Medians over the rounds, in microseconds a block."""

    save_us: float
    save_evicting_us: float
    look_us: float
    load_us: float


def prompt(number: int) -> list[BlockHash]:
    """Fresh bytes each time, as they come off the wire: their hash is not cached."""
    dice = random.Random(number)
    return [BlockHash(dice.randbytes(HASH_BYTES)) for _ in range(BATCH_BLOCKS)]


def save(host: Host, hashes: list[BlockHash]) -> None:
    """All of it must be new and find room."""
    order = SaveOrder(SPACE, ENGINE, 0, [SaveRun(0, hashes, b"", IDS)])
    with host.saving(order, 0.0) as plan:
        done = plan.commit(NONE_FAILED, 0.0)
    assert done.blocks == BATCH_BLOCKS


def look(host: Host, hashes: list[BlockHash]) -> Ready:
    """All of it must hit."""
    answer = host.look(SPACE, 0, hashes, b"", ENGINE, OWNER, 1, 0.0)
    assert isinstance(answer, Ready)
    assert answer.hit_count == BATCH_BLOCKS
    return answer


def load(host: Host, hashes: list[BlockHash]) -> None:
    """Query, redeem, finish."""
    with host.loading(look(host, hashes).lease, ENGINE, 0, 0, 0, POSITIONS, 0.0) as plan:
        assert len(plan.pool_offsets) == BATCH_BLOCKS


def filled(resident_blocks: int) -> tuple[Host, int]:
    """A host with that many blocks and room for the rounds; and how many prompts are in it."""
    tokens = itertools.count()
    host = Host(make_token=lambda: LeaseToken(next(tokens).to_bytes(16)))
    prompts = resident_blocks // BATCH_BLOCKS
    host.add_memory(0, (prompts + ROUNDS) * BATCH_BLOCKS * SLOT_BYTES)
    host.open_namespace(SPACE, Manifest({"model": "bench"}), OWNER)
    host.declare_slots(SPACE, 0, 0, 1, SLOT_BYTES)
    for number in range(prompts):
        save(host, prompt(number))
    return host, prompts


def median_us(
    step: Callable[[Host, list[BlockHash]], object], host: Host, numbers: list[int]
) -> float:
    """Microseconds of processor time a block: others on the machine do not count."""
    taken = []
    for number in numbers:
        hashes = prompt(number)
        began = time.process_time()
        step(host, hashes)
        taken.append(time.process_time() - began)
    return sorted(taken)[len(taken) // 2] / BATCH_BLOCKS * 1e6


def measure(resident_blocks: int) -> Cost:
    """One pool size.  The collector is off, as it is in the daemon outside its own task."""
    gc.collect()
    gc.disable()
    try:
        host, prompts = filled(resident_blocks)
        dice = random.Random(1)
        save_us = median_us(save, host, list(range(prompts, prompts + ROUNDS)))
        known = [dice.randrange(prompts) for _ in range(ROUNDS)]
        look_us = median_us(look, host, known)
        host.drop_leases(OWNER)
        load_us = median_us(load, host, known)
        fresh = list(range(prompts + ROUNDS, prompts + 2 * ROUNDS))
        evicting_us = median_us(save, host, fresh)
    finally:
        gc.enable()
    assert host.statistics().evictions == ROUNDS * BATCH_BLOCKS
    return Cost(save_us, evicting_us, look_us, load_us)


def figures() -> dict[str, Figure]:
    """All sizes, flat; what other benchmarks take over."""
    out: dict[str, Figure] = {}
    costs: dict[str, Cost] = {}
    for label, resident in (("10k", 10_000), ("100k", 100_000), ("1m", 1_000_000)):
        costs[label] = cost = measure(resident)
        progress(f"{label} resident: {cost}")
        for name, value in attrs.asdict(cost).items():
            out[f"{name}_per_block_{label}"] = round(value, 3)
    for name, value in attrs.asdict(costs["1m"]).items():
        small = getattr(costs["10k"], name)
        out[f"{name.removesuffix('_us')}_flatness"] = round(value / small, 2)
    return out


if __name__ == "__main__":
    emit(figures())
