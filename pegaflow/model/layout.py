"""Where the bytes of a block lie in an engine's memory: one affine rule a run."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from pegaflow.errors import BadRequest

RUNS_MAX = 4096


@attrs.frozen
class Run:
    """Block ``b`` has ``length_bytes`` at ``base_bytes + b * stride_bytes`` of ``region``."""

    region: int
    base_bytes: int
    stride_bytes: int
    length_bytes: int


@attrs.frozen
class HandedOver:
    """A file descriptor passed over the hand-over socket: host memory of a CPU engine."""

    token: bytes
    index: int
    offset_bytes: int


@attrs.frozen
class CudaIpc:
    """CUDA memory exported by ``cudaIpcGetMemHandle``; the device is named by UUID."""

    handle: bytes
    device_uuid: str
    offset_bytes: int


@attrs.frozen
class Region:
    """One allocation of engine memory."""

    size_bytes: int
    source: HandedOver | CudaIpc


@attrs.frozen
class GroupLayout:
    """The runs of one KV-cache group of one rank, in the order in which they are stored.

    A slot is the concatenation of its runs: page-first host memory.
    """

    group: int
    block_count: int
    runs: tuple[Run, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block of one rank."""
        return sum(run.length_bytes for run in self.runs)

    def merged(self) -> GroupLayout:
        """The same bytes in the same order with neighbouring runs joined."""
        out: list[Run] = []
        for run in self.runs:
            last = out[-1] if out else None
            if (
                last is not None
                and last.region == run.region
                and last.stride_bytes == run.stride_bytes
                and last.base_bytes + last.length_bytes == run.base_bytes
            ):
                out[-1] = attrs.evolve(last, length_bytes=last.length_bytes + run.length_bytes)
            else:
                out.append(run)
        return attrs.evolve(self, runs=tuple(out))

    def check(self, regions: Sequence[Region]) -> None:
        """Raise :exc:`BadRequest` unless every byte of every block lies inside its region,
        and no block overlaps its neighbour within a run."""
        if not 0 < self.block_count < 1 << 31:
            raise BadRequest(f"block count {self.block_count} is not in 1..2^31-1", "blockCount")
        if not 0 < len(self.runs) <= RUNS_MAX:
            raise BadRequest(f"{len(self.runs)} runs; 1..{RUNS_MAX} are possible", "runs")
        for i, run in enumerate(self.runs):
            if not 0 <= run.region < len(regions):
                raise BadRequest(
                    f"run {i} names region {run.region} of {len(regions)}", "runs.region"
                )
            if run.length_bytes <= 0 or run.base_bytes < 0:
                raise BadRequest(f"run {i} has length {run.length_bytes}", "runs.lengthBytes")
            if self.block_count > 1 and run.stride_bytes < run.length_bytes:
                raise BadRequest(
                    f"run {i}: stride {run.stride_bytes} is below its length {run.length_bytes}, "
                    "so blocks would overlap",
                    "runs.strideBytes",
                )
            end = run.base_bytes + (self.block_count - 1) * run.stride_bytes + run.length_bytes
            if end > regions[run.region].size_bytes:
                raise BadRequest(
                    f"run {i} ends at {end}, behind the {regions[run.region].size_bytes} bytes "
                    f"of region {run.region}",
                    "runs.baseBytes",
                )

    def offsets(self, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Offsets in their regions, shape (runs, blocks)."""
        base = np.array([run.base_bytes for run in self.runs], np.int64)
        stride = np.array([run.stride_bytes for run in self.runs], np.int64)
        return base[:, None] + stride[:, None] * block_ids[None, :]
