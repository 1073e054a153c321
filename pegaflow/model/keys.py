"""What identifies a block, and who may share it."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NewType

import attrs

from pegaflow.errors import BadRequest

BlockHash = NewType("BlockHash", bytes)
"""The engine's own chained hash of a block's tokens and everything before them."""

Namespace = NewType("Namespace", str)
InstanceId = NewType("InstanceId", str)
LeaseToken = NewType("LeaseToken", bytes)
"""16 random bytes."""

SessionId = NewType("SessionId", int)
"""Who owns leases and registrations; unique within one run of the daemon."""

HASH_BYTES_MIN, HASH_BYTES_MAX = 16, 64
NAMESPACE_BYTES_MAX = 256

REQUIRED_MANIFEST_FIELDS = (
    "model",
    "revision",
    "dtype",
    "kv-layout",
    "rank-geometry",
    "block-size-tokens",
    "hash-algorithm",
    "hash-seed-check",
)
"""What a block hash does not cover although the bytes depend on it."""


@attrs.frozen
class Manifest:
    """Key identity: two engines share the blocks of a namespace only if all fields are equal."""

    fields: Mapping[str, str]

    def first_difference(self, other: Manifest) -> str | None:
        """Name of the first field, in alphabetical order, that differs; None when equal."""
        for name in sorted({*self.fields, *other.fields}):
            if self.fields.get(name) != other.fields.get(name):
                return name
        return None

    def check_complete(self) -> None:
        """Raise :exc:`BadRequest` unless every required field has a value."""
        for name in REQUIRED_MANIFEST_FIELDS:
            if not self.fields.get(name):
                raise BadRequest(
                    f"manifest field {name!r} is missing or empty; it is part of a key's identity",
                    name,
                )


def unpack_hashes(packed: bytes | memoryview, width: int) -> list[BlockHash]:
    """Cut one packed buffer into hashes of ``width`` bytes, in order.  Copies.

    Raises :exc:`BadRequest` for a width outside 16..64 or a length that is no multiple of it.
    """
    size = len(packed)
    if size == 0:
        return []
    if not HASH_BYTES_MIN <= width <= HASH_BYTES_MAX or size % width:
        raise BadRequest(
            f"{size} bytes of hashes with width {width}: "
            f"the width must be {HASH_BYTES_MIN}..{HASH_BYTES_MAX} and divide the length",
            "hashes",
        )
    # 13 us for 640 hashes; slicing in a loop takes 58.
    return list(struct.unpack(f"{width}s" * (size // width), packed))


def pack_hashes(hashes: Sequence[bytes]) -> tuple[bytes, int]:
    """Join hashes of one width; the inverse of :func:`unpack_hashes`."""
    return b"".join(hashes), len(hashes[0]) if hashes else 0
