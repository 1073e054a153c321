"""Which numbers does a scrape show, and what do they mean?

One table; only this file knows Prometheus.  Names are upstream's where the meaning is the same.  A
snapshot is taken on the Trio thread and rendered on another: rendering takes milliseconds.
``docs/metrics.md`` shows :data:`METRICS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import attrs
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from pegaflow.observe.meter import SECONDS_BOUNDS, Distribution

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Kind = Literal["gauge", "counter", "histogram"]
Labels = tuple[str, ...]


@attrs.frozen
class Metric:
    """One row: what a name means.  Counters end in ``_total`` and count since start."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: Labels = ()


def _gauge(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(f"pegaflow_{name}", "gauge", unit, text, labels)


def _counter(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(f"pegaflow_{name}_total", "counter", unit, text, labels)


def _histogram(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"pegaflow_{name}_seconds", "histogram", "seconds", text, labels)


METRICS: tuple[Metric, ...] = (
    _gauge("build_info", "1", "Always 1; the label is the version.", "version"),
    _gauge("ready", "0 or 1", "Whether /ready answers 200."),
    _gauge("pool_total_bytes", "bytes", "Configured size of the pool."),
    _gauge("pool_capacity_bytes", "bytes", "Pool memory that is usable; grows after the start."),
    _gauge("pool_used_bytes", "bytes", "Pool memory lent to blocks, with alignment."),
    _gauge(
        "pool_largest_free_bytes",
        "bytes",
        "Longest free range: far below the free sum means fragmentation.",
    ),
    _counter(
        "pool_alloc_failures",
        "blocks",
        "Blocks that were not saved because there was no room, even after eviction.",
    ),
    _gauge("cache_resident_blocks", "blocks", "Blocks that queries can find."),
    _gauge("cache_resident_bytes", "bytes", "Their bytes."),
    _gauge("cache_unsealed_blocks", "blocks", "Blocks that lack the slots of some ranks."),
    _gauge("cache_pinned_blocks", "blocks", "Blocks that a lease or a load keeps from eviction."),
    _gauge("cache_pinned_bytes", "bytes", "Their bytes."),
    _gauge(
        "namespace_resident_blocks",
        "blocks",
        "Blocks by namespace; beyond the largest 50 they are one, named (other).",
        "namespace",
    ),
    _gauge("namespace_resident_bytes", "bytes", "Their bytes.", "namespace"),
    _counter(
        "cache_block_hits",
        "blocks",
        "Hashes of queries that were found. Hits and misses add up to the hashes asked for.",
    ),
    _counter("cache_block_misses", "blocks", "Hashes of queries that were not found."),
    _counter("cache_tier_block_requests", "blocks", "The same by where they were found.", "tier"),
    _counter("cache_block_insertions", "blocks", "Blocks that became whole."),
    _counter("cache_block_evictions", "blocks", "Blocks that left, by pressure or clean-up."),
    _counter("cache_eviction_reclaimed_bytes", "bytes", "Their bytes."),
    _counter(
        "inflight_gc_cleaned",
        "blocks",
        "Blocks given up because slots of some ranks never came.",
    ),
    _counter(
        "eviction_callback_failures",
        "failures",
        "Trouble of listeners during eviction; eviction goes on. Alarm on it.",
    ),
    _gauge("leases", "leases", "Leases that are open."),
    _counter("leases_granted", "leases", "Leases given to queries."),
    _counter("leases_expired", "leases", "Leases that ended by time instead of load or release."),
    _gauge("instances", "instances", "Engine instances with an open session."),
    _gauge("instances_ready", "instances", "Those of which all ranks have registered."),
    _gauge("sessions", "sessions", "Open sessions: processes of engines."),
    _gauge("registered_ranks", "ranks", "Ranks whose memory is attached."),
    _counter("save_known_blocks", "blocks", "Blocks of saves that were here already."),
    _counter("save_bytes", "bytes", "Bytes copied from engines."),
    _histogram("save_duration", "One save's copy, waiting for the device included."),
    _counter("save_failures", "blocks", "Blocks that could not be copied from an engine."),
    _counter("load_bytes", "bytes", "Bytes copied to engines."),
    _histogram("load_duration", "One load's copy, waiting for the device included."),
    _counter("load_failures", "blocks", "Blocks that could not be copied to an engine."),
    _counter("copy_method_bytes", "bytes", "Bytes copied, by how.", "direction", "method"),
    _gauge(
        "copy_staged_below_bytes",
        "bytes",
        "Blocks in ranges shorter than this are gathered on the GPU first; measured at start.",
        "direction",
    ),
    _gauge("copy_queued", "batches", "Copies that wait or run.", "direction"),
    _counter("copy_batches", "batches", "Copies that ended.", "direction"),
    _counter(
        "copy_busy_seconds",
        "seconds",
        "Time that device threads spent copying.",
        "direction",
    ),
    _counter(
        "copy_wait_seconds",
        "seconds",
        "Time that copies waited for a device thread.",
        "direction",
    ),
    _counter(
        "rpc_requests",
        "calls",
        "Calls by method and outcome (ok or the kind of error).",
        "method",
        "status",
    ),
    _histogram("rpc_duration", "From the arrival of a call to its answer.", "method", "status"),
    _counter(
        "events",
        "events",
        "Rare things by name: memory gone, saves past their deadline.",
        "event",
    ),
)

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


@attrs.frozen(eq=False)
class Snapshot:
    """Numbers at one moment, by metric and label values; owned by the reader."""

    values: Mapping[str, Mapping[Labels, float]]
    distributions: Mapping[str, Mapping[Labels, Distribution]]


def render(snapshot: Snapshot) -> bytes:
    """Prometheus text, plus the usual ``process_*``.  Any thread.

    A name that is not in the table, or a row without a number, is a bug.
    """
    assert snapshot.values.keys() | snapshot.distributions.keys() == BY_NAME.keys(), (
        snapshot.values.keys() | snapshot.distributions.keys()
    ) ^ BY_NAME.keys()
    registry = CollectorRegistry()
    registry.register(_Once(snapshot))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Once(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[Family]:
        """Nothing: registering must not collect."""
        return []

    def collect(self) -> Iterator[Family]:
        """Each row of the table in order."""
        for metric in METRICS:
            if metric.kind == "histogram":
                yield _histogram_family(metric, self._snapshot.distributions[metric.name])
                continue
            make = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family = make(metric.name, metric.help, labels=metric.labels)
            for labels, value in self._snapshot.values[metric.name].items():
                assert len(labels) == len(metric.labels), metric.name
                family.add_metric(labels, value)
            yield family


def _histogram_family(metric: Metric, by_labels: Mapping[Labels, Distribution]) -> Family:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, found in by_labels.items():
        below = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*SECONDS_BOUNDS, None), found.buckets, strict=True):
            below += count
            buckets.append(("+Inf" if bound is None else repr(bound), below))
        family.add_metric(labels, buckets, found.total_seconds)
    return family


def metric_table() -> str:
    """The reference table of ``docs/metrics.md``, in Markdown."""
    lines = ["| name | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        lines.append(
            f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.help} |"
        )
    return "\n".join(lines) + "\n"
