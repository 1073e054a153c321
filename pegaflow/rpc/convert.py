"""Wire <-> model, total and symmetrical: what is malformed is a BadRequest when it leaves here.

Readers are pycapnp structs, alive only during the call that delivered them; everything returned is
plain Python or NumPy data that owns its bytes.  ``read_x(write_x(v)) == v`` for every value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pegaflow import errors
from pegaflow.errors import BadRequest, PegaflowError
from pegaflow.model import messages as m
from pegaflow.model.keys import (
    NAMESPACE_BYTES_MAX,
    BlockHash,
    InstanceId,
    LeaseToken,
    Manifest,
    Namespace,
    pack_hashes,
    unpack_hashes,
)
from pegaflow.model.layout import CudaIpc, GroupLayout, HandedOver, Region, Run

NAME_BYTES_MAX = 256
WORLD_SIZE_MAX = 4096
MANIFEST_FIELDS_MAX = 64
REGIONS_MAX = 4096
TOKEN_BYTES = 16
CUDA_HANDLE_BYTES = 64
MESSAGE_CHARS_MAX = 500


class Struct(Protocol):
    """A pycapnp reader or builder: fields are attributes; ``which`` and ``init`` as in its docs."""

    def __getattr__(self, name: str) -> Field: ...
    def __setattr__(self, name: str, value: object) -> None: ...


class Field(Struct, Protocol):
    """Whatever a field holds; converted by the functions below before it goes anywhere."""

    def __int__(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> FieldIterator: ...
    def __getitem__(self, index: int) -> Field: ...
    def __call__(self, *args: object) -> Field: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...


class FieldIterator(Protocol):
    """Iterates a list field."""

    def __next__(self) -> Field: ...
    def __iter__(self) -> FieldIterator: ...


# -- small parts ----------------------------------------------------------------------------------
def _text(value: object, field: str, max_bytes: int = NAME_BYTES_MAX) -> str:
    text = str(value)
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise BadRequest(f"{field} has {size} bytes; at most {max_bytes} are allowed", field)
    return text


def _name(value: object, field: str) -> str:
    text = _text(value, field)
    if not text or not text.isprintable():
        raise BadRequest(f"{field} must be printable text that is not empty", field)
    return text


def _parent(value: object) -> bytes:
    parent: bytes = bytes(value)  # type: ignore[call-overload]  # Data
    if len(parent) > 64:
        raise BadRequest(f"parent hash has {len(parent)} bytes; at most 64 are allowed", "parent")
    return parent


def _token(value: object, field: str) -> bytes:
    token: bytes = bytes(value)  # type: ignore[call-overload]  # Data
    if len(token) != TOKEN_BYTES:
        raise BadRequest(f"{field} has {len(token)} bytes; it must have {TOKEN_BYTES}", field)
    return token


def u32_list(data: object, field: str) -> NDArray[np.uint32]:
    """Little-endian u32 array out of one Data field; a copy."""
    raw = bytes(data)  # type: ignore[call-overload]  # Data
    if len(raw) % 4:
        raise BadRequest(
            f"{field} has {len(raw)} bytes; 32-bit numbers need a multiple of 4", field
        )
    return np.frombuffer(raw, "<u4").astype(np.uint32)


def pack_u32(values: NDArray[np.uint32] | Sequence[int]) -> bytes:
    """The inverse of :func:`u32_list`."""
    return np.asarray(values, "<u4").tobytes()


def read_hashes(reader: Struct) -> list[BlockHash]:
    """A ``Hashes`` struct as a list of bytes."""
    return unpack_hashes(bytes(reader.packed), int(reader.width))


def write_hashes(builder: Struct, hashes: Sequence[bytes]) -> None:
    """Fill a ``Hashes`` struct."""
    builder.packed, builder.width = pack_hashes(hashes)


def read_manifest(reader: Struct) -> Manifest:
    """A manifest with unique field names; completeness is checked by whoever uses it."""
    if len(reader.fields) > MANIFEST_FIELDS_MAX:
        raise BadRequest(f"a manifest has at most {MANIFEST_FIELDS_MAX} fields", "manifest")
    fields: dict[str, str] = {}
    for item in reader.fields:
        name = _name(item.name, "manifest")
        if name in fields:
            raise BadRequest(f"manifest field {name!r} is there twice", "manifest")
        fields[name] = _text(item.value, name, 4096)
    return Manifest(fields)


# -- errors ---------------------------------------------------------------------------------------
_KINDS: dict[type[PegaflowError], str] = {
    errors.BadRequest: "badRequest",
    errors.UnknownInstance: "unknownInstance",
    errors.NotReady: "notReady",
    errors.LeaseExpired: "leaseExpired",
    errors.ManifestMismatch: "manifestMismatch",
    errors.VersionMismatch: "versionMismatch",
    errors.Overloaded: "overloaded",
    errors.OutOfSpace: "outOfSpace",
    errors.DeadlineExceeded: "deadlineExceeded",
    errors.MemoryGone: "memoryGone",
    errors.ShuttingDown: "shuttingDown",
}
_CLASSES = {kind: cls for cls, kind in _KINDS.items()}


def error_kind(exc: Exception) -> str:
    """The wire's name for an exception; "internal" for whatever is not in our tree."""
    return _KINDS.get(type(exc), "internal")  # type: ignore[arg-type]  # other types are absent


def write_error(builder: Struct, exc: Exception) -> None:
    """Fill an ``Error``; the text of anything but our own errors stays here."""
    kind = error_kind(exc)
    builder.kind = kind
    text = "internal error; the daemon's log has it" if kind == "internal" else str(exc)
    builder.message = _clean(text, MESSAGE_CHARS_MAX)
    builder.field = _clean(str(getattr(exc, "field", "")), NAME_BYTES_MAX)


def _clean(text: str, max_chars: int) -> str:
    """What always encodes and fits: a lone surrogate would leave the call unanswered."""
    clean = text[:max_chars].encode("utf-8", "backslashreplace").decode().replace("\0", "?")
    return clean[:max_chars]


def read_error(reader: Struct) -> PegaflowError:
    """The exception that an ``Error`` stands for, to be raised by the caller."""
    kind, message, field = str(reader.kind), str(reader.message), str(reader.field)
    if kind == "badRequest":
        return errors.BadRequest(message, field)
    if kind == "manifestMismatch":
        return errors.ManifestMismatch(message, field)
    return _CLASSES.get(kind, errors.PegaflowError)(message)


# -- open -----------------------------------------------------------------------------------------
def read_open_request(reader: Struct) -> m.OpenRequest:
    """``OpenRequest``."""
    world_size = int(reader.worldSize)
    if not 1 <= world_size <= WORLD_SIZE_MAX:
        raise BadRequest(f"world size {world_size} is not in 1..{WORLD_SIZE_MAX}", "worldSize")
    namespace = _name(reader.namespace, "namespace")
    if len(namespace.encode()) > NAMESPACE_BYTES_MAX:
        raise BadRequest(f"a namespace has at most {NAMESPACE_BYTES_MAX} bytes", "namespace")
    return m.OpenRequest(
        protocol_min=int(reader.protocolMin),
        protocol_max=int(reader.protocolMax),
        client=_text(reader.client, "client"),
        instance=InstanceId(_name(reader.instance, "instance")),
        namespace=Namespace(namespace),
        manifest=read_manifest(reader.manifest),
        world_size=world_size,
        monotonic_ns=int(reader.monotonicNanos),
    )


def write_open_request(builder: Struct, request: m.OpenRequest) -> None:
    """``OpenRequest``."""
    builder.protocolMin, builder.protocolMax = request.protocol_min, request.protocol_max
    builder.client, builder.instance = request.client, request.instance
    builder.namespace, builder.worldSize = request.namespace, request.world_size
    builder.monotonicNanos = request.monotonic_ns
    fields = builder.manifest.init("fields", len(request.manifest.fields))
    for item, (name, value) in zip(fields, request.manifest.fields.items(), strict=True):
        item.name, item.value = name, value


def write_opened(builder: Struct, opened: m.Opened, session: object) -> None:
    """``Opened``, with the capability."""
    builder.session = session
    builder.protocol, builder.bootId = opened.protocol, opened.boot_id
    builder.handover, builder.version = opened.handover, opened.version


def read_opened(reader: Struct) -> m.Opened:
    """``Opened`` without the capability."""
    return m.Opened(
        int(reader.protocol), bytes(reader.bootId), str(reader.handover), str(reader.version)
    )


def write_health(builder: Struct, health: m.Health) -> None:
    """``Health``."""
    builder.ready, builder.bootId, builder.version = health.ready, health.boot_id, health.version
    builder.poolReadyBytes = health.pool_ready_bytes
    builder.poolTotalBytes = health.pool_total_bytes


def read_health(reader: Struct) -> m.Health:
    """``Health``."""
    return m.Health(
        bool(reader.ready),
        bytes(reader.bootId),
        str(reader.version),
        int(reader.poolReadyBytes),
        int(reader.poolTotalBytes),
    )


# -- register -------------------------------------------------------------------------------------
def _read_region(reader: Struct) -> Region:
    size = int(reader.sizeBytes)
    if not 0 < size < 1 << 63:
        raise BadRequest(f"a region of {size} bytes is not possible", "regions.sizeBytes")
    source: HandedOver | CudaIpc
    if str(reader.which()) == "handedOver":
        part = reader.handedOver
        source = HandedOver(
            _token(part.token, "regions.token"), int(part.index), int(part.offsetBytes)
        )
    else:
        part = reader.cudaIpc
        handle = bytes(part.handle)
        if len(handle) != CUDA_HANDLE_BYTES:
            raise BadRequest(
                f"a CUDA IPC handle has {CUDA_HANDLE_BYTES} bytes, not {len(handle)}",
                "regions.handle",
            )
        source = CudaIpc(
            handle, _name(part.deviceUuid, "regions.deviceUuid"), int(part.offsetBytes)
        )
    return Region(size, source)


def _write_region(builder: Struct, region: Region) -> None:
    builder.sizeBytes = region.size_bytes
    source = region.source
    if isinstance(source, HandedOver):
        part = builder.init("handedOver")
        part.token, part.index, part.offsetBytes = source.token, source.index, source.offset_bytes
    else:
        part = builder.init("cudaIpc")
        part.handle, part.deviceUuid = source.handle, source.device_uuid
        part.offsetBytes = source.offset_bytes


def read_register_request(reader: Struct) -> m.RegisterRequest:
    """``RegisterRequest``, with every layout checked against its regions."""
    if not 0 < len(reader.regions) <= REGIONS_MAX:
        raise BadRequest(f"{len(reader.regions)} regions; 1..{REGIONS_MAX} are possible", "regions")
    regions = tuple(_read_region(region) for region in reader.regions)
    groups = tuple(
        GroupLayout(
            int(group.group),
            int(group.blockCount),
            tuple(
                Run(int(r.region), int(r.baseBytes), int(r.strideBytes), int(r.lengthBytes))
                for r in group.runs
            ),
        )
        for group in reader.groups
    )
    if not groups or len({group.group for group in groups}) != len(groups):
        raise BadRequest("groups must be there, each number once", "groups")
    for group in groups:
        group.check(regions)
    slot_index, slot_count = int(reader.slotIndex), int(reader.slotCount)
    if not 0 <= slot_index < slot_count <= WORLD_SIZE_MAX:
        raise BadRequest(f"slot {slot_index} of {slot_count} is not possible", "slotIndex")
    return m.RegisterRequest(int(reader.rank), slot_index, slot_count, regions, groups)


def write_register_request(builder: Struct, request: m.RegisterRequest) -> None:
    """``RegisterRequest``."""
    builder.rank, builder.slotIndex = request.rank, request.slot_index
    builder.slotCount = request.slot_count
    regions = builder.init("regions", len(request.regions))
    for item, region in zip(regions, request.regions, strict=True):
        _write_region(item, region)
    groups = builder.init("groups", len(request.groups))
    for item, group in zip(groups, request.groups, strict=True):
        item.group, item.blockCount = group.group, group.block_count
        runs = item.init("runs", len(group.runs))
        for slot, run in zip(runs, group.runs, strict=True):
            slot.region, slot.baseBytes = run.region, run.base_bytes
            slot.strideBytes, slot.lengthBytes = run.stride_bytes, run.length_bytes


# -- query ----------------------------------------------------------------------------------------
def read_query_request(reader: Struct) -> m.QueryRequest:
    """``QueryRequest``."""
    return m.QueryRequest(
        int(reader.group),
        read_hashes(reader.hashes),
        _parent(reader.parent),
        _text(reader.requestId, "requestId", 1024),
    )


def write_query_request(builder: Struct, request: m.QueryRequest) -> None:
    """``QueryRequest``."""
    builder.group, builder.parent = request.group, request.parent
    builder.requestId = request.request_id
    write_hashes(builder.hashes, request.hashes)


def write_query_reply(builder: Struct, reply: m.QueryReply) -> None:
    """``QueryResult`` without its error."""
    if isinstance(reply, m.Loading):
        builder.loading = None
        return
    ready = builder.init("ready")
    ready.hitCount, ready.lease, ready.ttlMillis = reply.hit_count, reply.lease, reply.ttl_ms


def read_query_reply(reader: Struct) -> m.QueryReply:
    """``QueryResult``; raises what its error stands for."""
    which = str(reader.which())
    if which == "error":
        raise read_error(reader.error)
    if which == "loading":
        return m.Loading()
    ready = reader.ready
    return m.Ready(int(ready.hitCount), LeaseToken(bytes(ready.lease)), int(ready.ttlMillis))


# -- load -----------------------------------------------------------------------------------------
def read_load_request(reader: Struct) -> m.LoadRequest:
    """``LoadRequest``."""
    positions = u32_list(reader.positions, "positions")
    block_ids = u32_list(reader.blockIds, "blockIds")
    if len(positions) != len(block_ids):
        raise BadRequest(
            f"{len(positions)} positions for {len(block_ids)} block ids: one each is needed",
            "positions",
        )
    return m.LoadRequest(
        int(reader.rank),
        LeaseToken(_token(reader.lease, "lease")),
        int(reader.group),
        positions,
        block_ids,
        int(reader.deadlineNanos),
    )


def write_load_request(builder: Struct, request: m.LoadRequest) -> None:
    """``LoadRequest``."""
    builder.rank, builder.lease, builder.group = request.rank, request.lease, request.group
    builder.positions = pack_u32(request.positions)
    builder.blockIds = pack_u32(request.block_ids)
    builder.deadlineNanos = request.deadline_ns


def write_loaded(builder: Struct, loaded: m.Loaded) -> None:
    """``Loaded``."""
    builder.failed = pack_u32(loaded.failed)


def read_loaded(reader: Struct) -> m.Loaded:
    """``Loaded``."""
    return m.Loaded(u32_list(reader.failed, "failed"))


# -- save -----------------------------------------------------------------------------------------
def _read_save_run(reader: Struct) -> m.SaveRun:
    hashes = read_hashes(reader.hashes)
    block_ids = u32_list(reader.blockIds, "blockIds")
    if len(hashes) != len(block_ids):
        raise BadRequest(
            f"{len(hashes)} hashes for {len(block_ids)} block ids: one each is needed", "blockIds"
        )
    return m.SaveRun(int(reader.group), hashes, _parent(reader.parent), block_ids)


def read_save_request(reader: Struct) -> m.SaveRequest:
    """``SaveRequest``."""
    return m.SaveRequest(
        int(reader.rank),
        tuple(_read_save_run(run) for run in reader.runs),
        int(reader.deadlineNanos),
    )


def write_save_request(builder: Struct, request: m.SaveRequest) -> None:
    """``SaveRequest``."""
    builder.rank, builder.deadlineNanos = request.rank, request.deadline_ns
    runs = builder.init("runs", len(request.runs))
    for item, run in zip(runs, request.runs, strict=True):
        item.group, item.parent = run.group, run.parent
        item.blockIds = pack_u32(run.block_ids)
        write_hashes(item.hashes, run.hashes)


def write_saved(builder: Struct, saved: m.Saved) -> None:
    """``Saved``."""
    builder.stored, builder.known = saved.stored, saved.known
    builder.rejected, builder.failed = saved.rejected, saved.failed


def read_saved(reader: Struct) -> m.Saved:
    """``Saved``."""
    return m.Saved(int(reader.stored), int(reader.known), int(reader.rejected), int(reader.failed))


def read_leases(values: Field) -> list[LeaseToken]:
    """A list of leases to release; malformed ones can't be ours and are skipped."""
    tokens = (bytes(value) for value in values)
    return [LeaseToken(token) for token in tokens if len(token) == TOKEN_BYTES]


def read_result(reader: Struct) -> Struct:
    """The ``ok`` part of a result union; raises what its error stands for."""
    if str(reader.which()) == "error":
        raise read_error(reader.error)
    return reader.ok
