"""Random calls, valid and not, in random order over several sessions of a live daemon."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable

import attrs
import numpy as np

from fuzz.messages import MANIFEST, unique_name
from fuzz.target import Target
from pegaflow.client.blocking import BlockingSession
from pegaflow.client.memory import SharedMemory, hand_over
from pegaflow.errors import DeadlineExceeded, PeerGone, PegaflowError
from pegaflow.model import messages as m
from pegaflow.model.keys import BlockHash, InstanceId, LeaseToken, Manifest, Namespace
from pegaflow.model.layout import GroupLayout, HandedOver, Region, Run

TIMEOUT_S = 10.0
BLOCKS, BLOCK_BYTES = 64, 1024
SESSIONS = 4
CHECK_EVERY = 5000


class InternalError(Exception):
    """The daemon answered that it has a bug."""


@attrs.define(eq=False)
class _Engine:
    """One session with memory; its arguments are right, or just beyond what is right."""

    target: Target
    dice: random.Random
    namespace: Namespace
    session: BlockingSession | None = None
    memory: SharedMemory = attrs.field(factory=lambda: SharedMemory(BLOCKS * BLOCK_BYTES))
    leases: list[tuple[LeaseToken, int]] = attrs.field(factory=list)

    def open(self) -> None:
        """A new session, sometimes one that must be refused."""
        self.close()
        manifest, world = MANIFEST, 1
        if self.dice.random() < 0.2:
            manifest = self.dice.choice([Manifest({}), Manifest({**MANIFEST.fields, "dtype": "x"})])
        if self.dice.random() < 0.1:
            world = self.dice.choice([0, 2, 4096, 4097, 2**32 - 1])
        self.session = BlockingSession(
            self.target.address,
            instance=InstanceId(self.dice.choice([unique_name(), "shared", "", "x" * 300])),
            namespace=self.namespace if self.dice.random() < 0.9 else Namespace("n" * 400),
            manifest=manifest,
            world_size=world,
            timeout_s=TIMEOUT_S,
        )

    def close(self) -> None:
        """Drop it."""
        self.leases.clear()
        if self.session is not None:
            self.session.close()
            self.session = None

    def number(self, right: int) -> int:
        """Mostly right, sometimes at an edge of its type."""
        if self.dice.random() < 0.9:
            return right
        return self.dice.choice([0, 1, right + 1, 2**16 - 1, 2**31, 2**32 - 1])

    def hashes(self) -> list[BlockHash]:
        """A prefix out of few families, so that calls meet each other's blocks."""
        family = self.dice.randrange(40)
        width = 32 if self.dice.random() < 0.95 else self.dice.choice([1, 15, 16, 64, 65])
        count = self.dice.choice([0, 1, 2, 7, 30])
        return [BlockHash(bytes([family, i]) + b"#" * max(width - 2, 0)) for i in range(count)]

    def ids(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        """Block numbers, sometimes beyond the memory, sometimes too few."""
        high = BLOCKS if self.dice.random() < 0.95 else 2**32 - 1
        short = self.dice.random() < 0.03
        numbers = [self.dice.randrange(high) for _ in range(max(count - short, 0))]
        return np.array(numbers, np.uint32)

    def deadline_ns(self) -> int:
        """Soon, mostly; or long over; or in a thousand years."""
        offset = self.dice.choice([10**9, 10**9, 10**9, 10**6, -(10**9), 2**60])
        return max(time.monotonic_ns() + offset, 0)

    def register(self, session: BlockingSession) -> None:
        """Hand memory over; sometimes smaller than claimed, under a wrong token, overlapping."""
        token = self.dice.randbytes(16)
        if self.dice.random() < 0.95:
            fds = [self.memory.fd] * self.dice.choice([1, 1, 2])
            token = hand_over(session.opened.handover, fds, TIMEOUT_S)
        size = self.memory.size_bytes if self.dice.random() < 0.9 else self.number(1 << 40)
        region = Region(size, HandedOver(token, self.number(0) % 65536, self.number(0)))
        run = Run(0, self.number(0), self.number(BLOCK_BYTES), self.number(BLOCK_BYTES))
        layout = GroupLayout(self.number(0) % 65536, self.number(BLOCKS), (run,))
        rank, slot, slots = self.number(0), self.number(0), self.number(1)
        session.register(m.RegisterRequest(rank, slot, slots, (region,), (layout,)), TIMEOUT_S)

    def query(self, session: BlockingSession) -> None:
        """Ask; keep the lease."""
        hashes = self.hashes()
        parent = self.dice.choice([b"", b"p" * 32, b"p" * 65])
        request = m.QueryRequest(self.number(0) % 65536, hashes, parent, "r")
        reply = session.query(request, TIMEOUT_S)
        if isinstance(reply, m.Ready) and reply.hit_count:
            self.leases.append((reply.lease, reply.hit_count))

    def lease(self) -> tuple[LeaseToken, int]:
        """One of ours, or an invented one."""
        if self.leases and self.dice.random() < 0.8:
            return self.dice.choice(self.leases)
        return LeaseToken(self.dice.randbytes(self.dice.choice([16, 16, 0, 15]))), 3

    def load(self, session: BlockingSession) -> None:
        """Redeem a lease, fully or not, twice, with positions beyond it."""
        token, count = self.lease()
        positions = self.ids(count) % max(self.number(count), 1)
        rank, group, ids = self.number(0), self.number(0) % 65536, self.ids(count)
        request = m.LoadRequest(rank, token, group, positions, ids, self.deadline_ns())
        session.load(request, TIMEOUT_S)

    def save(self, session: BlockingSession) -> None:
        """One to three runs."""
        runs = []
        for _ in range(self.dice.randint(0, 3)):
            hashes = self.hashes()
            runs.append(m.SaveRun(self.number(0) % 65536, hashes, b"", self.ids(len(hashes))))
        session.save(m.SaveRequest(self.number(0), tuple(runs), self.deadline_ns()), TIMEOUT_S)

    def act(self) -> str:
        """One random call; returns its name and what became of it."""
        name: str = "open"
        step: Callable[[], object] = self.open
        if self.session is not None and self.dice.random() >= 0.01:
            name, step = self._some_call(self.session)
        try:
            step()
        except PeerGone:
            self.close()
            return f"{name}: connection closed"
        except DeadlineExceeded:
            return f"{name}: past its deadline"
        except PegaflowError as exc:
            if type(exc) is PegaflowError:
                raise InternalError(f"{name}: {exc}") from None
            return f"{name}: {type(exc).__name__}"
        except (TypeError, ValueError, OverflowError) as exc:
            raise InternalError(f"{name}: the client raised {exc!r}") from None
        return f"{name}: ok"

    def _some_call(self, session: BlockingSession) -> tuple[str, Callable[[], object]]:
        token, _ = self.lease()
        calls: dict[str, Callable[[], object]] = {
            "register": lambda: self.register(session),
            "query": lambda: self.query(session),
            "load": lambda: self.load(session),
            "save": lambda: self.save(session),
            "release": lambda: session.release([token] * self.dice.choice([0, 1, 3]), TIMEOUT_S),
            "renew": lambda: session.renew(token, TIMEOUT_S),
            "ping": lambda: session.ping(TIMEOUT_S),
            "health": lambda: session.health(TIMEOUT_S),
            "unregister": lambda: session.unregister(TIMEOUT_S),
        }
        weights = [2, 10, 10, 10, 3, 3, 1, 1, 0.2]
        name = self.dice.choices(list(calls), weights)[0]
        return name, calls[name]


def run(target: Target, dice: random.Random, count: int) -> Counter[str]:
    """``count`` calls; returns what became of them."""
    ended: Counter[str] = Counter()
    namespace = Namespace(unique_name())
    engines = [_Engine(target, dice, namespace) for _ in range(SESSIONS)]
    try:
        for number in range(count):
            target.remember(f"{number} ".encode())
            what = dice.choice(engines).act()
            ended[what] += 1
            ended["inputs"] += 1
            if number % CHECK_EVERY == 0:
                target.check()
    finally:
        for engine in engines:
            engine.close()
            engine.memory.close()
    target.check()
    return ended
