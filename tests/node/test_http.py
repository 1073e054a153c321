"""The HTTP routes over a real socket, on a node with a simulated device."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from pegaflow.errors import UnknownInstance
from pegaflow.model import messages as m
from pegaflow.model.keys import (
    REQUIRED_MANIFEST_FIELDS,
    BlockHash,
    InstanceId,
    LeaseToken,
    Manifest,
    Namespace,
)
from pegaflow.model.layout import GroupLayout, Run
from pegaflow.node import http, measure
from pegaflow.node.parts import Node
from pegaflow.node.service import NodeService, SessionService
from pegaflow.observe.metrics import METRICS
from pegaflow.policy.host import Host
from pegaflow.rpc.connections import Peer
from pegaflow.testing.sim_engine import Faults, SimCopyEngine

FOREVER_NS = 1 << 62
MANIFEST = Manifest(dict.fromkeys(REQUIRED_MANIFEST_FIELDS, "x"))
HASHES = [BlockHash(bytes([number]) * 32) for number in range(4)]


def node_with(nursery: trio.Nursery, pool_bytes: int) -> tuple[Node, SimCopyEngine]:
    engine = SimCopyEngine(
        pool=np.zeros(1 << 16, np.uint8), faults=Faults(random.Random(0)), chunk_seconds=0.0
    )
    tokens = iter(range(1, 1000))
    node = Node(
        host=Host(make_token=lambda: LeaseToken(next(tokens).to_bytes(16, "big"))),
        engine=engine,
        claim_fds=lambda _: [],
        background=nursery,
        clock=trio.current_time,
        boot_id=b"b" * 16,
        pool_total_bytes=1 << 16,
    )
    if pool_bytes:
        node.host.add_memory(0, pool_bytes)
    return node, engine


@contextlib.asynccontextmanager
async def serving(
    pool_bytes: int = 1 << 16,
) -> AsyncIterator[tuple[Node, SimCopyEngine, httpx.AsyncClient]]:
    async with trio.open_nursery() as nursery:
        node, engine = node_with(nursery, pool_bytes)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(8)
            await nursery.start(http.serve, node, listener)
            port = listener.getsockname()[1]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                yield node, engine, client
            nursery.cancel_scope.cancel()


async def engine_of(node: Node, engine: SimCopyEngine, name: str = "e") -> SessionService:
    """An instance with one rank and four saved blocks of 512 bytes."""
    now_ns = int(trio.current_time() * 1e9)
    request = m.OpenRequest(
        1, 1, "test", InstanceId(name), Namespace(f"space {name}"), MANIFEST, 1, now_ns
    )
    session = NodeService(node, lambda _: None).open(request, Peer("unix", local=True))[1]
    region = engine.export(name.encode(), np.zeros(4096, np.uint8))
    layout = GroupLayout(0, 8, (Run(0, 0, 512, 512),))
    await session.register(m.RegisterRequest(0, 0, 1, (region,), (layout,)))
    run = m.SaveRun(0, HASHES, b"", np.arange(4, dtype=np.uint32))
    assert (await session.save(m.SaveRequest(0, (run,), FOREVER_NS))).stored == 4
    return session


async def scraped(client: httpx.AsyncClient) -> dict[str, float]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_alive_is_not_ready() -> None:
    async with serving(pool_bytes=0) as (node, _, client):
        health = await client.get("/health")
        assert (health.status_code, health.text) == (200, "ok")
        ready = await client.get("/ready")
        assert (ready.status_code, ready.text) == (503, "no pool memory is usable yet")
        assert (await scraped(client))["pegaflow_ready"] == 0
        node.host.add_memory(0, 4096)
        assert (await client.get("/ready")).status_code == 200
        assert (await scraped(client))["pegaflow_ready"] == 1
        node.draining = True
        ready = await client.get("/ready")
        assert (ready.status_code, ready.text) == (503, "draining")
        assert (await client.get("/health")).status_code == 200


async def test_metrics_tell_what_happened() -> None:
    async with serving() as (node, engine, client):
        session = await engine_of(node, engine)
        session.query(m.QueryRequest(0, [*HASHES[:3], BlockHash(b"?" * 32)], b"", ""))
        node.meter.call("query", "ok", 0.001)
        found = await scraped(client)
        want = {
            "pegaflow_build_info[0.1.0]": 1,
            "pegaflow_pool_capacity_bytes": 1 << 16,
            "pegaflow_pool_used_bytes": 2048,
            "pegaflow_cache_resident_blocks": 4,
            "pegaflow_cache_resident_bytes": 2048,
            "pegaflow_cache_pinned_blocks": 3,
            "pegaflow_cache_pinned_bytes": 1536,
            "pegaflow_cache_block_hits_total": 3,
            "pegaflow_cache_block_misses_total": 1,
            "pegaflow_cache_tier_block_requests_total[ram]": 3,
            "pegaflow_cache_tier_block_requests_total[miss]": 1,
            "pegaflow_cache_block_insertions_total": 4,
            "pegaflow_namespace_resident_blocks[space e]": 4,
            "pegaflow_leases": 1,
            "pegaflow_instances_ready": 1,
            "pegaflow_registered_ranks": 1,
            "pegaflow_save_bytes_total": 2048,
            "pegaflow_save_duration_seconds_count": 1,
            "pegaflow_copy_batches_total[save]": 1,
            "pegaflow_rpc_requests_total[query][ok]": 1,
            "pegaflow_rpc_duration_seconds_count[query][ok]": 1,
        }
        assert {name: found[name] for name in want} == want


async def test_a_scrape_alone_changes_nothing() -> None:  # T31
    async with serving() as (node, engine, client):
        await engine_of(node, engine)
        first, second = await scraped(client), await scraped(client)
        mine = {name for name in first if name.startswith("pegaflow_")}
        assert {name: first[name] for name in mine} == {name: second[name] for name in mine}


async def test_every_row_has_a_number_from_an_empty_node() -> None:
    async with trio.open_nursery() as nursery:
        node, _ = node_with(nursery, 0)
        seen = measure.snapshot(node)
        assert seen.values.keys() | seen.distributions.keys() == {one.name for one in METRICS}


async def test_series_by_namespace_are_bounded() -> None:
    async with trio.open_nursery() as nursery:
        node, _ = node_with(nursery, 0)
        for number in range(measure.NAMESPACES_MAX + 7):
            node.host.open_namespace(Namespace(str(number)), MANIFEST)
        series = measure.snapshot(node).values["pegaflow_namespace_resident_blocks"]
        assert len(series) == measure.NAMESPACES_MAX + 1
        assert (measure.OTHER,) in series


async def test_instances_are_listed_and_cleaned_up() -> None:
    async with serving() as (node, engine, client):
        one, two = await engine_of(node, engine, "one"), await engine_of(node, engine, "two")
        listed = (await client.get("/instances")).json()["instances"]
        assert [each["id"] for each in listed] == ["one", "two"]
        assert listed[0] == {
            "id": "one",
            "namespace": "space one",
            "world_size": 1,
            "registered_ranks": [0],
            "sessions": 1,
            "ready": True,
        }
        unknown = await client.post("/instances/cleanup", params={"id": "none"})
        assert unknown.status_code == 404
        assert "'none'" in unknown.json()["error"]
        gone = await client.post("/instances/cleanup", params={"id": "one"})
        assert gone.json() == {"removed_instances": 1, "removed_tensors": 1}
        with pytest.raises(UnknownInstance, match="open and register again"):
            one.query(m.QueryRequest(0, HASHES, b"", ""))
        two.query(m.QueryRequest(0, HASHES, b"", ""))
        everything = await client.post("/instances/cleanup")
        assert everything.json() == {"removed_instances": 1, "removed_tensors": 1}
        assert len(node.instances) == 0
        one.closed()  # what a connection does later finds nothing to do
        assert node.host.statistics().leases == 0


async def test_memory_is_cleaned_up_but_for_what_is_held() -> None:
    async with serving() as (node, engine, client):
        session = await engine_of(node, engine)
        session.query(m.QueryRequest(0, HASHES[:1], b"", ""))
        gone = await client.post("/cache/memory/cleanup")
        assert gone.json() == {
            "evicted_blocks": 3,
            "evicted_bytes": 1536,
            "reclaimed_bytes": 1536,
            "still_referenced_blocks": 1,
        }
        assert node.host.statistics().blocks == 1


@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site"])
async def test_web_pages_change_nothing(header: str) -> None:
    async with serving() as (node, engine, client):
        await engine_of(node, engine)
        for path in ("/cache/memory/cleanup", "/instances/cleanup"):
            answer = await client.post(path, headers={header: "https://evil.example"})
            assert answer.status_code == 403
        assert (len(node.instances), node.host.statistics().blocks) == (1, 4)


@pytest.mark.parametrize("path", ["/instances/cleanup", "/cache/memory/cleanup"])
async def test_looking_never_changes(path: str) -> None:
    async with serving() as (_, _, client):
        assert (await client.get(path)).status_code == 405


async def test_a_broken_invariant_ends_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """The web framework alone would answer 500 and go on with broken state."""
    with pytest.RaisesGroup(
        pytest.RaisesExc(AssertionError, match="state is broken"), flatten_subgroups=True
    ):
        async with serving() as (_, _, client):

            def broken(self: Host, namespace: object = None) -> None:
                raise AssertionError("state is broken")

            monkeypatch.setattr(Host, "clear", broken)
            with contextlib.suppress(httpx.HTTPError):
                await client.post("/cache/memory/cleanup")
            await trio.sleep(5)
