"""Copies between a GPU engine's memory, opened by CUDA IPC, and the pinned pool.

Importing this module needs no CUDA; :func:`find_devices` looks for it.  How bytes go is
:mod:`pegaflow.engine.cuda_copy`'s affair.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Final

import attrs
import numpy as np
import trio
from numpy.typing import NDArray

from pegaflow.engine.base import AttachedMemory, Copies, Direction, EngineStatistics
from pegaflow.engine.cuda_copy import PART_BYTES, Choice, Copier
from pegaflow.engine.cuda_driver import CudaDriver, Driver, translated
from pegaflow.engine.cuda_measure import measure
from pegaflow.engine.lanes import DIRECTIONS, Held, Lanes, Pace, add_up
from pegaflow.engine.segments import count_blocks
from pegaflow.errors import BadRequest, ConfigError, DeviceTrouble, MemoryGone
from pegaflow.model.layout import CudaIpc, Region

_HANDLE_BYTES: Final = 64
_HOST_REGISTER_PORTABLE: Final = 1
_IPC_LAZY_PEER_ACCESS: Final = 1


@attrs.define(eq=False)
class CudaMemory(Held):
    """A rank's regions as device pointers of ours."""

    device: Device
    mappings: dict[bytes, int]
    """IPC handle -> pointer to what it names; regions of one handle share it."""

    pointers: NDArray[np.int64]
    """Where each region begins, shape (regions,)."""


@attrs.define(eq=False, kw_only=True)
class Device:
    """One GPU: a thread and streams of its own for each direction; neither waits for the other."""

    index: int
    uuid: str
    cupy: ModuleType
    driver: Driver
    pool_address: int
    pool_bytes: int
    seams: NDArray[np.int64]
    part_bytes: int
    queue_capacity: int
    save_pace: Pace
    choice: Choice = attrs.field(init=False, factory=Choice)
    lanes: Lanes = attrs.field(init=False)
    copiers: dict[Direction, Copier] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Prepare the threads; ``lanes.run`` starts them."""
        self.lanes = Lanes(f"cuda{self.index}", self.queue_capacity, self._enter)
        self.copiers = {
            direction: Copier(
                cupy=self.cupy,
                driver=self.driver,
                direction=direction,
                pool_address=self.pool_address,
                pool_bytes=self.pool_bytes,
                seams=self.seams,
                part_bytes=self.part_bytes,
                pace=self.save_pace if direction == "save" else Pace(),
                choice=self.choice,
            )
            for direction in DIRECTIONS
        }

    def open_memory(self, regions: Sequence[Region]) -> CudaMemory:
        """On a device thread.  Everything is closed again when one region is refused."""
        mappings: dict[bytes, int] = {}
        try:
            pointers = [self._open_region(region, mappings) for region in regions]
        except BaseException:
            self.close_mappings(mappings)
            raise
        return CudaMemory(tuple(regions), self, mappings, np.array(pointers, np.int64))

    def close_mappings(self, mappings: dict[bytes, int]) -> None:
        """On a device thread."""
        with translated(self.cupy, "closing CUDA IPC memory"):
            for pointer in mappings.values():
                self.cupy.cuda.runtime.ipcCloseMemHandle(pointer)

    def move(
        self,
        direction: Direction,
        memory: CudaMemory,
        batches: Sequence[Copies],
        deadline: float,
    ) -> NDArray[np.bool_]:
        """On the direction's thread: which blocks failed; returns when the GPU is done."""
        blocks = count_blocks(batches)
        if time.monotonic() >= deadline:
            return np.ones(blocks, np.bool_)
        with translated(self.cupy, f"{direction} of {blocks} blocks"):
            return self.copiers[direction].move(memory, batches, deadline)

    async def measure(self) -> None:
        """Find out, while serving, from which range size on staging does not pay."""
        for direction in DIRECTIONS:
            copier = self.copiers[direction]
            try:
                await self.lanes.threads[direction].call(partial(measure, copier), urgent=True)
            except DeviceTrouble as exc:
                copier.staging_trouble = str(exc)

    async def close(self) -> None:
        """Give device memory of our own back."""
        for direction in DIRECTIONS:
            await self.lanes.threads[direction].call(self.copiers[direction].close, urgent=True)

    def _enter(self) -> None:
        """First on each thread: make the device's primary context current."""
        with translated(self.cupy, f"opening CUDA device {self.index}"):
            self.cupy.cuda.runtime.setDevice(self.index)
            self.cupy.cuda.runtime.free(0)  # before CUDA 12 only a call like this creates it

    def _open_region(self, region: Region, mappings: dict[bytes, int]) -> int:
        source = region.source
        assert isinstance(source, CudaIpc), source
        if len(source.handle) != _HANDLE_BYTES:
            raise BadRequest(
                f"a CUDA IPC handle has {_HANDLE_BYTES} bytes, not {len(source.handle)}",
                "source.handle",
            )
        if source.handle not in mappings:
            with translated(self.cupy, "opening CUDA IPC memory", MemoryGone):
                mappings[source.handle] = self.cupy.cuda.runtime.ipcOpenMemHandle(
                    source.handle, _IPC_LAZY_PEER_ACCESS
                )
        pointer = mappings[source.handle]
        base, size_bytes = self.driver.allocation(pointer)
        end, room = source.offset_bytes + region.size_bytes, base + size_bytes - pointer
        if source.offset_bytes < 0 or region.size_bytes <= 0 or end > room:
            raise BadRequest(
                f"a region ends at {end} of an allocation of {room} bytes", "regions.sizeBytes"
            )
        return pointer + source.offset_bytes


@attrs.define(eq=False)
class CudaCopyEngine:
    """The contract of :mod:`pegaflow.engine.base` for memory behind CUDA IPC handles.

    Open it with :meth:`CudaDevices.open`.
    """

    devices: dict[str, Device]
    """By UUID, normalised: whatever form ``CUDA_VISIBLE_DEVICES`` has, here and in the engine."""

    _attached: set[CudaMemory] = attrs.field(init=False, factory=set)

    async def attach(self, regions: Sequence[Region], fds: Sequence[int]) -> AttachedMemory:
        """Open the handles; see :class:`pegaflow.engine.base.CopyEngine`."""
        device = self._device_of(regions)
        memory = await device.lanes.threads["save"].call(
            lambda: device.open_memory(regions), urgent=True
        )
        self._attached.add(memory)
        return memory

    async def detach(self, memory: AttachedMemory) -> None:
        """Close the handles after the last copy that uses them."""
        assert isinstance(memory, CudaMemory), memory
        with trio.CancelScope(shield=True):  # a mapping that stays open keeps the engine's memory
            await memory.retire()
            self._attached.remove(memory)
            await memory.device.lanes.threads["save"].call(
                lambda: memory.device.close_mappings(memory.mappings), urgent=True
            )
        await trio.lowlevel.checkpoint()

    async def copy(
        self,
        direction: Direction,
        memory: AttachedMemory,
        batches: Sequence[Copies],
        *,
        deadline: float,
    ) -> NDArray[np.bool_]:
        """Copy on the direction's stream; see :class:`pegaflow.engine.base.CopyEngine`."""
        assert isinstance(memory, CudaMemory), memory
        device = memory.device
        return await device.lanes.copy(
            direction, memory, batches, lambda: device.move(direction, memory, batches, deadline)
        )

    def statistics(self) -> EngineStatistics:
        """The sum over the devices; callable from any thread."""
        return add_up([self._of_device(device) for device in self.devices.values()])

    def _of_device(self, device: Device) -> EngineStatistics:
        methods = {
            (direction, str(method)): size
            for direction, copier in device.copiers.items()
            for method, size in copier.method_bytes.items()
        }
        return attrs.evolve(
            device.lanes.statistics(),
            method_bytes=methods,
            staged_below_bytes=dict(device.choice.staged_below_bytes),
        )

    async def close(self) -> None:
        """Close what is still attached."""
        for memory in list(self._attached):
            await self.detach(memory)
        for device in self.devices.values():
            await device.close()

    def _device_of(self, regions: Sequence[Region]) -> Device:
        names: set[str] = set()
        for region in regions:
            if not isinstance(region.source, CudaIpc):
                raise BadRequest("this engine takes CUDA IPC handles", "source")
            names.add(normalise_uuid(region.source.device_uuid))
        if len(names) != 1:
            raise BadRequest(f"a rank's memory lies on {len(names)} devices, not on one", "regions")
        name = names.pop()
        if name not in self.devices:
            served = ", ".join(device.uuid for device in self.devices.values())
            raise BadRequest(
                f"device {name} is not served by this daemon, which serves {served}",
                "source.deviceUuid",
            )
        return self.devices[name]


@attrs.define(eq=False)
class CudaDevices:
    """The devices that a daemon serves, before there is a pool to copy to."""

    cupy: ModuleType
    driver: Driver
    uuids: dict[int, str]
    """By this process's device number."""

    def numa_nodes(self, root: Path = Path("/")) -> tuple[int, ...]:
        """The nodes that the GPUs hang on, where the kernel knows them."""
        nodes = set()
        for index in self.uuids:
            bus = str(self.cupy.cuda.runtime.deviceGetPCIBusId(index)).lower()
            with suppress(OSError, ValueError):
                text = (root / "sys/bus/pci/devices" / bus / "numa_node").read_text()
                nodes.add(int(text))
        return tuple(sorted(node for node in nodes if node >= 0))

    def register_slab(self, address: int, size_bytes: int) -> None:
        """Pin host memory for all devices (``Pool.open(register=...)``).

        Blocks, without the GIL; callable from any thread.
        """
        runtime = self.cupy.cuda.runtime
        with translated(self.cupy, "registering host memory with CUDA"):
            runtime.setDevice(next(iter(self.uuids)))
            runtime.hostRegister(address, size_bytes, _HOST_REGISTER_PORTABLE)

    def unregister_slab(self, address: int, size_bytes: int) -> None:
        """Undo :meth:`register_slab`, when no copy uses the memory any more."""
        runtime = self.cupy.cuda.runtime
        with translated(self.cupy, "unregistering host memory from CUDA"):
            runtime.setDevice(next(iter(self.uuids)))
            runtime.hostUnregister(address)

    @asynccontextmanager
    async def open(
        self,
        pool: memoryview,
        *,
        seams: Sequence[int] = (),
        queue_capacity: int = 64,
        part_bytes: int = PART_BYTES,
        save_pace: Pace | None = None,
        measured: bool = True,
    ) -> AsyncIterator[CudaCopyEngine]:
        """An engine over these devices, with two threads a device.

        ``pool`` should be registered by the time its offsets are used; otherwise copies are
        right but slow.  ``seams`` are the offsets at which another registration begins: one copy
        of the driver may not cross them.  ``measured``: choose the method by what this GPU does.
        """
        address = np.frombuffer(pool, np.uint8).ctypes.data
        devices = {
            normalise_uuid(uuid): Device(
                index=index,
                uuid=uuid,
                cupy=self.cupy,
                driver=self.driver,
                pool_address=address,
                pool_bytes=pool.nbytes,
                seams=np.array(seams, np.int64),
                part_bytes=part_bytes,
                queue_capacity=queue_capacity,
                save_pace=save_pace or Pace(),
            )
            for index, uuid in self.uuids.items()
        }
        engine = CudaCopyEngine(devices)
        async with trio.open_nursery() as nursery:
            for device in devices.values():
                await nursery.start(device.lanes.run)
                if measured:
                    nursery.start_soon(device.measure)
            try:
                yield engine
            finally:
                with trio.CancelScope(shield=True):
                    await engine.close()
            nursery.cancel_scope.cancel()


def find_devices(indices: Sequence[int] | None) -> CudaDevices:
    """The CUDA devices with these numbers; None stands for all that there are.

    Raises :exc:`ConfigError` when one of them, or for None any, is not there or can't be used.
    """
    driver = CudaDriver.load()  # before CuPy: hosts without a GPU find out in a millisecond
    cupy = _import_cupy()
    uuids = dict(enumerate(_uuids(cupy)))
    if indices is not None:
        missing = sorted(set(indices) - set(uuids))
        if missing:
            raise ConfigError(f"CUDA device {missing[0]} is not there: {len(uuids)} are visible")
        uuids = {index: uuids[index] for index in indices}
    return CudaDevices(cupy, driver, uuids)


def format_uuid(raw: bytes) -> str:
    """16 bytes as nvidia-smi prints them."""
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def normalise_uuid(text: str) -> str:
    """``GPU-1A2B...``, ``1a2b-...`` and 32 digits name one device."""
    return text.strip().lower().removeprefix("gpu-").removeprefix("mig-").replace("-", "")


def _uuids(cupy: ModuleType) -> list[str]:
    """UUIDs in the order of this process's device numbers; ``CUDA_VISIBLE_DEVICES`` is applied."""
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise ConfigError(f"no CUDA device is visible: {error}") from error
    if not count:
        raise ConfigError("no CUDA device is visible")
    properties = (runtime.getDeviceProperties(index) for index in range(count))
    return [format_uuid(bytes(each["uuid"])[:16]) for each in properties]


def _import_cupy() -> ModuleType:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise ConfigError(
            f"CUDA needs CuPy: install pegaflow[cuda12] or pegaflow[cuda13] ({error})"
        ) from error
