"""What a scrape of this daemon sees: numbers of policy, devices and the meter, copied at once."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from pegaflow import __version__
from pegaflow.engine.base import Direction
from pegaflow.node.parts import Node
from pegaflow.observe.meter import Distribution
from pegaflow.observe.metrics import Labels, Snapshot
from pegaflow.policy.figures import HostStatistics

NAMESPACES_MAX = 50
"""Series by namespace: clients choose the names, so their number must have a bound."""
OTHER = "(other)"

Values = dict[str, dict[Labels, float]]


def snapshot(node: Node) -> Snapshot:
    """Takes well below a millisecond; the result is independent of the node."""
    host = node.host.statistics()
    values = _of_host(host) | _of_namespaces(host) | _of_instances(node) | _of_devices(node)
    meter = node.meter
    ready = bool(host.capacity_bytes) and not node.draining
    values |= _plain(
        ready=int(ready),
        pool_total_bytes=node.pool_total_bytes,
    )
    values["pegaflow_build_info"] = {(__version__,): 1}
    values["pegaflow_events_total"] = {(name,): n for name, n in meter.events.items()}
    values["pegaflow_rpc_requests_total"] = {key: d.count for key, d in meter.calls.items()}
    return Snapshot(
        values,
        {
            "pegaflow_rpc_duration_seconds": _copied(meter.calls),
            "pegaflow_save_duration_seconds": {(): _copy(meter.copies.get("save"))},
            "pegaflow_load_duration_seconds": {(): _copy(meter.copies.get("load"))},
        },
    )


def _plain(**numbers: float) -> Values:
    return {f"pegaflow_{name}": {(): number} for name, number in numbers.items()}


def _of_host(host: HostStatistics) -> Values:
    values = _plain(
        pool_capacity_bytes=host.capacity_bytes,
        pool_used_bytes=host.used_bytes,
        pool_largest_free_bytes=host.largest_free_bytes,
        pool_alloc_failures_total=host.rejections,
        cache_resident_blocks=host.blocks,
        cache_resident_bytes=host.block_bytes,
        cache_unsealed_blocks=host.unsealed,
        cache_pinned_blocks=host.pinned_blocks,
        cache_pinned_bytes=host.pinned_bytes,
        cache_block_hits_total=host.hits,
        cache_block_misses_total=host.misses,
        cache_block_insertions_total=host.insertions,
        cache_block_evictions_total=host.evictions,
        cache_eviction_reclaimed_bytes_total=host.evicted_bytes,
        inflight_gc_cleaned_total=host.unsealed_reclaimed,
        eviction_callback_failures_total=host.callback_failures,
        leases=host.leases,
        leases_granted_total=host.leases_granted,
        leases_expired_total=host.leases_expired,
        save_known_blocks_total=host.known,
    )
    values["pegaflow_cache_tier_block_requests_total"] = {
        ("ram",): host.hits,
        ("miss",): host.misses,
    }
    return values


def _of_namespaces(host: HostStatistics) -> Values:
    largest = sorted(host.namespaces.items(), key=lambda item: -item[1].size_bytes)
    blocks: dict[Labels, float] = {}
    sizes: dict[Labels, float] = {}
    for number, (name, found) in enumerate(largest):
        label = (name if number < NAMESPACES_MAX else OTHER,)
        blocks[label] = blocks.get(label, 0) + found.blocks
        sizes[label] = sizes.get(label, 0) + found.size_bytes
    return {
        "pegaflow_namespace_resident_blocks": blocks,
        "pegaflow_namespace_resident_bytes": sizes,
    }


def _of_instances(node: Node) -> Values:
    here = list(node.instances)
    return _plain(
        instances=len(here),
        instances_ready=sum(not instance.missing for instance in here),
        sessions=sum(len(instance.sessions) for instance in here),
        registered_ranks=sum(len(instance.ranks) for instance in here),
    )


def _of_devices(node: Node) -> Values:
    found = node.engine.statistics()

    def by_direction(numbers: Mapping[Direction, float]) -> dict[Labels, float]:
        return {(direction,): number for direction, number in numbers.items()}

    return {
        "pegaflow_save_bytes_total": {(): found.bytes_copied["save"]},
        "pegaflow_load_bytes_total": {(): found.bytes_copied["load"]},
        "pegaflow_save_failures_total": {(): found.failed_blocks["save"]},
        "pegaflow_load_failures_total": {(): found.failed_blocks["load"]},
        "pegaflow_copy_method_bytes_total": {
            (direction, method): size for (direction, method), size in found.method_bytes.items()
        },
        "pegaflow_copy_staged_below_bytes": by_direction(found.staged_below_bytes),
        "pegaflow_copy_queued": by_direction(found.queued),
        "pegaflow_copy_batches_total": by_direction(found.batches),
        "pegaflow_copy_busy_seconds_total": by_direction(found.busy_seconds),
        "pegaflow_copy_wait_seconds_total": by_direction(found.wait_seconds),
    }


def _copy(found: Distribution | None) -> Distribution:
    if found is None:
        return Distribution()
    return attrs.evolve(found, buckets=list(found.buckets))


def _copied(by_key: Mapping[tuple[str, str], Distribution]) -> dict[Labels, Distribution]:
    return {key: _copy(found) for key, found in by_key.items()}
