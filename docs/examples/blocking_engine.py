"""All that an engine's connector has to do, with nothing but :mod:`pegaflow.client`.

    python docs/examples/blocking_engine.py 127.0.0.1:50055

Two "engines" with the same keys follow each other: the first saves four blocks and goes away, the
second finds three of them (its prompt ends differently) and has the same bytes.
"""

from __future__ import annotations

import hashlib
import sys
import time

import numpy as np

from pegaflow.client.blocking import BlockingSession
from pegaflow.client.memory import SharedMemory, hand_over, layout_of
from pegaflow.model.keys import BlockHash, InstanceId, Manifest, Namespace
from pegaflow.model.layout import HandedOver, Region
from pegaflow.model.messages import (
    LoadRequest,
    QueryRequest,
    Ready,
    RegisterRequest,
    SaveRequest,
    SaveRun,
)

LAYERS, BLOCKS, BLOCK_BYTES = 4, 16, 4096
TIMEOUT_S = 5.0

# Engines share blocks only if all of this is equal: a block's hash covers its tokens, not these.
MANIFEST = Manifest(
    {
        "model": "example",
        "revision": "1",
        "dtype": "uint8",
        "kv-layout": f"{LAYERS}x{BLOCK_BYTES}",
        "rank-geometry": "tp1pp1",
        "block-size-tokens": "16",
        "hash-algorithm": "sha256-chain",
        "hash-seed-check": "0",
    }
)


def block_hashes(tokens: list[int], block_tokens: int = 16) -> list[BlockHash]:
    """One hash a full block, each covering everything before it."""
    hashes: list[BlockHash] = []
    parent = b""
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        text = ",".join(map(str, tokens[start : start + block_tokens]))
        parent = hashlib.sha256(parent + text.encode()).digest()
        hashes.append(BlockHash(parent))
    return hashes


class Engine:
    """One process with one rank: KV memory shaped (layers, blocks, bytes)."""

    def __init__(self, address: str, name: str) -> None:
        self.session = BlockingSession(
            address,
            instance=InstanceId(name),
            namespace=Namespace("example"),
            manifest=MANIFEST,
            world_size=1,
            timeout_s=TIMEOUT_S,
        )
        self.memory = SharedMemory(LAYERS * BLOCKS * BLOCK_BYTES)
        self.kv = self.memory.view.reshape(LAYERS, BLOCKS, BLOCK_BYTES)
        token = hand_over(self.session.opened.handover, [self.memory.fd], TIMEOUT_S)
        region = Region(self.memory.size_bytes, HandedOver(token, 0, 0))
        base = self.memory.view.__array_interface__["data"][0]
        layout = layout_of(list(self.kv), region=0, base_address=base)
        self.session.register(RegisterRequest(0, 0, 1, (region,), (layout,)), TIMEOUT_S)

    def save(self, hashes: list[BlockHash], block_ids: list[int]) -> int:
        """Returns how many blocks were stored; they must not change before the call returns."""
        run = SaveRun(0, hashes, b"", np.array(block_ids, np.uint32))
        deadline_ns = time.monotonic_ns() + int(TIMEOUT_S * 1e9)
        return self.session.save(SaveRequest(0, (run,), deadline_ns), TIMEOUT_S).stored

    def load(self, hashes: list[BlockHash], block_ids: list[int]) -> int:
        """Fetch the longest cached prefix into ``block_ids``; returns its length in blocks."""
        reply = self.session.query(QueryRequest(0, hashes, b"", "request-1"), TIMEOUT_S)
        if not isinstance(reply, Ready) or reply.hit_count == 0:
            return 0
        count = reply.hit_count
        positions = np.arange(count, dtype=np.uint32)
        targets = np.array(block_ids[:count], np.uint32)
        deadline_ns = time.monotonic_ns() + int(TIMEOUT_S * 1e9)
        request = LoadRequest(0, reply.lease, 0, positions, targets, deadline_ns)
        assert len(self.session.load(request, TIMEOUT_S).failed) == 0
        return count

    def close(self) -> None:
        """The daemon forgets the engine and keeps the blocks."""
        self.session.close()
        self.memory.close()


def main(address: str) -> None:
    tokens = list(range(64))
    hashes = block_hashes(tokens)

    first = Engine(address, "engine-1")
    first.kv[:, :4] = np.arange(4, dtype=np.uint8)[None, :, None] + 1
    print("stored blocks:", first.save(hashes, [0, 1, 2, 3]))
    first.close()

    second = Engine(address, "engine-2")
    other_end = block_hashes([*tokens[:48], *range(900, 916)])
    found = second.load(other_end, [8, 9, 10, 11])
    print("found blocks:", found)
    same = all(bool((second.kv[:, 8 + i] == i + 1).all()) for i in range(found))
    print("same bytes:", same)
    second.close()
    assert (found, same) == (3, True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50055")
