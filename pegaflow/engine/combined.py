"""Several copy engines as one: memory goes to the engine that can open it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import attrs
import numpy as np
from numpy.typing import NDArray

from pegaflow.engine.base import (
    AttachedMemory,
    Copies,
    CopyEngine,
    Direction,
    EngineStatistics,
)
from pegaflow.engine.cuda import CudaDevices
from pegaflow.engine.host import open_host_engine
from pegaflow.engine.lanes import Pace, add_up
from pegaflow.engine.pinned import Pool
from pegaflow.errors import BadRequest, MemoryGone
from pegaflow.model.layout import CudaIpc, Region


@attrs.define(eq=False)
class Engines:
    """The contract of :mod:`pegaflow.engine.base`, passed on by where the memory lies."""

    host: CopyEngine
    cuda: CopyEngine | None = None
    _owners: dict[AttachedMemory, CopyEngine] = attrs.field(init=False, factory=dict)

    async def attach(self, regions: Sequence[Region], fds: Sequence[int]) -> AttachedMemory:
        """Raises :exc:`BadRequest` for a rank with regions of both kinds, or without CUDA."""
        engine = self._engine_for(regions)
        memory = await engine.attach(regions, fds)
        self._owners[memory] = engine
        return memory

    async def detach(self, memory: AttachedMemory) -> None:
        """Close it with the engine that opened it."""
        await self._owners.pop(memory).detach(memory)

    async def copy(
        self,
        direction: Direction,
        memory: AttachedMemory,
        batches: Sequence[Copies],
        *,
        deadline: float,
    ) -> NDArray[np.bool_]:
        """Copy with the engine that opened ``memory``."""
        engine = self._owners.get(memory)
        if engine is None:
            raise MemoryGone("this memory was detached")
        return await engine.copy(direction, memory, batches, deadline=deadline)

    def statistics(self) -> EngineStatistics:
        """The sum over the engines."""
        engines = [self.host] if self.cuda is None else [self.host, self.cuda]
        return add_up([engine.statistics() for engine in engines])

    def _engine_for(self, regions: Sequence[Region]) -> CopyEngine:
        kinds = {isinstance(region.source, CudaIpc) for region in regions}
        if len(kinds) != 1:
            raise BadRequest("a rank's regions must all be CUDA or all be host memory", "regions")
        if kinds == {False}:
            return self.host
        if self.cuda is None:
            raise BadRequest("this daemon runs without CUDA", "regions.source")
        return self.cuda


@asynccontextmanager
async def open_engines(
    pool: Pool,
    *,
    cuda: CudaDevices | None,
    queue_capacity: int = 64,
    save_bandwidth: float | None = None,
) -> AsyncIterator[Engines]:
    """The engines of a daemon.

    With ``cuda`` the pool's slabs must be registered (``cuda.register_slab``) before the policy
    gets them.  ``save_bandwidth`` caps all saves together, in bytes a second.
    """
    pace = Pace(save_bandwidth)
    async with AsyncExitStack() as stack:
        host = open_host_engine(pool.view, queue_capacity=queue_capacity, save_pace=pace)
        engines = Engines(await stack.enter_async_context(host))
        if cuda is not None:
            engines.cuda = await stack.enter_async_context(
                cuda.open(
                    pool.view, seams=pool.seams, queue_capacity=queue_capacity, save_pace=pace
                )
            )
        yield engines
