"""Circuit breaker: may the scheduler thread spend time on the daemon now?

Closed means calls are allowed.  A failed call opens it.  Only a probe (on another thread) that
began after the failure closes it again, and after repeated failures not before a growing pause: a
daemon that answers probes but not queries costs a few time-outs, not one a step.
"""

from __future__ import annotations

import threading

PAUSE_FIRST_S, PAUSE_MAX_S = 0.1, 5.0


class Breaker:
    """Thread-safe; ``now`` is ``time.monotonic()``.  Starts open: nothing is known yet."""

    def __init__(self) -> None:
        """Open, without a pause."""
        self._lock = threading.Lock()
        self._closed = False
        self._opened_at = float("-inf")
        self._not_before = float("-inf")
        self._failures = 0

    @property
    def closed(self) -> bool:
        """Are calls allowed?"""
        return self._closed

    def call_failed(self, now: float) -> None:
        """A call ran into its deadline or lost its peer."""
        with self._lock:
            self._failures += 1
            pause = min(PAUSE_FIRST_S * 2 ** min(self._failures - 1, 10), PAUSE_MAX_S)
            self._closed = False
            self._opened_at = now
            self._not_before = now + (0.0 if self._failures == 1 else pause)

    def call_worked(self) -> None:
        """A call was answered: the pause starts small again."""
        self._failures = 0

    def probe_worked(self, began: float, now: float) -> None:
        """The prober got an answer to a question that it asked at ``began``."""
        with self._lock:
            if began >= self._opened_at and now >= self._not_before:
                self._closed = True

    def probe_failed(self, now: float) -> None:
        """The prober got none: nobody else need try."""
        with self._lock:
            self._closed = False
            self._opened_at = now
