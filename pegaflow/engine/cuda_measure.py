"""From which range size on is a staged copy no quicker than a direct one, on this GPU?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import numpy as np

from pegaflow.engine.base import Copies
from pegaflow.engine.cuda_copy import METHODS, Choice, Copier, Method
from pegaflow.engine.cuda_driver import translated
from pegaflow.engine.lanes import Pace
from pegaflow.engine.segments import Ints, Layouts
from pegaflow.model.layout import GroupLayout, HandedOver, Region, Run

RANGE_BYTES: Final = (128 << 10, 64 << 10, 32 << 10, 16 << 10, 8 << 10)
BLOCKS: Final = 48
SLOT_BYTES: Final = 1 << 20
REPEATS: Final = 4
"""Of all blocks in one call: long enough for beginning and end not to matter."""
ROUNDS: Final = 2
MARGIN: Final = 1.14
"""So much quicker staging must be: its kernel takes turns with the model's, a direct copy hardly
disturbs it."""


@attrs.frozen(eq=False)
class _Scratch:
    layouts: Layouts
    pointers: Ints


def measure(copier: Copier) -> None:
    """On the copier's thread: set its direction's threshold; takes about a tenth of a second.

    From large ranges to small ones, until staging pays: below that it pays all the more.
    """
    direction, choice = copier.direction, copier.choice
    choice.staged_below_bytes[direction] = 0
    with translated(copier.cupy, "measuring copies"), _scratch(copier) as (trial, memory):
        for size in RANGE_BYTES:
            direct, staged = (_gbps(trial, memory, size, method) for method in METHODS)
            choice.measured_gbps[direction, "direct", size] = direct
            choice.measured_gbps[direction, "staged", size] = staged
            if staged > MARGIN * direct:
                choice.staged_below_bytes[direction] = size * 3 // 2
                break
        copier.staging_trouble = trial.staging_trouble


@contextmanager
def _scratch(copier: Copier) -> Iterator[tuple[Copier, _Scratch]]:
    """A copier between memory of its own, so that nobody's bytes are touched."""
    runtime, size = copier.cupy.cuda.runtime, BLOCKS * SLOT_BYTES
    device, host = runtime.malloc(size), runtime.hostAlloc(size, 0)
    trial = attrs.evolve(
        copier,
        pool_address=host,
        pool_bytes=size,
        seams=np.empty(0, np.int64),
        pace=Pace(),
        choice=Choice(),
        method_bytes=dict.fromkeys(METHODS, 0),
    )
    region = Region(size, HandedOver(b"", 0, 0))
    try:
        yield trial, _Scratch(Layouts((region,)), np.array([device], np.int64))
    finally:
        trial.close()
        runtime.free(device)
        runtime.freeHost(host)


def _gbps(trial: Copier, memory: _Scratch, range_bytes: int, method: Method) -> float:
    plane = BLOCKS * range_bytes
    runs = tuple(
        Run(0, i * plane, range_bytes, range_bytes) for i in range(SLOT_BYTES // range_bytes)
    )
    ids = np.random.default_rng(0).permutation(BLOCKS).astype(np.int64)
    offsets = np.arange(BLOCKS, dtype=np.int64) * SLOT_BYTES
    batch = [Copies(GroupLayout(0, BLOCKS, runs), ids, offsets)] * REPEATS
    best = np.inf
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        trial.move(memory, batch, time.monotonic() + 10, method)
        best = min(best, time.perf_counter() - began)
    return round(REPEATS * BLOCKS * SLOT_BYTES / best / 1e9, 2)
