"""What flows and the RPC layer report, kept as plain numbers; observe/metrics.py exposes them.

Recording costs a dict look-up and a bisection; Prometheus is only met at a scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

import attrs

SECONDS_BOUNDS = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
"""From 100 us: a load of a few blocks takes that long; upstream's 10 ms hides it."""


@attrs.define
class Distribution:
    """A histogram of seconds over :data:`SECONDS_BOUNDS`; the last bucket is what lies above."""

    buckets: list[int] = attrs.field(factory=lambda: [0] * (len(SECONDS_BOUNDS) + 1))
    count: int = 0
    total_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Record one duration."""
        self.buckets[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self.count += 1
        self.total_seconds += seconds


@attrs.define(eq=False)
class Meter:
    """Totals since start."""

    calls: dict[tuple[str, str], Distribution] = attrs.field(
        factory=lambda: defaultdict(Distribution)
    )
    """By (method, status)."""
    copies: dict[str, Distribution] = attrs.field(factory=lambda: defaultdict(Distribution))
    """By direction, one entry a batch, waiting included."""
    events: dict[str, int] = attrs.field(factory=lambda: defaultdict(int))
    """Rare things by name: memory gone, saves past their deadline, idle connections."""

    def call(self, method: str, status: str, seconds: float) -> None:
        """One RPC ended."""
        self.calls[method, status].add(seconds)

    def copied(self, direction: str, seconds: float) -> None:
        """One batch ended; how much it moved is in the engines' own statistics."""
        self.copies[direction].add(seconds)

    def event(self, name: str, count: int = 1) -> None:
        """Something rare happened."""
        self.events[name] += count
