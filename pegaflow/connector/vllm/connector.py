"""The class that vLLM loads.  It only delegates; every hook is guarded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)

from pegaflow.client.blocking import BlockingSession
from pegaflow.connector.common import StepOrders, read_config
from pegaflow.connector.guard import Complaints, guarded
from pegaflow.connector.identity import Identity, make_identity
from pegaflow.connector.querier import Prober, Querier
from pegaflow.connector.tally import Tally
from pegaflow.connector.vllm import adapter
from pegaflow.connector.vllm.adapter import Handshake, StepMetadata, WorkerReport
from pegaflow.connector.vllm.scheduler import SchedulerHalf
from pegaflow.connector.vllm.stats import PegaPromMetrics, PegaStats
from pegaflow.connector.vllm.worker import WorkerHalf
from pegaflow.model.keys import InstanceId

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger("vllm.pegaflow")


def _nothing() -> None:
    return None


class PegaKVConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is untyped here
    """KV cache of this host's PegaFlow daemon.

    Not a ``SupportsHMA`` class: vLLM then keeps one KV cache group, which is right, if not thrifty,
    for sliding-window models too.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """A wrong setting ends the start with :exc:`~pegaflow.errors.ConfigError`."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.tally = Tally()
        self.complaints = Complaints()
        self.config = read_config(
            adapter.extra_config(vllm_config),
            on_unknown=lambda key: _log.warning("PegaFlow: unknown setting %s is ignored", key),
        )
        self.facts = adapter.engine_facts(vllm_config, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._prober: Prober | None = None
        source = adapter.host_memory_source()
        if source is not None:
            self._cache_hit_source = source
        obstacle = self.facts.obstacle()
        if obstacle:
            _log.warning("PegaFlow: this engine runs without the cache: %s", obstacle)
        elif role == KVConnectorRole.SCHEDULER:
            self._start_scheduler(vllm_config)
        else:
            self._worker = WorkerHalf(
                self.config,
                self.facts,
                lambda fingerprint: adapter.identity_fields(vllm_config, self.facts, fingerprint),
                self.tally,
                self.complaints,
            )

    def _start_scheduler(self, vllm_config: VllmConfig) -> None:
        """Everything but the identity, which the workers tell."""
        self._querier = Querier(self.config, self._connect, self.tally, self.complaints)
        self._scheduler = SchedulerHalf(
            self.config, self.facts.block_tokens, self._querier, self.tally
        )
        if not adapter.load_failures_recompute(vllm_config):
            keep = self.config.keep_load_failure_policy
            _log.warning(
                "PegaFlow: kv_load_failure_policy is 'fail', so one lost cache block would fail "
                "its request; %s. Set kv_load_failure_policy to 'recompute'.",
                "it is kept as you asked" if keep else "this engine uses 'recompute' instead",
            )
            if not keep:
                adapter.make_load_failures_recompute(vllm_config)
        if adapter.fixed_seed(adapter.hash_function(vllm_config)) is None:
            _log.warning(
                "PegaFlow: PYTHONHASHSEED is not set and this vLLM draws a new hash seed at every "
                "start: NOTHING in the cache can be found again after a restart or by another "
                "engine. Set PYTHONHASHSEED=0 for all engines."
            )

    def _connect(self, identity: Identity, timeout_s: float) -> BlockingSession:
        return BlockingSession(
            self.config.address,
            instance=InstanceId(self.config.instance or self.facts.engine_id),
            namespace=identity.namespace,
            manifest=identity.manifest,
            world_size=self.facts.world_size,
            timeout_s=timeout_s,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache may lose saves; preemption need not wait for them."""
        return False

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Up to 0.28: one tensor for all layers, so that a block is one range."""
        return self.config.block_outer_layout and not self.facts.mla

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """From 0.29 by name; a wish that vLLM drops if the attention backend can't."""
        return adapter.wanted_layout(vllm_config)

    # --- identity: the workers know it, the scheduler asks for it ---------------------------------

    @guarded(_nothing)
    def get_handshake_metadata(self) -> Handshake | None:
        """Worker: which manifest this rank uses."""
        if self._worker is None or self._worker.manifest_fields is None:
            return None
        self._worker.wait_until_attempted()
        return Handshake(self._worker.manifest_fields)

    @guarded(_nothing)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], object]
    ) -> None:
        """Scheduler: the ranks' manifests."""
        self._identify([m.manifest_fields for m in metadata.values() if isinstance(m, Handshake)])

    @guarded(_nothing)
    def set_xfer_handshake_metadata(self, metadata: Mapping[int, object]) -> None:
        """The same without pipeline stages."""
        self._identify([m.manifest_fields for m in metadata.values() if isinstance(m, Handshake)])

    @guarded(_nothing)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Worker: the manifest again, if the scheduler asked for it."""
        worker = self._worker
        if worker is None or worker.manifest_fields is None or not self._orders().identity_wanted:
            return None
        return WorkerReport([worker.manifest_fields])

    def _identify(self, manifests: Sequence[dict[str, str]]) -> None:
        if self._scheduler is None or not manifests or self._prober is not None:
            return
        if any(manifest != manifests[0] for manifest in manifests):
            self.complaints.warn(
                "identity", "the ranks disagree about the key identity; the cache stays unused"
            )
            return
        identity = make_identity(manifests[0], self.config.namespace)
        self._querier.identify(identity)
        self._prober = Prober(self.config, identity, self._connect, self._querier, self.complaints)
        self._prober.start()
        _log.info("PegaFlow: namespace %s at %s", identity.namespace, self.config.address)

    # --- scheduler --------------------------------------------------------------------------------

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What the cache holds behind the local hit."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    @guarded(_nothing)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Remember where the promised blocks go."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    @guarded(lambda: StepMetadata(StepOrders()))
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """This step's orders."""
        if self._scheduler is None:
            return StepMetadata(StepOrders())
        return StepMetadata(self._scheduler.step(scheduler_output))

    @guarded(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers report."""
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(report, WorkerReport):
            self._identify(report.manifests)
        if self._scheduler is not None:
            self._scheduler.loads_ended(
                connector_output.finished_recving or (),
                connector_output.invalid_block_ids or (),
                adapter.failed_requests(connector_output),
            )

    @guarded(lambda: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, object] | None]:
        """True keeps the blocks until the workers report that their saves are settled."""
        if self._scheduler is None:
            return False, None
        return self._scheduler.finished(request, block_ids), None

    # --- worker -----------------------------------------------------------------------------------

    @guarded(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """One tensor a layer."""
        if self._worker is not None:
            self._worker.register(kv_caches)

    @guarded(_nothing)
    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, attn_backend: type[object]
    ) -> None:
        """Up to 0.28: one tensor for all layers."""
        if self._worker is not None:
            layers = self._kv_cache_config.kv_cache_groups[0].layer_names
            self._worker.register({" ".join(layers): kv_cache})

    @guarded(_nothing)
    def handle_preemptions(self, kv_connector_metadata: object) -> None:
        """Before block tables change."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.revoke(kv_connector_metadata.orders)

    @guarded(_nothing)
    def start_load_kv(self, /, forward_context: object, **kwargs: object) -> None:
        """Queue this step's loads."""
        if self._worker is not None:
            self._worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        """Whole blocks are saved after the forward: a captured graph can't skip that."""

    @guarded(_nothing)
    def wait_for_save(self) -> None:
        """Queue this step's saves; does not wait."""
        if self._worker is not None:
            self._worker.start_saves(self._orders())

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Settled saves and ended loads."""
        if self._worker is None:
            return None, None
        orders = self._orders()
        self._worker.start_saves(orders)  # a step without a forward has no wait_for_save up to 0.28
        sent, received = self._worker.take_ended(orders)
        return sent or None, received or None

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of the loads that get_finished named."""
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    def _orders(self) -> StepOrders:
        metadata = self._connector_metadata
        return metadata.orders if isinstance(metadata, StepMetadata) else StepOrders()

    # --- both -------------------------------------------------------------------------------------

    @guarded(_nothing)
    def get_kv_connector_stats(self) -> PegaStats | None:
        """Since the last call."""
        report = self.tally.take()
        return PegaStats(data=report) if report is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, object] | None = None) -> PegaStats:
        """In the API server's process."""
        return PegaStats(data=data) if data is not None else PegaStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PegaPromMetrics:
        """Never None: MultiConnector's API server would die of it."""
        return PegaPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(_nothing)
    def shutdown(self) -> None:
        """Both halves; may be repeated."""
        if self._prober is not None:
            self._prober.stop()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
