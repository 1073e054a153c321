"""The worker half: exports the KV memory, hands orders to the lanes, reports what they did."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pegaflow.connector.common import ConnectorConfig, LoadOrder, StepOrders
from pegaflow.connector.guard import Complaints
from pegaflow.connector.identity import make_identity
from pegaflow.connector.layout import block_layout
from pegaflow.connector.tally import Tally
from pegaflow.connector.vllm import adapter
from pegaflow.connector.vllm.direct import DirectLoads
from pegaflow.connector.vllm.lanes import LoadLane, Rank, SaveLane
from pegaflow.model.keys import InstanceId

if TYPE_CHECKING:
    import torch

JOIN_S = 2.0


class WorkerHalf:
    """Methods run on the engine's worker thread; :meth:`_load_ended` on the load lane's."""

    def __init__(
        self,
        config: ConnectorConfig,
        facts: adapter.EngineFacts,
        fields_for: Callable[[str], dict[str, str]],
        tally: Tally,
        complaints: Complaints,
    ) -> None:
        """``fields_for(layout fingerprint)`` gives the manifest."""
        self._config = config
        self._facts = facts
        self._fields_for = fields_for
        self._tally = tally
        self._complaints = complaints
        self._loads: LoadLane | None = None
        self._direct: DirectLoads | None = None
        self._saves: SaveLane | None = None
        self._allocations: tuple[adapter.Allocation, ...] = ()
        self._device_type = "cpu"
        self._lock = threading.Lock()
        self._ended: list[tuple[str, list[int]]] = []
        self._bad_blocks: set[int] = set()
        self._finished: set[str] = set()
        self._saved_step: StepOrders | None = None
        self.manifest_fields: dict[str, str] | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        """Once, before warm-up: the tensors may still move to shareable memory."""
        views, allocations = adapter.export_tensors(kv_caches)
        self._allocations = tuple(allocations)
        self._device_type = adapter.device_type(kv_caches)
        layout, fingerprint = block_layout(views, self._facts.block_count)
        fields = self._fields_for(fingerprint)
        tp_rank, pp_rank = adapter.ranks()
        slot_index, slot_count = self._facts.slot(tp_rank, pp_rank)
        rank = Rank(
            address=self._config.address,
            instance=InstanceId(self._config.instance or self._facts.engine_id),
            identity=make_identity(fields, self._config.namespace),
            world_size=self._facts.world_size,
            rank=pp_rank * self._facts.tp + tp_rank,
            slot_index=slot_index,
            slot_count=slot_count,
            stripe=self._facts.stripe(tp_rank),
            allocations=self._allocations,
            layout=layout,
        )
        self._loads = LoadLane(rank, self._config, self._tally, self._complaints, self._load_ended)
        loads = self._loads
        self._direct = DirectLoads(
            rank, self._config, self._tally, self._complaints, loads, self._load_ended
        )
        self._saves = SaveLane(
            rank, self._config, self._tally, self._complaints, lambda: loads.registered
        )
        self._loads.start()
        self._saves.start()
        self.manifest_fields = fields

    def wait_until_attempted(self) -> None:
        """At engine start there is time: the daemon shall know this rank before its first query."""
        if self._loads is not None:
            self._loads.attempted.wait(2 * self._config.attach_timeout_s)
        if self._direct is not None:
            self._direct.connect(self._config.attach_timeout_s)

    # --- one step --------------------------------------------------------------------------------

    def revoke(self, orders: StepOrders) -> None:
        """Before anything of this step overwrites blocks."""
        if self._saves is not None and orders.revoked:
            self._saves.revoke(orders.revoked)

    def start_loads(self, orders: StepOrders) -> None:
        """Queue them; without a lane they have failed."""
        for order in orders.loads:
            if self._direct is None:
                self._load_ended(order, order.block_ids)
            else:
                self._direct.submit(order)

    def start_saves(self, orders: StepOrders) -> None:
        """Once a step, after the forward was launched (or there was none)."""
        if orders is self._saved_step:
            return
        self._saved_step = orders
        if self._saves is not None and orders.saves:
            self._saves.submit(orders.saves, adapter.forward_event(self._device_type))

    def take_ended(self, orders: StepOrders) -> tuple[set[str], set[str]]:
        """(finished requests whose saves are settled, loads that ended), each exactly once.

        Blocks that failed are handed out by :meth:`take_bad_blocks` of the same step.
        """
        self._finished |= orders.finished
        saves = self._saves
        sent = {name for name in self._finished if saves is None or saves.settled(name)}
        self._finished -= sent
        if self._direct is not None:
            self._direct.poll()
        with self._lock:
            ended, self._ended = self._ended, []
        for _, bad in ended:
            self._bad_blocks.update(bad)
        return sent, {request_id for request_id, _ in ended}

    def take_bad_blocks(self) -> set[int]:
        """Blocks of the loads that :meth:`take_ended` named, which hold no valid content."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def _load_ended(self, order: LoadOrder, failed: Iterable[int]) -> None:
        with self._lock:
            self._ended.append((order.request_id, list(failed)))

    def close(self) -> None:
        """The engine ends: let the daemon know by closing the sessions, before the memory goes."""
        if self._direct is not None:
            self._direct.close()
        for lane in (self._saves, self._loads):
            if lane is not None:
                lane.stop(JOIN_S)
        self._saves = self._loads = self._direct = None
        for allocation in self._allocations:
            if allocation.fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(allocation.fd)
        self._allocations = ()
