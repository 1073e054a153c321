"""The table of metrics: rendered, documented, and complete."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pegaflow.observe import metrics
from pegaflow.observe.meter import SECONDS_BOUNDS, Distribution, Meter
from pegaflow.observe.metrics import METRICS, Snapshot, render

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def example() -> Snapshot:
    """Every row with one number, 1 upwards."""
    duration = Distribution()
    for seconds in (0.00005, 0.0003, 3.0, 99.0):
        duration.add(seconds)
    values = {
        metric.name: {tuple(f"a-{label}" for label in metric.labels): float(number)}
        for number, metric in enumerate(METRICS, 1)
        if metric.kind != "histogram"
    }
    return Snapshot(
        values,
        {
            metric.name: {tuple("x" for _ in metric.labels): duration}
            for metric in METRICS
            if metric.kind == "histogram"
        },
    )


def test_every_row_is_exposed_with_type_help_and_value() -> None:
    snapshot = example()
    families = {
        family.name: family for family in text_string_to_metric_families(render(snapshot).decode())
    }
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert family.type == metric.kind
        assert family.documentation == metric.help
        if metric.kind != "histogram":
            (sample,) = (s for s in family.samples if s.name == metric.name)
            assert {tuple(sample.labels.values()): sample.value} == snapshot.values[metric.name]
            assert tuple(sample.labels) == metric.labels
    assert "process_resident_memory_bytes" in families


def test_histograms_are_cumulative_with_sum_and_count() -> None:
    lines = render(example()).decode().splitlines()
    mine = [line for line in lines if line.startswith("pegaflow_save_duration_seconds")]
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in mine}
    name = "pegaflow_save_duration_seconds"
    assert found[f'{name}_bucket{{le="0.0001"}}'] == 1
    assert found[f'{name}_bucket{{le="0.0005"}}'] == 2
    assert found[f'{name}_bucket{{le="5.0"}}'] == 3
    assert found[f'{name}_bucket{{le="10.0"}}'] == 3
    assert found[f'{name}_bucket{{le="+Inf"}}'] == 4
    assert found[f"{name}_count"] == 4
    assert found[f"{name}_sum"] == pytest.approx(102.00035)


def test_a_number_without_a_row_and_a_row_without_a_number_are_bugs() -> None:
    snapshot = example()
    with pytest.raises(AssertionError, match="pegaflow_new"):
        render(attrs.evolve(snapshot, values={**snapshot.values, "pegaflow_new": {(): 1.0}}))
    fewer = {name: v for name, v in snapshot.values.items() if name != "pegaflow_leases"}
    with pytest.raises(AssertionError, match="pegaflow_leases"):
        render(attrs.evolve(snapshot, values=fewer))


def test_names_follow_prometheus() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("pegaflow_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith(".")
        if metric.unit in ("bytes", "seconds"):
            assert metric.unit in metric.name, metric.name


def test_the_page_shows_the_table_of_the_code() -> None:
    assert metrics.metric_table() in DOCUMENT.read_text(), "docs/metrics.md is stale"


def test_the_meter_counts_what_it_is_told() -> None:
    meter = Meter()
    meter.call("query", "ok", 0.001)
    meter.call("query", "ok", 0.0011)
    meter.call("query", "notReady", 20.0)
    meter.copied("load", 0.5)
    meter.event("memory_gone")
    assert meter.calls["query", "ok"].count == 2
    # A value on a bound belongs below it, as Prometheus has it.
    assert meter.calls["query", "ok"].buckets[SECONDS_BOUNDS.index(0.001)] == 1
    assert meter.calls["query", "notReady"].buckets[-1] == 1
    assert meter.copies["load"].total_seconds == 0.5
    assert meter.events == {"memory_gone": 1}
