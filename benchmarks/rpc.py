"""How long does a scheduler wait for a query of 640 hashes, and what does bookkeeping cost a block?

Would disprove: a query, all hit and lease included, takes at most 0.5 ms on a quiet machine and at
most half of what gRPC needs only to echo the same bytes; a block's bookkeeping costs the same
whatever is resident.  Rounds of both alternate in one run.  ``query640`` is the blocking client
against a real daemon process; the lease is released between two calls, outside the timing, but its
processor time counts.  ``grpc_echo`` is grpc.aio with protobuf in a process of its own and gRPC's
synchronous client.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from benchmarks import policy_cost
from benchmarks.harness import Figure, emit, percentile, progress
from pegaflow.client.blocking import BlockingSession
from pegaflow.client.mock import MockRank
from pegaflow.model.keys import BlockHash
from pegaflow.model.messages import QueryRequest, Ready
from pegaflow.testing.daemon import running_daemon

HASHES, WIDTH = 640, 32
ROUNDS, CALLS = 8, 300
TIMEOUT_S = 5.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def echo_class() -> Callable[..., object]:  # type: ignore[explicit-any]  # made at run time
    """A message with one bytes field, made at run time: no generated file."""
    file = descriptor_pb2.FileDescriptorProto(name="echo.proto", syntax="proto3")
    message = file.message_type.add(name="Echo")
    message.field.add(
        name="payload",
        number=1,
        type=descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
        label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Echo"))  # type: ignore[no-any-return]  # untyped


def serve_echo() -> None:
    """The other process: grpc.aio, one method."""
    import asyncio

    import grpc

    made = echo_class()

    async def echo(request: object, context: object) -> object:
        return made(payload=request.payload)  # type: ignore[attr-defined]  # made at run time

    async def main() -> None:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(
            echo,
            request_deserializer=made.FromString,  # type: ignore[attr-defined]  # made at run time
            response_serializer=lambda message: message.SerializeToString(),
        )
        generic = grpc.method_handlers_generic_handler("Echo", {"Echo": handler})
        server.add_generic_rpc_handlers((generic,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(port, flush=True)
        await server.wait_for_termination()

    asyncio.run(main())


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def timed_queries(session: BlockingSession, request: QueryRequest) -> list[float]:
    """Milliseconds of each call."""
    taken = []
    for _ in range(CALLS):
        began = time.perf_counter()
        reply = session.query(request, TIMEOUT_S)
        taken.append((time.perf_counter() - began) * 1e3)
        assert isinstance(reply, Ready)
        assert reply.hit_count == HASHES
        session.release([reply.lease], TIMEOUT_S)
    return taken


def timed_echoes(call: Callable[[object], object], message: object) -> list[float]:
    """Milliseconds of each call."""
    taken = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call(message)
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def round_trips() -> dict[str, Figure]:
    """Both sides, alternating."""
    import grpc

    hashes = [BlockHash(secrets.token_bytes(WIDTH)) for _ in range(HASHES)]
    request = QueryRequest(0, hashes, b"", "bench")
    made = echo_class()
    command = [sys.executable, "-m", "benchmarks.rpc", "serve-echo"]
    queries: list[float] = []
    echoes: list[float] = []
    daemon_s = 0.0
    with (
        running_daemon("--log-level", "error", pool_size="256mb") as daemon,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        MockRank.connect(daemon.address, blocks=HASHES) as rank,
    ):
        assert server.stdout is not None
        channel = grpc.insecure_channel(f"127.0.0.1:{server.stdout.readline().strip()}")
        echo = channel.unary_unary(
            "/Echo/Echo",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=made.FromString,  # type: ignore[attr-defined]  # made at run time
        )
        message = made(payload=b"".join(hashes))
        rank.save(hashes, np.arange(HASHES))
        timed_queries(rank.session, request)
        timed_echoes(echo, message)
        for number in range(ROUNDS):
            before = processor_seconds(daemon.process.pid)
            queries += timed_queries(rank.session, request)
            daemon_s += processor_seconds(daemon.process.pid) - before
            echoes += timed_echoes(echo, message)
            progress(f"round {number + 1} of {ROUNDS}")
        channel.close()
        server.kill()
    return {
        "query640_p50_ms": round(percentile(queries, 50), 3),
        "query640_p99_ms": round(percentile(queries, 99), 3),
        "query640_daemon_cpu_us": round(daemon_s / len(queries) * 1e6, 1),
        "grpc_echo_p50_ms": round(percentile(echoes, 50), 3),
        "grpc_echo_p99_ms": round(percentile(echoes, 99), 3),
        "query640_to_grpc_echo": round(percentile(queries, 50) / percentile(echoes, 50), 3),
    }


def main() -> None:
    """Round trips first, then bookkeeping alone."""
    result = round_trips()
    for key, value in policy_cost.figures().items():
        if key.startswith(("save_us", "load_us", "save_flat", "load_flat")):
            result[key] = value
    emit(result, "rpc")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve-echo"]:
        serve_echo()
    else:
        main()
