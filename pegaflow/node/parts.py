"""What a flow needs to work: policy, devices, a clock, and a nursery that outlives the caller."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import attrs
import trio

from pegaflow.engine.base import AttachedMemory, CopyEngine
from pegaflow.model.keys import SessionId
from pegaflow.observe.meter import Meter
from pegaflow.policy.host import Host
from pegaflow.policy.instances import Instances

ClaimFds = Callable[[bytes], list[int]]
"""Descriptors that were handed over under a token; the caller closes them.  BadRequest if none."""


@attrs.define(eq=False, kw_only=True)
class Node:
    """No behaviour: flows act on it.  The daemon builds one, the simulation one of other parts."""

    host: Host
    engine: CopyEngine
    claim_fds: ClaimFds
    background: trio.Nursery
    """For what must end although its caller has gone: letting go of an engine's memory."""
    clock: Callable[[], float]
    """Seconds on the clients' CLOCK_MONOTONIC."""
    boot_id: bytes
    handover_address: str = ""
    pool_total_bytes: int = 0
    instances: Instances[AttachedMemory] = attrs.field(factory=Instances)
    meter: Meter = attrs.field(factory=Meter)
    draining: bool = False
    session_ids: Iterator[SessionId] = attrs.field(
        factory=lambda: (SessionId(number) for number in itertools.count(1))
    )
