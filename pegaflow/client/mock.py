"""An engine without a model: ranks with memory of their own, bytes made from their key.

What a connector has to do, in its smallest form, for benchmarks, demos and tests: any wrong byte is
recognised because :func:`pattern` says what each must be.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pegaflow.client.blocking import BlockingSession
from pegaflow.client.memory import SharedMemory, hand_over, layout_of
from pegaflow.model.address import Address
from pegaflow.model.keys import (
    REQUIRED_MANIFEST_FIELDS,
    BlockHash,
    InstanceId,
    LeaseToken,
    Manifest,
    Namespace,
)
from pegaflow.model.layout import HandedOver, Region
from pegaflow.model.messages import (
    LoadRequest,
    QueryRequest,
    Ready,
    RegisterRequest,
    Saved,
    SaveRequest,
    SaveRun,
)

TIMEOUT_S = 5.0
MANIFEST = Manifest(dict.fromkeys(REQUIRED_MANIFEST_FIELDS, "mock"))


def chained_hashes(tokens: Sequence[int], block_tokens: int) -> list[BlockHash]:
    """One 32-byte hash a full block, each covering all tokens before it."""
    hashes: list[BlockHash] = []
    parent = b""
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = np.array(tokens[start : start + block_tokens], "<u4").tobytes()
        parent = hashlib.sha256(parent + block).digest()
        hashes.append(BlockHash(parent))
    return hashes


def pattern(name: bytes, rank: int, size_bytes: int) -> NDArray[np.uint8]:
    """What block ``name`` of ``rank`` consists of."""
    stream = hashlib.shake_256(name + rank.to_bytes(4, "little")).digest(size_bytes)
    return np.frombuffer(stream, np.uint8)


class MockRank:
    """One process of an engine: memory shaped (layers, blocks, bytes) and a session.

    The memory is the rank's; the daemon reads and writes it only during :meth:`save` and
    :meth:`load`.  Use it in the thread that made it.
    """

    def __init__(
        self,
        session: BlockingSession,
        *,
        rank: int = 0,
        ranks: int = 1,
        layers: int = 1,
        blocks: int = 64,
        layer_bytes: int = 4096,
    ) -> None:
        """Hand fresh memory over and register; raises of the error tree."""
        self.session, self.number = session, rank
        self.memory = SharedMemory(layers * blocks * layer_bytes)
        self.kv = self.memory.view.reshape(layers, blocks, layer_bytes)
        token = hand_over(session.opened.handover, [self.memory.fd], TIMEOUT_S)
        base = self.memory.view.__array_interface__["data"][0]
        layout = layout_of(list(self.kv), region=0, base_address=base, block_axis=0)
        region = Region(self.memory.size_bytes, HandedOver(token, 0, 0))
        request = RegisterRequest(rank, rank, ranks, (region,), (layout,))
        self.ranks_missing = session.register(request, TIMEOUT_S)

    @classmethod
    def connect(
        cls,
        address: Address | str,
        *,
        instance: str = "mock",
        namespace: str = "mock",
        manifest: Manifest = MANIFEST,
        rank: int = 0,
        ranks: int = 1,
        layers: int = 1,
        blocks: int = 64,
        layer_bytes: int = 4096,
    ) -> MockRank:
        """Open a session of its own, then register."""
        session = BlockingSession(
            address,
            instance=InstanceId(instance),
            namespace=Namespace(namespace),
            manifest=manifest,
            world_size=ranks,
            timeout_s=TIMEOUT_S,
        )
        try:
            return cls(
                session, rank=rank, ranks=ranks, layers=layers, blocks=blocks,
                layer_bytes=layer_bytes,
            )  # fmt: skip
        except BaseException:
            session.close()
            raise

    def compute(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """The forward pass: fill blocks with what their keys say."""
        layers, _, layer_bytes = self.kv.shape
        for name, block in zip(hashes, block_ids, strict=True):
            bytes_of_block = pattern(name, self.number, layers * layer_bytes)
            self.kv[:, block] = bytes_of_block.reshape(layers, layer_bytes)

    def wrong_blocks(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> list[int]:
        """Block ids whose bytes are not what their keys say."""
        size = self.kv.shape[0] * self.kv.shape[2]
        return [
            block
            for name, block in zip(hashes, block_ids, strict=True)
            if not np.array_equal(self.kv[:, block].ravel(), pattern(name, self.number, size))
        ]

    def save(
        self,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[int] | NDArray[np.int64],
        *,
        parent: bytes = b"",
        timeout_s: float = TIMEOUT_S,
    ) -> Saved:
        """Save blocks in prefix order; leave them as they are until this returns."""
        run = SaveRun(0, list(hashes), parent, np.asarray(block_ids, np.uint32))
        return self.session.save(
            SaveRequest(self.number, (run,), _deadline_ns(timeout_s)), timeout_s
        )

    def query(self, hashes: Sequence[BlockHash], *, parent: bytes = b"") -> Ready:
        """The longest cached prefix, leased."""
        reply = self.session.query(QueryRequest(0, list(hashes), parent, "mock"), TIMEOUT_S)
        assert isinstance(reply, Ready), "there is no tier below memory"
        return reply

    def load(
        self, lease: LeaseToken, block_ids: Sequence[int], *, timeout_s: float = TIMEOUT_S
    ) -> list[int]:
        """All blocks of a lease, in order, into ``block_ids``; returns the ids that failed."""
        request = LoadRequest(
            self.number,
            lease,
            0,
            np.arange(len(block_ids), dtype=np.uint32),
            np.asarray(block_ids, np.uint32),
            _deadline_ns(timeout_s),
        )
        failed = self.session.load(request, timeout_s).failed
        return [block_ids[position] for position in failed.tolist()]

    def close(self) -> None:
        """The daemon forgets this process and keeps its blocks."""
        self.session.close()
        self.memory.close()

    def __enter__(self) -> MockRank:
        """For a ``with`` block that closes it."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()


def _deadline_ns(timeout_s: float) -> int:
    return time.monotonic_ns() + int(timeout_s * 1e9)
