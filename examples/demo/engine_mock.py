"""A stand-in for an inference engine that computes "KV" by hashing: the same demo in seconds.

    engine_mock.py MODEL PHASE RESULT [PORT]      without PORT there is no cache; MODEL is not used

Like a real engine it has block memory that the daemon reaches by file descriptor, a prefix cache of
its own, and outputs that depend on every byte of the KV: one wrong byte changes all tokens.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import numpy as np
from workload import BLOCK_TOKENS, OUTPUT_TOKENS, Answer, Run, prompts, warm_up

from pegaflow.client.blocking import BlockingSession
from pegaflow.client.memory import SharedMemory, hand_over, layout_of
from pegaflow.model.keys import BlockHash, InstanceId, LeaseToken, Manifest, Namespace
from pegaflow.model.layout import HandedOver, Region
from pegaflow.model.messages import (
    LoadRequest,
    QueryRequest,
    Ready,
    RegisterRequest,
    SaveRequest,
    SaveRun,
)

LAYERS, BLOCKS, LAYER_BYTES = 8, 512, 32 << 10
EFFORT = 6
"""How much more is hashed than kept: computing has to cost more than copying."""

TIMEOUT_S = 5.0

MANIFEST = Manifest(
    {
        "model": "mock",
        "revision": "1",
        "dtype": "uint8",
        "kv-layout": f"layers={LAYERS} bytes={LAYER_BYTES}",
        "rank-geometry": "tp=1 pp=1",
        "block-size-tokens": str(BLOCK_TOKENS),
        "hash-algorithm": "sha256",
        "hash-seed-check": "0",
    }
)


def chained(tokens: list[int]) -> list[BlockHash]:
    """One hash a full block, each covering all tokens before it."""
    hashes: list[BlockHash] = []
    parent = b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = np.array(tokens[start : start + BLOCK_TOKENS], "<u4").tobytes()
        parent = hashlib.sha256(parent + block).digest()
        hashes.append(BlockHash(parent))
    return hashes


class MockEngine:
    """Memory shaped (layers, blocks, bytes), a prefix cache, and maybe a session."""

    def __init__(self, port: int | None) -> None:
        self.memory = SharedMemory(LAYERS * BLOCKS * LAYER_BYTES)
        self.kv = self.memory.view.reshape(LAYERS, BLOCKS, LAYER_BYTES)
        self.kv[:] = 0  # the pages are there before anything is timed
        self.here: dict[BlockHash, int] = {}
        self.asked = 0
        self.session = self.open(port) if port is not None else None

    def open(self, port: int) -> BlockingSession:
        """Connect, hand the memory over, register."""
        session = BlockingSession(
            f"127.0.0.1:{port}",
            instance=InstanceId("mock-engine"),
            namespace=Namespace("demo"),
            manifest=MANIFEST,
            world_size=1,
            timeout_s=TIMEOUT_S,
        )
        token = hand_over(session.opened.handover, [self.memory.fd], TIMEOUT_S)
        base = self.memory.view.__array_interface__["data"][0]
        layout = layout_of(list(self.kv), region=0, base_address=base)
        region = Region(self.memory.size_bytes, HandedOver(token, 0, 0))
        session.register(RegisterRequest(0, 0, 1, (region,), (layout,)), TIMEOUT_S)
        return session

    def answer(self, tokens: list[int]) -> Answer:
        """One prompt from start to end."""
        started = time.monotonic()
        hashes = chained(tokens)
        own = next((i for i, name in enumerate(hashes) if name not in self.here), len(hashes))
        first_new = len(self.here)
        ids = [self.here[name] for name in hashes[:own]]
        ids += list(range(first_new, first_new + len(hashes) - own))
        assert max(ids) < BLOCKS
        loaded = self.load(hashes, ids, own, len(tokens))
        for name, block in zip(hashes[own + loaded :], ids[own + loaded :], strict=True):
            self.kv[:, block] = self.computed(name)
        output = self.decode(tokens, ids)
        first = next(output)
        ttft_ms = (time.monotonic() - started) * 1e3
        self.here.update(zip(hashes, ids, strict=True))
        answer = Answer(
            [first, *output],
            ttft_ms,
            computed=len(tokens) - (own + loaded) * BLOCK_TOKENS,
            own_cache=own * BLOCK_TOKENS,
            pegaflow=loaded * BLOCK_TOKENS,
        )
        self.save(hashes, ids, own + loaded)
        return answer

    def load(self, hashes: list[BlockHash], ids: list[int], own: int, tokens: int) -> int:
        """Blocks behind the first ``own`` that came from the daemon."""
        if self.session is None:
            return 0
        self.asked += tokens - own * BLOCK_TOKENS
        if own == len(hashes):
            return 0
        parent = hashes[own - 1] if own else b""
        reply = self.session.query(QueryRequest(0, hashes[own:], parent, "demo"), TIMEOUT_S)
        if not isinstance(reply, Ready) or not reply.hit_count:
            return 0
        return self.fetch(reply.lease, ids[own : own + reply.hit_count])

    def fetch(self, lease: LeaseToken, ids: list[int]) -> int:
        """All blocks of a lease."""
        assert self.session is not None
        positions = np.arange(len(ids), dtype=np.uint32)
        deadline_ns = time.monotonic_ns() + int(TIMEOUT_S * 1e9)
        request = LoadRequest(0, lease, 0, positions, np.array(ids, np.uint32), deadline_ns)
        failed = self.session.load(request, TIMEOUT_S).failed
        return int(failed.min()) if len(failed) else len(ids)

    def save(self, hashes: list[BlockHash], ids: list[int], begin: int) -> None:
        """What the daemon did not give us."""
        if self.session is None or begin == len(hashes):
            return
        parent = hashes[begin - 1] if begin else b""
        run = SaveRun(0, hashes[begin:], parent, np.array(ids[begin:], np.uint32))
        deadline_ns = time.monotonic_ns() + int(TIMEOUT_S * 1e9)
        self.session.save(SaveRequest(0, (run,), deadline_ns), TIMEOUT_S)

    def computed(self, name: BlockHash) -> np.ndarray:
        """The forward pass of one block: slow, and a function of all tokens so far."""
        kept = LAYERS * LAYER_BYTES
        stream = hashlib.shake_256(name).digest(EFFORT * kept)
        return np.frombuffer(stream, np.uint8, kept, (EFFORT - 1) * kept).reshape(LAYERS, -1)

    def decode(self, tokens: list[int], ids: list[int]):  # noqa: ANN201 - a generator of ints
        """Output tokens out of every byte of the prompt's KV and the tokens of its tail."""
        state = hashlib.sha256(np.array(tokens, "<u4").tobytes())
        for block in ids:
            state.update(np.ascontiguousarray(self.kv[:, block]))
        for _ in range(OUTPUT_TOKENS):
            token = int.from_bytes(state.digest()[:4], "little") % 1000
            state.update(token.to_bytes(4, "little"))
            yield token


def main() -> None:
    """Run, write the result, and stay until the parent says so or kills us."""
    phase, result = sys.argv[2], Path(sys.argv[3])
    port = int(sys.argv[4]) if len(sys.argv) > 4 else None
    started = time.monotonic()
    engine = MockEngine(port)
    run = Run(phase, start_s=time.monotonic() - started)
    engine.answer(warm_up(phase))
    engine.asked = 0
    for number, tokens in enumerate(prompts(), 1):
        answer = engine.answer(tokens)
        run.answers.append(answer)
        text = f"PROMPT {number} {len(tokens)} {answer.ttft_ms:.1f} {answer.computed}"
        print(text, flush=True)
    run.asked = engine.asked
    run.write(result)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
