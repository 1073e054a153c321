"""READ FIRST: the daemon's life.  Devices, then services, then serving; each ends before what it uses.

::

    run                                                     ends ...
    `- devices    pool, copy engines, their threads         last: nothing uses them any more
       `- services   growth, eviction, expiry, collector    second
          `- serving    RPC, memory hand-over, HTTP          first: SIGTERM, SIGINT or a shutdown call
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import attrs
import trio

from pegaflow import __version__
from pegaflow.config import NodeConfig
from pegaflow.engine import cuda
from pegaflow.engine.combined import Engines
from pegaflow.engine.pinned import Pool, check_memory
from pegaflow.errors import ConfigError
from pegaflow.model.address import Address
from pegaflow.model.keys import LeaseToken
from pegaflow.node import background, http
from pegaflow.node.handover import Handover
from pegaflow.node.parts import Node
from pegaflow.node.service import NodeService
from pegaflow.observe import log
from pegaflow.policy.host import Host
from pegaflow.rpc.connections import Limits
from pegaflow.rpc.kjloop import open_kj_loop
from pegaflow.rpc.server import serve_node

LISTEN_BACKLOG = 128
TOKEN_BYTES = 16


@attrs.define(eq=False)
class Stop:
    """Asked to end: how long calls in flight may still take, and whether somebody asked."""

    grace_seconds: float
    asked: trio.Event = attrs.field(factory=trio.Event)
    signal_number: int = 0

    def now(self, grace_seconds: float | None = None) -> None:
        """Begin to drain; repeating it changes nothing."""
        if grace_seconds is not None and not self.asked.is_set():
            self.grace_seconds = grace_seconds
        self.asked.set()


def run(config: NodeConfig, notes: Sequence[str] = ()) -> int:
    """Serve until told to stop; returns the exit code.  Raises :exc:`ConfigError` before serving.

    ``notes`` are sentences about settings without effect, for the log.
    """
    log.configure(config.log_level, as_json=config.log_format == "json")
    for note in notes:
        log.warning("config.overridden", note=note)
    check_memory(config.pool_bytes, config.memory_reserve_bytes)
    with _listeners(config.addresses) as listeners, _bound(config.http_address, "http-addr") as web:
        return trio.run(_main, config, listeners, web)


async def _main(
    config: NodeConfig, listeners: Sequence[socket.socket], web: socket.socket
) -> int:
    stop = Stop(config.shutdown_grace_s)
    async with trio.open_nursery() as root:
        await root.start(_signals, stop)
        async with _devices(config) as (pool, engines), trio.open_nursery() as services:
            handover = Handover(time.monotonic)
            handover_socket, handover_name = _handover_listener(config.addresses)
            node = Node(
                host=_host(config),
                engine=engines,
                claim_fds=handover.claim,
                background=services,
                clock=time.monotonic,
                boot_id=secrets.token_bytes(16),
                handover_address=handover_name,
                pool_total_bytes=pool.size_bytes,
            )
            services.start_soon(background.grow_pool, node, pool)
            services.start_soon(background.evict, node)
            services.start_soon(background.expire, node, handover)
            services.start_soon(background.collect_garbage)
            with handover_socket, contextlib.closing(handover):
                await _serve(config, node, handover, [*listeners], handover_socket, web, stop)
            services.cancel_scope.cancel()
        root.cancel_scope.cancel()
    log.info("daemon.stopped")
    return 0


async def _serve(
    config: NodeConfig,
    node: Node,
    handover: Handover,
    listeners: list[socket.socket],
    handover_socket: socket.socket,
    web: socket.socket,
    stop: Stop,
) -> None:
    """Answer until asked to stop; then let calls in flight end within the grace period."""
    limits = Limits(
        message_bytes=config.message_bytes,
        first_message_seconds=config.first_message_s,
        idle_seconds=config.idle_s,
        calls_in_flight=config.calls_in_flight,
        connections=config.connections,
    )
    service = NodeService(node, lambda grace_ms: stop.now(grace_ms / 1000))
    async with open_kj_loop() as loop, trio.open_nursery() as serving:
        await serving.start(serve_node, loop, listeners, service, limits)
        await serving.start(handover.serve, handover_socket)
        await serving.start(http.serve, node, web)
        with _announced(config, listeners, web):
            await stop.asked.wait()
            node.draining = True
            log.info("daemon.draining", grace_seconds=stop.grace_seconds)
            with trio.move_on_after(stop.grace_seconds):
                while node.host.statistics().open_saves or node.host.statistics().open_loads:
                    await trio.sleep(0.01)
        serving.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def _devices(config: NodeConfig) -> AsyncIterator[tuple[Pool, Engines]]:
    """The pool and whoever copies to and from it."""
    gpus = _cuda(config)
    with Pool.open(
        config.pool_bytes,
        slab_bytes=config.slab_bytes,
        use_hugepages=config.use_hugepages,
        on_slab=gpus.register_slab if gpus else None,
    ) as pool:
        device = gpus.open(pool.view, pool.address) if gpus else None
        async with Engines.open(pool.view, device) as engines:
            yield pool, engines


def _cuda(config: NodeConfig) -> cuda.CudaDevices | None:
    """The GPUs to serve, if the CUDA libraries are installed; asked-for ones must be there."""
    return None if config.devices == () else cuda.find_devices(config.devices)


def _host(config: NodeConfig) -> Host:
    return Host(
        make_token=lambda: LeaseToken(secrets.token_bytes(TOKEN_BYTES)),
        lease_ttl_s=config.lease_ttl_s,
        high_watermark=config.high_watermark,
        low_watermark=config.low_watermark,
        unsealed_ttl_s=config.unsealed_ttl_s,
    )


async def _signals(
    stop: Stop, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """The first SIGTERM or SIGINT drains, the second one ends the process on the spot."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            if stop.asked.is_set():
                log.warning("daemon.killed", signal=number)
                os._exit(128 + number)
            log.info("daemon.signal", signal=number)
            stop.now()


@contextlib.contextmanager
def _announced(
    config: NodeConfig, listeners: Sequence[socket.socket], web: socket.socket
) -> Iterator[None]:
    """Say where we serve, in the log and in the file that a supervisor may wait for."""
    facts = {
        "addr": [_name_of(listener) for listener in listeners],
        "http_addr": _name_of(web),
        "pid": os.getpid(),
        "version": __version__,
    }
    log.info("daemon.serving", **facts)
    path = config.ready_file
    if path is not None:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(facts))
        partial.rename(path)
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _name_of(listener: socket.socket) -> str:
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"{host}:{name[1]}"


@contextlib.contextmanager
def _listeners(addresses: Sequence[Address]) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_bound(address, "addr")) for address in addresses]


@contextlib.contextmanager
def _bound(address: Address, option: str) -> Iterator[socket.socket]:
    """A listening socket; a Unix one replaces the stale file of a daemon that was killed."""
    with contextlib.ExitStack() as stack:
        try:
            if address.path:
                _remove_stale(address.path)
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.bind(address.path)
                stack.callback(_unlink, address.path)
            else:
                family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
                sock = stack.enter_context(socket.socket(family))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((address.host, address.port))
            sock.listen(LISTEN_BACKLOG)
        except OSError as exc:
            raise ConfigError(
                f"--{option} {address} can't be served: {exc.strerror or exc}; "
                "is another daemon there, or is it no address of this host?"
            ) from None
        yield sock


def _remove_stale(path: str) -> None:
    """Delete a socket file that nobody answers at; anything else stays and binding fails."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            return


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _handover_listener(addresses: Sequence[Address]) -> tuple[socket.socket, str]:
    """Beside a unix: address as PATH.memory, else in the abstract namespace, which leaves no file."""
    sock = socket.socket(socket.AF_UNIX)
    paths = [address.path for address in addresses if address.path]
    if paths:
        name = paths[0] + ".memory"
        _remove_stale(name)
        sock.bind(name)
    else:
        name = f"@pegaflow-memory-{os.getpid()}-{secrets.token_hex(4)}"
        sock.bind("\0" + name[1:])
    sock.listen(LISTEN_BACKLOG)
    return sock, name
