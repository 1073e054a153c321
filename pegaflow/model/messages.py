"""Requests and replies of the node protocol as plain values; schema/node.capnp has the meaning."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from pegaflow.model.keys import BlockHash, InstanceId, LeaseToken, Manifest, Namespace
from pegaflow.model.layout import GroupLayout, Region

PROTOCOL_MIN, PROTOCOL_MAX = 1, 1
"""The range of protocol versions that this build speaks."""


@attrs.frozen
class OpenRequest:
    """Who connects, and whose keys it will use."""

    protocol_min: int
    protocol_max: int
    client: str
    instance: InstanceId
    namespace: Namespace
    manifest: Manifest
    world_size: int
    monotonic_ns: int


@attrs.frozen
class Opened:
    """What the daemon answers; the Session capability travels beside it."""

    protocol: int
    boot_id: bytes
    handover: str
    version: str


@attrs.frozen
class Health:
    """Cheap facts about a running daemon."""

    ready: bool
    boot_id: bytes
    version: str
    pool_ready_bytes: int
    pool_total_bytes: int


@attrs.frozen
class RegisterRequest:
    """One rank's KV memory and how blocks lie in it."""

    rank: int
    slot_index: int
    slot_count: int
    regions: tuple[Region, ...]
    groups: tuple[GroupLayout, ...]


@attrs.frozen
class QueryRequest:
    """Hashes in prefix order; ``parent`` is the hash before them, b"" at a prompt's start."""

    group: int
    hashes: list[BlockHash]
    parent: bytes
    request_id: str


@attrs.frozen
class Ready:
    """``hit_count`` leading blocks are here, held by ``lease`` (b"" when there are none)."""

    hit_count: int
    lease: LeaseToken
    ttl_ms: int


@attrs.frozen
class Loading:
    """Blocks are on their way from a lower tier; ask again."""


QueryReply = Ready | Loading


@attrs.frozen(eq=False)
class LoadRequest:
    """Block ``positions[i]`` of the lease goes to block ``block_ids[i]`` of the rank's memory."""

    rank: int
    lease: LeaseToken
    group: int
    positions: NDArray[np.uint32]
    block_ids: NDArray[np.uint32]
    deadline_ns: int


@attrs.frozen(eq=False)
class Loaded:
    """Indices into ``positions`` that failed; mostly empty."""

    failed: NDArray[np.uint32]


@attrs.frozen(eq=False)
class SaveRun:
    """Consecutive blocks of one request."""

    group: int
    hashes: list[BlockHash]
    parent: bytes
    block_ids: NDArray[np.uint32]


@attrs.frozen(eq=False)
class SaveRequest:
    """What one rank saves in one call; the blocks stay unchanged until the deadline."""

    rank: int
    runs: tuple[SaveRun, ...]
    deadline_ns: int


@attrs.frozen
class Saved:
    """Counts of blocks: they add up to what was asked."""

    stored: int
    known: int
    rejected: int
    failed: int
