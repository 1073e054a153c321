"""Statistics to vLLM's own metrics: one table, names as upstream's where they mean the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import attrs
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from pegaflow.connector.tally import Report

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Kind = Literal["counters", "gauges", "histograms"]
_STEPS = [m * 10**k for k in range(7) for m in (1, 2, 4, 8)]
_SECONDS = [m * 10.0**k for k in range(-4, 2) for m in (1, 2, 4, 8)]


@attrs.frozen
class Metric:
    """One row: the tally's name, the Prometheus name without ``vllm:pega_``, and its help."""

    key: str
    kind: Kind
    name: str
    help: str


METRICS = (
    Metric("hit_blocks", "counters", "hit_blocks", "Blocks asked for and found in the cache"),
    Metric(
        "miss_blocks", "counters", "miss_blocks", "Blocks asked for and not found, or not asked"
    ),
    Metric("queries", "counters", "queries", "Queries answered by the daemon"),
    Metric("queries_skipped", "counters", "queries_skipped", "Queries the open breaker saved"),
    Metric(
        "queries_not_ready", "counters", "queries_not_ready", "Queries before all ranks were there"
    ),
    Metric(
        "query_failures", "counters", "query_failure", "Queries that ended in an error or deadline"
    ),
    Metric("loads", "counters", "load_success", "Loads in which every block arrived"),
    Metric("load_failures", "counters", "load_failure", "Loads with at least one failed block"),
    Metric(
        "load_failed_blocks", "counters", "load_failed_blocks", "Blocks recomputed after a load"
    ),
    Metric("load_mismatches", "counters", "load_mismatches", "Loads that nobody had promised"),
    Metric("load_bytes", "counters", "load_bytes", "Bytes written into KV memory"),
    Metric("saves", "counters", "save_success", "Save calls answered"),
    Metric(
        "save_failures", "counters", "save_failure", "Save calls that ended in an error or deadline"
    ),
    Metric("save_stored_blocks", "counters", "save_stored_blocks", "Blocks copied to the cache"),
    Metric(
        "save_known_blocks", "counters", "save_known_blocks", "Blocks that the cache had already"
    ),
    Metric(
        "save_rejected_blocks",
        "counters",
        "save_rejected_blocks",
        "Blocks the cache had no room for",
    ),
    Metric(
        "save_failed_blocks", "counters", "save_failed_blocks", "Blocks of save calls that failed"
    ),
    Metric(
        "save_dropped_blocks",
        "counters",
        "save_dropped_blocks",
        "Blocks not offered: no daemon or full queue",
    ),
    Metric(
        "save_revoked_blocks",
        "counters",
        "save_revoked_blocks",
        "Blocks not offered: request preempted",
    ),
    Metric("save_bytes", "counters", "save_bytes", "Bytes read out of KV memory"),
    Metric(
        "registrations", "counters", "registrations", "Times that a rank registered with a daemon"
    ),
    Metric(
        "hook_errors", "counters", "hook_errors", "Exceptions kept from the engine: bugs of ours"
    ),
    Metric(
        "breaker_open", "gauges", "breaker_open", "1 while the scheduler does not ask the daemon"
    ),
    Metric("registered", "gauges", "registered", "1 while this rank is registered with a daemon"),
    Metric(
        "pending_saves", "gauges", "pending_save_requests", "Steps whose saves wait in the queue"
    ),
    Metric("query_seconds", "histograms", "query_duration_seconds", "Time of a query"),
    Metric(
        "attach_seconds", "histograms", "attach_duration_seconds", "Time of the first connection"
    ),
    Metric("load_seconds", "histograms", "load_duration_seconds", "Time of a load, per rank"),
    Metric("load_blocks", "histograms", "load_blocks", "Blocks of a load"),
    Metric("save_seconds", "histograms", "save_duration_seconds", "Time of a save call, per rank"),
    Metric("save_blocks", "histograms", "save_blocks", "Blocks of a save call"),
)


class PegaStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is untyped here
    """``data`` is a :data:`~pegaflow.connector.tally.Report`."""

    def report(self) -> Report:
        """Typed view of ``data``."""
        return cast("Report", self.data)

    def reset(self) -> None:
        """Forget."""
        self.data.clear()

    def is_empty(self) -> bool:
        """Did nothing happen?"""
        return not any(self.report().values())

    def aggregate(self, other: KVConnectorStats) -> PegaStats:
        """Several ranks and both halves: counters add up, of gauges the larger one stays."""
        merged = self.report()
        for kind, values in cast("PegaStats", other).report().items():
            mine = cast("dict[str, object]", merged.setdefault(kind, {}))
            for name, value in values.items():
                mine[name] = _joined(kind, mine.get(name), value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's periodic log line."""
        report = self.report()
        line: dict[str, int | float] = {}
        for metric in METRICS:
            value = report.get(metric.kind, {}).get(metric.key)
            if isinstance(value, list):
                line[f"{metric.name} mean"] = round(sum(value) / max(1, len(value)), 6)
            elif value:
                line[metric.name] = value
        return line


def _joined(kind: str, mine: object, other: object) -> object:
    if mine is None:
        return list(other) if isinstance(other, list) else other
    if isinstance(mine, list) and isinstance(other, list):
        return mine + other
    if isinstance(mine, (int, float)) and isinstance(other, (int, float)):
        return max(mine, other) if kind == "gauges" else mine + other
    return mine


class PegaPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is untyped here
    """Registers the table and feeds it, in the API server's process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """One child a metric and engine."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._children: dict[str, dict[int, object]] = {}
        for metric in METRICS:
            parent = _new_metric(metric, metric_types, labelnames)
            self._children[metric.key] = {
                engine: parent.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: Report, engine_idx: int = 0) -> None:
        """Feed one report."""
        for metric in METRICS:
            value = transfer_stats_data.get(metric.kind, {}).get(metric.key)
            child = self._children[metric.key].get(engine_idx)
            if value is None or child is None:
                continue
            if isinstance(value, list):
                for one in value:
                    cast("Histogram", child).observe(one)
            elif metric.kind == "gauges":
                cast("Gauge", child).set(value)
            else:
                cast("Counter", child).inc(value)


def _new_metric(
    metric: Metric, metric_types: dict[type, type], labelnames: list[str]
) -> Counter | Gauge | Histogram:
    name = f"vllm:pega_{metric.name}"
    if metric.kind == "histograms":
        buckets = _SECONDS if metric.name.endswith("seconds") else _STEPS
        made = metric_types[Histogram](
            name=name, documentation=metric.help, buckets=buckets, labelnames=labelnames
        )
    elif metric.kind == "gauges":
        made = metric_types[Gauge](
            name=name,
            documentation=metric.help,
            multiprocess_mode="mostrecent",
            labelnames=labelnames,
        )
    else:
        made = metric_types[Counter](name=name, documentation=metric.help, labelnames=labelnames)
    return cast("Counter | Gauge | Histogram", made)
