"""What the Host reports: outcomes of clean-up, counters, statistics.  Values only."""

from __future__ import annotations

import attrs

from pegaflow.model.keys import InstanceId, LeaseToken, Namespace, SessionId


@attrs.frozen
class Evicted:
    """Counts of one eviction or clean-up."""

    blocks: int = 0
    size_bytes: int = 0
    unsealed: int = 0
    """Blocks that never became whole, given up."""
    still_referenced: int = 0
    """Blocks that stayed because of a lease, a copy in flight, or a continuation that is leased."""


@attrs.frozen
class ExpiredLease:
    """A lease whose time was over."""

    token: LeaseToken
    owner: SessionId
    instance: InstanceId
    blocks: int


@attrs.frozen
class StaleBlocks:
    """Blocks that did not become whole in time."""

    namespace: Namespace
    group: int
    blocks: int


@attrs.frozen
class NamespaceStatistics:
    """One namespace."""

    blocks: int
    size_bytes: int
    unsealed: int
    pinned_blocks: int


@attrs.frozen
class HostStatistics:
    """A snapshot; counters count since start."""

    capacity_bytes: int
    used_bytes: int
    largest_free_bytes: int
    blocks: int
    block_bytes: int
    unsealed: int
    pinned_blocks: int
    pinned_bytes: int
    leases: int
    open_saves: int
    open_loads: int
    namespaces: dict[Namespace, NamespaceStatistics]
    hits: int
    misses: int
    insertions: int
    evictions: int
    evicted_bytes: int
    rejections: int
    known: int
    failed: int
    unsealed_reclaimed: int
    leases_granted: int
    leases_expired: int
    callback_failures: int


@attrs.define
class Counters:
    """Totals since start, in blocks unless the name says otherwise."""

    hits: int = 0
    misses: int = 0
    insertions: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    rejections: int = 0
    known: int = 0
    failed: int = 0
    unsealed_reclaimed: int = 0
    leases_granted: int = 0
    leases_expired: int = 0
    callback_failures: int = 0
