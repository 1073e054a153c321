"""All that differs between vLLM 0.26 and 0.33, and all that reaches into vLLM's insides.

| since | what |
|---|---|
| 0.29 | block-outer layouts by name (``get_required_kvcache_layout``); before: cross-layer tensor |
| 0.29 | fixed seed of the first block's parent for sha256; before: random without PYTHONHASHSEED |
| 0.29 | ``SchedulerOutput.kv_connector_block_state`` |
| 0.30 | ``KVConnectorOutput.failed_recving`` |
| 0.31 | tagged extra keys in hashes |
| 0.32 | sources of cache hits; ``kv_cache_config.hash_block_size`` |

Everything optional is read with ``getattr``, so an unknown newer version works as long as it keeps
the old names.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import attrs
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils

from pegaflow.client.memory import cuda_ipc_handle
from pegaflow.connector.common import StepOrders
from pegaflow.connector.identity import FORMAT, digest_of, seed_check, weights_revision
from pegaflow.connector.layout import TensorView
from pegaflow.errors import DeviceTrouble

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput


def version() -> tuple[int, int]:
    """(major, minor) of vLLM; a source build counts as newer than all."""
    match = re.match(r"(\d+)\.(\d+)", getattr(vllm, "__version__", ""))
    return (int(match[1]), int(match[2])) if match and match[0] != "0.0" else (999, 0)


# --- values that travel inside vLLM -------------------------------------------------------------


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """Scheduler to worker, each step."""

    def __init__(self, orders: StepOrders) -> None:
        """Wrap; vLLM pickles it."""
        self.orders = orders


class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """Worker to scheduler, once at engine start: the manifest that this rank uses."""

    def __init__(self, manifest_fields: dict[str, str]) -> None:
        """Wrap; vLLM pickles it."""
        self.manifest_fields = manifest_fields


class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """Worker to scheduler on request, where the handshake did not come through."""

    def __init__(self, manifests: list[dict[str, str]]) -> None:
        """One manifest a rank."""
        self.manifests = manifests

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """All ranks' manifests."""
        return WorkerReport(self.manifests + cast("WorkerReport", other).manifests)


def register_connector(name: str, module: str) -> None:
    """Make the class known by name; may be repeated."""
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(name, module, name)


# --- facts about the engine ----------------------------------------------------------------------


@attrs.frozen
class EngineFacts:
    """What both halves need to know about their engine."""

    engine_id: str
    block_tokens: int
    block_count: int
    group_count: int
    tp: int
    pp: int
    dcp: int
    pcp: int
    mla: bool

    @property
    def world_size(self) -> int:
        """Ranks that register."""
        return self.tp * self.pp

    def obstacle(self) -> str:
        """Why this engine can't use the cache, empty if it can."""
        if self.group_count != 1:
            return f"its model has {self.group_count} KV cache groups and 1 is supported"
        if self.pcp > 1:
            return "prefill context parallelism is not supported"
        return ""

    def slot(self, tp_rank: int, pp_rank: int) -> tuple[int, int]:
        """(slot index, slot count) of a rank: ranks with equal bytes share a slot."""
        if self.mla:
            return pp_rank * self.dcp + tp_rank % self.dcp, self.pp * self.dcp
        return pp_rank * self.tp + tp_rank, self.pp * self.tp

    def stripe(self, tp_rank: int) -> tuple[int, int]:
        """(index, count): of ranks that share a slot, the one with b % count == index saves b."""
        if self.mla:
            return tp_rank // self.dcp, self.tp // self.dcp
        return 0, 1


def engine_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineFacts:
    """Read them off vLLM's configuration; the same in every process of an engine."""
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    dcp = int(getattr(parallel, "decode_context_parallel_size", 1) or 1)
    sharded = all(getattr(group.kv_cache_spec, "dcp_sharded", True) for group in groups)
    return EngineFacts(
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        block_tokens=int(vllm_config.cache_config.block_size) * (dcp if sharded else 1),
        block_count=int(kv_cache_config.num_blocks),
        group_count=len(groups),
        tp=int(parallel.tensor_parallel_size),
        pp=int(parallel.pipeline_parallel_size),
        dcp=dcp if sharded else 1,
        pcp=int(getattr(parallel, "prefill_context_parallel_size", 1) or 1),
        mla=bool(vllm_config.model_config.use_mla),
    )


def extra_config(vllm_config: VllmConfig) -> Mapping[str, object]:
    """``kv_connector_extra_config``."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    return cast("Mapping[str, object]", extra or {})


def load_failures_recompute(vllm_config: VllmConfig) -> bool:
    """Does the engine recompute blocks that could not be loaded, or fail the request?"""
    transfer = vllm_config.kv_transfer_config
    return getattr(transfer, "kv_load_failure_policy", "recompute") == "recompute"


def make_load_failures_recompute(vllm_config: VllmConfig) -> None:
    """Effective when called in the scheduler half's constructor: vLLM reads the policy after it."""
    vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"


def wanted_layout(vllm_config: VllmConfig) -> str | None:
    """The name of a layout in which a block is one contiguous range, or None for no wish."""
    if version() < (0, 29) or vllm_config.model_config.use_mla:
        return None
    if os.environ.get("PEGAFLOW_CROSS_LAYER_BLOCKS", "1") == "0":
        return None
    from vllm.platforms import current_platform

    # The CPU kernels read one layout only; on GPUs the order within a block stays the usual one.
    return None if current_platform.is_cpu() else "BLNHC"


def ranks() -> tuple[int, int]:
    """(tp_rank, pp_rank) of this worker."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return int(get_tp_group().rank_in_group), int(get_pp_group().rank_in_group)


def host_memory_source() -> object | None:
    """vLLM's name for "hit in host memory", where it distinguishes."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return cast("object", CacheHitSource.HOST)


def failed_requests(output: KVConnectorOutput) -> set[str]:
    """Requests whose load failed as a whole (0.30)."""
    return set(getattr(output, "failed_recving", None) or ())


# --- identity ------------------------------------------------------------------------------------


def hash_function(vllm_config: VllmConfig) -> Callable[[object], bytes]:
    """The one that the engine hashes blocks with."""
    name = vllm_config.cache_config.prefix_caching_hash_algo
    return cast("Callable[[object], bytes]", hashing.get_hash_fn_by_name(name))


def fixed_seed(function: Callable[[object], bytes]) -> str | None:
    """The seed of every prompt's first hash if it is the same at each start, else None."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    weak: frozenset[object] = getattr(kv_cache_utils, "_NON_CRYPTO_HASH_FUNCTIONS", frozenset())
    default = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    return None if function in weak else cast("str | None", default)


def current_none_hash() -> bytes | None:
    """The parent of every prompt's first block, as this process uses it; None before it is set."""
    return cast("bytes | None", getattr(kv_cache_utils, "NONE_HASH", None))


def identity_fields(
    vllm_config: VllmConfig, facts: EngineFacts, layout_fingerprint: str
) -> dict[str, str]:
    """Every manifest field but the namespace; called in workers, which know the tensors."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    function = hash_function(vllm_config)
    load = vllm_config.load_config
    if str(load.load_format).endswith("dummy"):
        revision = f"dummy:{model.seed}"
    else:
        commit = getattr(model.hf_config, "_commit_hash", None)
        revision = weights_revision(str(model.model), model.revision, commit)
    scales = (
        f"dynamic:{facts.engine_id}" if getattr(cache, "calculate_kv_scales", False) else "none"
    )
    return {
        "model": str(model.model),
        "revision": revision,
        "model-config": _model_config_digest(vllm_config),
        "quantization": str(model.quantization or "none"),
        "dtype": str(model.dtype),
        "kv-dtype": str(cache.cache_dtype),
        "kv-scales": scales,
        "kv-layout": layout_fingerprint,
        "rank-geometry": f"tp={facts.tp} pp={facts.pp} dcp={facts.dcp} pcp={facts.pcp}",
        "block-size-tokens": str(facts.block_tokens),
        "hash-algorithm": str(cache.prefix_caching_hash_algo),
        "hash-seed-check": seed_check(function, fixed_seed(function), facts.engine_id),
        "hash-extra-keys": "tagged" if version() >= (0, 31) else "untagged",
        "lora": "on" if vllm_config.lora_config else "off",
        "connector-format": FORMAT,
    }


def _model_config_digest(vllm_config: VllmConfig) -> str:
    """What of the model's configuration changes numbers: all but names and versions of files."""
    config = dict(vllm_config.model_config.hf_config.to_dict())
    for volatile in ("_name_or_path", "_commit_hash", "transformers_version"):
        config.pop(volatile, None)
    overrides = getattr(vllm_config.model_config, "hf_overrides", None)
    overrides = overrides if isinstance(overrides, dict) else repr(type(overrides))
    processor = getattr(
        getattr(vllm_config.model_config, "multimodal_config", None), "mm_processor_kwargs", None
    )
    return digest_of([config, overrides, processor])


# --- memory --------------------------------------------------------------------------------------


@attrs.frozen
class Allocation:
    """One allocation of KV memory: a file descriptor of ours (host) or a CUDA IPC handle."""

    size_bytes: int
    fd: int = -1
    cuda_handle: bytes = b""
    device_uuid: str = ""
    offset_bytes: int = 0


def export_tensors(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
) -> tuple[list[TensorView], list[Allocation]]:
    """Make the memory behind all tensors reachable for the daemon, and say where each tensor lies.

    Host tensors move into a shared segment, in place: every view of the model follows, because they
    share one storage object.  The descriptors are ours; close them when the engine ends.
    """
    tensors = [
        (name if len(parts) == 1 else f"{name}.{i}", tensor)
        for name, value in kv_caches.items()
        for parts in [[value] if isinstance(value, torch.Tensor) else list(value)]
        for i, tensor in enumerate(parts)
    ]
    storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
    views: list[TensorView] = []
    for name, tensor in tensors:
        storage = tensor.untyped_storage()
        number, _ = storages.setdefault(storage.data_ptr(), (len(storages), storage))
        size = tensor.element_size()
        views.append(
            TensorView(
                name=name,
                dtype=str(tensor.dtype),
                region=number,
                offset_bytes=tensor.storage_offset() * size,
                item_bytes=size,
                shape=tuple(tensor.shape),
                strides_bytes=tuple(stride * size for stride in tensor.stride()),
            )
        )
    return views, [_export_storage(storage) for _, storage in storages.values()]


def _export_storage(storage: torch.UntypedStorage) -> Allocation:
    size = int(storage.nbytes())
    if storage.device.type == "cpu":
        # Private, and the only way that keeps the model's own views valid.
        fd, _ = storage._share_fd_cpu_()
        return Allocation(size, fd=os.dup(fd))
    if storage.device.type == "cuda":
        handle, offset = cuda_ipc_handle(storage.data_ptr())
        uuid = str(torch.cuda.get_device_properties(storage.device).uuid)
        uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return Allocation(size, cuda_handle=handle, device_uuid=uuid, offset_bytes=offset)
    raise DeviceTrouble(f"KV memory on {storage.device} can't be shared with the daemon")


def forward_event(device_type: str) -> Callable[[], None] | None:
    """Call it on another thread to wait for all that is queued on this thread's stream now."""
    if device_type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # who waits sleeps, and leaves the core to the engine
    event.record()
    return cast("Callable[[], None]", event.synchronize)


def device_type(kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> str:
    """ "cpu", "cuda", ..."""
    first = next(iter(kv_caches.values()))
    tensor = first if isinstance(first, torch.Tensor) else first[0]
    return str(tensor.device.type)
