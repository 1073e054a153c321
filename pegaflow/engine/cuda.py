"""Copies between a GPU engine's memory, opened by CUDA IPC, and the pinned pool.

Importing this module needs no CUDA; :func:`find_devices` looks for it.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType
from typing import ClassVar, Final, Protocol

import attrs
import numpy as np
import trio
from numpy.typing import NDArray

from pegaflow.engine.base import AttachedMemory, Copies, Direction, EngineStatistics
from pegaflow.engine.lanes import Held, Lanes, add_up
from pegaflow.engine.segments import Segments, count_blocks, lay_out, merge
from pegaflow.errors import BadRequest, ConfigError, DeviceLost, MemoryGone
from pegaflow.model.layout import CudaIpc, Region

Addresses = NDArray[np.uint64]

PART_BYTES: Final = 32 << 20
_PARTS_IN_FLIGHT: Final = 2
_HANDLE_BYTES: Final = 64

# Errors after which the context still works, so that only the memory that was named is suspect:
# invalid value, out of memory, mapping failed, invalid handle, not found.
_ABOUT_MEMORY: Final = frozenset({1, 2, 205, 400, 500})
_CONTEXT_BROKEN: Final = 700  # illegal address, and everything behind it

_HOST_REGISTER_PORTABLE: Final = 1
_IPC_LAZY_PEER_ACCESS: Final = 1
_IN_STREAM_ORDER: Final = 1
_KIND: Final[dict[Direction, int]] = {"save": 2, "load": 1}  # cudaMemcpyKind: D2H, H2D
_PRIORITY: Final[dict[Direction, int]] = {"save": 0, "load": -5}  # lower goes first; CUDA clamps


class _Location(ctypes.Structure):
    _fields_: ClassVar = (  # type: ignore[mutable-override]  # a tuple, so that nobody appends
        ("type", ctypes.c_int),
        ("id", ctypes.c_int),
    )


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes.  Locations are hints for managed memory only."""

    _fields_: ClassVar = (  # type: ignore[mutable-override]  # a tuple, so that nobody appends
        ("source_access_order", ctypes.c_int),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    )


class Driver(Protocol):
    """What CuPy does not have, called on a thread whose device is selected."""

    @property
    def batched(self) -> bool:
        """Whether :meth:`copy_batch` works: CUDA 12.8 or later."""

    def allocation(self, pointer: int) -> tuple[int, int]:
        """Start and bytes of the allocation around ``pointer``."""

    def copy_batch(
        self, targets: Addresses, origins: Addresses, lengths: Addresses, stream: int
    ) -> None:
        """Queue all copies on ``stream``, which is not the default stream.

        The arrays may be dropped when this returns, the memories when the stream is there.
        """


@attrs.define(eq=False)
class CudaDriver:
    """The driver's library by ctypes; calls run without the GIL."""

    batched: bool
    _library: ctypes.CDLL
    _second_form: bool

    @classmethod
    def load(cls) -> CudaDriver:
        """Raises :exc:`ConfigError` when there is no driver."""
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(f"CUDA's driver is missing: {error}") from error
        second = hasattr(library, "cuMemcpyBatchAsync_v2")
        return cls(second or hasattr(library, "cuMemcpyBatchAsync"), library, second)

    def allocation(self, pointer: int) -> tuple[int, int]:
        """See :class:`Driver`."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = self._library.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer)
        )
        if code:
            raise _trouble(code, f"cuMemGetAddressRange failed with CUDA error {code}")
        return base.value, size.value

    def copy_batch(
        self, targets: Addresses, origins: Addresses, lengths: Addresses, stream: int
    ) -> None:
        """See :class:`Driver`."""
        attributes = _Attributes(source_access_order=_IN_STREAM_ORDER)
        which = (ctypes.c_size_t * 1)(0)  # the one attribute applies from the first copy on
        failed_at = ctypes.c_size_t(0)
        common = (
            ctypes.c_void_p(targets.ctypes.data),
            ctypes.c_void_p(origins.ctypes.data),
            ctypes.c_void_p(lengths.ctypes.data),
            ctypes.c_size_t(lengths.size),
            ctypes.byref(attributes),
            which,
            ctypes.c_size_t(1),
        )
        if self._second_form:  # CUDA 13 took the index of the failure away
            code = self._library.cuMemcpyBatchAsync_v2(*common, ctypes.c_void_p(stream))
        else:
            code = self._library.cuMemcpyBatchAsync(
                *common, ctypes.byref(failed_at), ctypes.c_void_p(stream)
            )
        if code:
            raise _trouble(code, f"cuMemcpyBatchAsync failed with CUDA error {code}")


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
    """One GPU: a thread and a stream a direction; neither waits for the other's."""

    index: int
    uuid: str
    cupy: ModuleType
    driver: Driver
    pool_address: int
    pool_bytes: int
    seams: NDArray[np.int64]
    part_bytes: int
    queue_capacity: int
    lanes: Lanes = attrs.field(init=False)
    _streams: dict[Direction, int] = attrs.field(init=False, factory=dict)
    _keep: list[object] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        """Prepare the threads; ``lanes.run`` starts them."""
        self.lanes = Lanes(f"cuda{self.index}", self.queue_capacity, self._enter)

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
        with _translated(self.cupy, "closing CUDA IPC memory"):
            for pointer in mappings.values():
                self.cupy.cuda.runtime.ipcCloseMemHandle(pointer)

    def move(
        self,
        direction: Direction,
        memory: CudaMemory,
        batches: Sequence[Copies],
        deadline: float,
    ) -> NDArray[np.bool_]:
        """On the direction's thread: queue part by part, return when the stream is there."""
        failed = np.ones(count_blocks(batches), np.bool_)
        if time.monotonic() >= deadline:
            return failed
        segments = lay_out(memory.layouts, batches, self.part_bytes, self.pool_bytes)
        with _translated(self.cupy, f"{direction} of {failed.size} blocks"):
            parts = self._queue_parts(direction, memory, segments, deadline)
        failed[:] = False
        failed[segments.block[segments.part >= parts]] = True
        return failed

    def _enter(self) -> None:
        """First on each thread: make the device's primary context current."""
        with _translated(self.cupy, f"opening CUDA device {self.index}"):
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
            with _translated(self.cupy, "opening CUDA IPC memory", MemoryGone):
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

    def _queue_parts(
        self, direction: Direction, memory: CudaMemory, segments: Segments, deadline: float
    ) -> int:
        """Parts that were copied.  Waits for the stream in any case, also before raising."""
        ranges = merge(segments, self.seams)
        device = (ranges.memory + memory.pointers[ranges.region]).astype(np.uint64)
        host = (ranges.pool + self.pool_address).astype(np.uint64)
        length = ranges.length.astype(np.uint64)
        target, origin = (host, device) if direction == "save" else (device, host)
        parts = int(ranges.part[-1]) + 1
        edges = np.searchsorted(ranges.part, np.arange(parts + 1)).tolist()
        stream, runtime = self._stream(direction), self.cupy.cuda.runtime
        events: list[int] = []
        try:
            for part in range(parts):
                if part >= _PARTS_IN_FLIGHT:
                    runtime.eventSynchronize(events[part - _PARTS_IN_FLIGHT])
                if time.monotonic() >= deadline:
                    return part
                piece = slice(edges[part], edges[part + 1])
                self._queue(direction, target[piece], origin[piece], length[piece], stream)
                events.append(self._record(stream))
            return parts
        finally:
            self._drain(stream, events)

    def _queue(
        self,
        direction: Direction,
        targets: Addresses,
        origins: Addresses,
        lengths: Addresses,
        stream: int,
    ) -> None:
        if self.driver.batched:
            self.driver.copy_batch(targets, origins, lengths, stream)
            return
        copy, kind = self.cupy.cuda.runtime.memcpyAsync, _KIND[direction]
        triples = zip(targets.tolist(), origins.tolist(), lengths.tolist(), strict=True)
        for target, origin, length in triples:
            copy(target, origin, length, kind, stream)

    def _stream(self, direction: Direction) -> int:
        """Made on first use, on the direction's thread."""
        if direction not in self._streams:
            stream = self.cupy.cuda.Stream(non_blocking=True, priority=_PRIORITY[direction])
            self._keep.append(stream)
            self._streams[direction] = stream.ptr
        return self._streams[direction]

    def _record(self, stream: int) -> int:
        """An event behind everything queued so far; who waits for it sleeps and does not spin."""
        runtime = self.cupy.cuda.runtime
        flags = runtime.eventBlockingSync | runtime.eventDisableTiming
        event: int = runtime.eventCreateWithFlags(flags)
        runtime.eventRecord(event, stream)
        return event

    def _drain(self, stream: int, events: list[int]) -> None:
        """Wait until the stream has let go of both memories, then drop the events."""
        runtime = self.cupy.cuda.runtime
        events.append(self._record(stream))
        try:
            runtime.eventSynchronize(events[-1])
        finally:
            for event in events:
                runtime.eventDestroy(event)


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
        return add_up([device.lanes.statistics() for device in self.devices.values()])

    async def close(self) -> None:
        """Close what is still attached."""
        for memory in list(self._attached):
            await self.detach(memory)

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

    def register_slab(self, address: int, size_bytes: int) -> None:
        """Pin host memory for all devices (``Pool.open(register=...)``).

        Blocks, without the GIL; callable from any thread.
        """
        runtime = self.cupy.cuda.runtime
        with _translated(self.cupy, "registering host memory with CUDA"):
            runtime.setDevice(next(iter(self.uuids)))
            runtime.hostRegister(address, size_bytes, _HOST_REGISTER_PORTABLE)

    def unregister_slab(self, address: int, size_bytes: int) -> None:
        """Undo :meth:`register_slab`, when no copy uses the memory any more."""
        runtime = self.cupy.cuda.runtime
        with _translated(self.cupy, "unregistering host memory from CUDA"):
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
    ) -> AsyncIterator[CudaCopyEngine]:
        """An engine over these devices, with two threads a device.

        ``pool`` should be registered by the time its offsets are used; otherwise copies are
        right but slow.  ``seams`` are the offsets at which another registration begins: one copy
        of the driver may not cross them.
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
            )
            for index, uuid in self.uuids.items()
        }
        engine = CudaCopyEngine(devices)
        async with trio.open_nursery() as nursery:
            for device in devices.values():
                await nursery.start(device.lanes.run)
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


def _trouble(code: int, text: str) -> MemoryGone | DeviceLost:
    return MemoryGone(text) if code in _ABOUT_MEMORY else DeviceLost(text)


@contextmanager
def _translated(
    cupy: ModuleType,
    doing: str,
    unless_broken: Callable[[str], MemoryGone | DeviceLost] | None = None,
) -> Iterator[None]:
    """CuPy's errors as ours; ``unless_broken`` where a working context means the memory is bad."""
    try:
        yield
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if unless_broken is not None and error.status < _CONTEXT_BROKEN:
            raise unless_broken(f"{doing}: {error}") from error
        raise _trouble(error.status, f"{doing}: {error}") from error
