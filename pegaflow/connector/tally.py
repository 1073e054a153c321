"""Counts of one half of the connector, between two reports.  Thread-safe; knows no vLLM."""

from __future__ import annotations

import threading
from typing import Final

Report = dict[str, dict[str, float] | dict[str, list[float]]]
"""{"counters": {name: sum}, "gauges": {name: last}, "histograms": {name: [values]}}."""

HISTOGRAM_VALUES_MAX: Final = 1024
"""Observations kept between two reports; what is more is counted, not kept."""


class Tally:
    """Counters add up, gauges remember the last value, histograms keep their values."""

    def __init__(self) -> None:
        """All zero."""
        self._lock = threading.Lock()
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._histograms: dict[str, list[float]] = {}
        self._totals: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Count."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount
            self._totals[name] = self._totals.get(name, 0) + amount

    def set(self, name: str, value: float) -> None:
        """Set a gauge; reported when it changed."""
        with self._lock:
            if self._totals.get(name) != value:
                self._totals[name] = value
                self._gauges[name] = value

    def observe(self, name: str, value: float) -> None:
        """Add one value to a histogram."""
        with self._lock:
            values = self._histograms.setdefault(name, [])
            if len(values) < HISTOGRAM_VALUES_MAX:
                values.append(value)

    def total(self, name: str) -> float:
        """Sum since start, or a gauge's last value."""
        with self._lock:
            return self._totals.get(name, 0)

    def take(self) -> Report | None:
        """What happened since the last call; None when nothing did."""
        with self._lock:
            if not (self._counters or self._gauges or self._histograms):
                return None
            report: Report = {
                "counters": self._counters,
                "gauges": self._gauges,
                "histograms": self._histograms,
            }
            self._counters, self._gauges, self._histograms = {}, {}, {}
            return report
