"""READ FIRST: the daemon's life.  Devices, then services, then serving; each ends before its base.

::

    run                                                     ends ...
    `- devices    pool, copy engines, their threads         last: nothing uses them any more
       `- services   growth, eviction, expiry, collector    second
          `- serving    RPC, memory hand-over, HTTP          first: SIGTERM, SIGINT, a shutdown call
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import secrets
import signal
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import attrs
import trio

from pegaflow import __version__
from pegaflow.config import NodeConfig
from pegaflow.engine.base import CopyEngine
from pegaflow.engine.combined import open_engines
from pegaflow.engine.cuda import CudaDevices, find_devices
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
DRAIN_POLL_SECONDS = 0.01
TEARDOWN_SECONDS = 0.5
SWITCH_SECONDS = 0.0005
"""A device thread that has to queue the next part waits at most so long for Python's lock."""
FLUSH_SECONDS = 0.05
"""Between the end of the last call and the end of the connections: its answer must get out."""


@attrs.define(eq=False)
class Stop:
    """Asked to end: how long calls in flight may still take, and whether somebody asked."""

    grace_seconds: float
    asked: trio.Event = attrs.field(factory=trio.Event)

    def now(self, grace_seconds: float | None = None) -> None:
        """Begin to drain; repeating it changes nothing."""
        if grace_seconds is not None and not self.asked.is_set():
            self.grace_seconds = grace_seconds
        self.asked.set()


def run(config: NodeConfig) -> int:
    """Serve until told to stop; returns the exit code.

    Raises :exc:`ConfigError`, having started nothing, when the machine does not allow it.
    """
    check_memory(config.pool_bytes, config.memory_reserve_bytes)
    gc.disable()  # background.collect_garbage says why
    sys.setswitchinterval(SWITCH_SECONDS)
    _allow_many_descriptors()
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(_bound(each, "addr")) for each in config.addresses]
        web = stack.enter_context(_bound(config.http_address, "http-addr"))
        memory = stack.enter_context(_handover_listener(config.addresses))
        if config.ready_file is not None:
            _check_ready_file(config.ready_file)
        try:
            return trio.run(_main, config, Sockets(listeners, memory, web))
        except BaseExceptionGroup as group:
            # The tree of nurseries wraps a refusal as often as it is deep.
            refusal = _only_refusal(group)
            if refusal is None:
                raise
            raise refusal from None


@attrs.frozen(eq=False)
class Sockets:
    """Where we listen.  Bound before anything else, so that a taken port costs nothing."""

    rpc: Sequence[socket.socket]
    memory: socket.socket
    http: socket.socket


async def _main(config: NodeConfig, sockets: Sockets) -> int:
    stop = Stop(config.shutdown_grace_s)
    async with trio.open_nursery() as watch:
        watch.start_soon(_end_by_force, config, stop)
        with _signals_to(stop):
            async with _devices(config) as (pool, engine), trio.open_nursery() as services:
                handover = Handover(time.monotonic)
                node = Node(
                    host=_host(config),
                    engine=engine,
                    claim_fds=handover.claim,
                    background=services,
                    clock=time.monotonic,
                    boot_id=secrets.token_bytes(16),
                    handover_address=_name_of(sockets.memory).removeprefix("unix:"),
                    pool_total_bytes=pool.size_bytes,
                )
                services.start_soon(background.grow_pool, node, pool)
                services.start_soon(background.evict, node)
                services.start_soon(background.expire, node, handover)
                services.start_soon(background.collect_garbage)
                with contextlib.closing(handover):
                    await _serve(config, node, handover, sockets, stop)
                services.cancel_scope.cancel()
            watch.cancel_scope.cancel()
    log.info("daemon.stopped")
    return 0


async def _end_by_force(config: NodeConfig, stop: Stop) -> None:
    """A copy can't be cut short, and its deadline may lie far behind the grace period.

    Ending the process ends it: its client sees the connection break and counts the call as failed.
    """
    await stop.asked.wait()
    await trio.sleep(stop.grace_seconds + TEARDOWN_SECONDS)
    log.warning("daemon.ended_by_force", grace_seconds=stop.grace_seconds)
    paths = [Path(each.path) for each in config.addresses if each.path]
    for path in (*paths, *(Path(f"{path}.memory") for path in paths[:1]), config.ready_file):
        if path is not None:
            path.unlink(missing_ok=True)
    os._exit(0)


async def _serve(
    config: NodeConfig, node: Node, handover: Handover, sockets: Sockets, stop: Stop
) -> None:
    """Answer until asked to stop; then let calls in flight end within the grace period."""
    service = NodeService(node, lambda grace_ms: stop.now(grace_ms / 1000))
    async with open_kj_loop() as loop, trio.open_nursery() as serving:
        await serving.start(serve_node, loop, sockets.rpc, service, _limits(config))
        await serving.start(handover.serve, sockets.memory)
        await serving.start(http.serve, node, sockets.http)
        with _announced(config, sockets):
            await stop.asked.wait()
            node.draining = True
            log.info("daemon.draining", grace_seconds=stop.grace_seconds)
            with trio.move_on_after(stop.grace_seconds):
                await _idle(node)
                await trio.sleep(FLUSH_SECONDS)
        serving.cancel_scope.cancel()


async def _idle(node: Node) -> None:
    """Return when no copy is under way.  Polls: this runs once, and policy knows no events."""
    while (now := node.host.statistics()).open_saves or now.open_loads:  # noqa: ASYNC110  # policy has no events
        await trio.sleep(DRAIN_POLL_SECONDS)


def _limits(config: NodeConfig) -> Limits:
    return Limits(
        message_bytes=config.message_bytes,
        first_message_seconds=config.first_message_s,
        idle_seconds=config.idle_s,
        calls_in_flight=config.calls_in_flight,
        connections=config.connections,
    )


@contextlib.asynccontextmanager
async def _devices(config: NodeConfig) -> AsyncIterator[tuple[Pool, CopyEngine]]:
    """The pool and whoever copies to and from it."""
    cuda = _cuda(config)
    nodes = cuda.numa_nodes() if cuda and config.numa_affinity else ()
    async with (
        Pool.open(
            config.pool_bytes,
            hugepages=config.use_hugepages,
            slab_bytes=config.slab_bytes,
            numa_nodes=nodes,
            register=cuda.register_slab if cuda else None,
            unregister=cuda.unregister_slab if cuda else None,
        ) as pool,
        open_engines(pool, cuda=cuda, save_bandwidth=config.save_bandwidth) as engine,
    ):
        yield pool, engine


def _cuda(config: NodeConfig) -> CudaDevices | None:
    """The GPUs to serve.  Without --devices a host that has none serves CPU engines."""
    if config.devices == ():
        return None
    try:
        found = find_devices(config.devices)
    except ConfigError as exc:
        if config.devices is not None:
            raise ConfigError(f"--devices: {exc}") from None
        if Path("/dev/nvidiactl").exists():
            log.warning("cuda.unavailable", detail=f"GPU engines will be refused: {exc}")
        return None
    log.info("cuda.devices", batched_copies=found.driver.batched, uuids=list(found.uuids.values()))
    return found


def _host(config: NodeConfig) -> Host:
    return Host(
        make_token=lambda: LeaseToken(secrets.token_bytes(TOKEN_BYTES)),
        lease_ttl_s=config.lease_ttl_s,
        high_watermark=config.high_watermark,
        low_watermark=config.low_watermark,
        unsealed_ttl_s=config.unsealed_ttl_s,
    )


@contextlib.contextmanager
def _signals_to(stop: Stop) -> Iterator[None]:
    """The first SIGTERM or SIGINT drains, the second one ends the process on the spot.

    Plain handlers: they run between two bytecodes, also when the loop is stuck in a long one.
    """
    token = trio.lowlevel.current_trio_token()
    came = False

    def handle(number: int, _: object) -> None:
        nonlocal came
        if came:
            os._exit(128 + number)
        came = True
        token.run_sync_soon(stop.now)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _announced(config: NodeConfig, sockets: Sockets) -> Iterator[None]:
    """Say where we serve, in the log and in the file that a supervisor may wait for."""
    facts = {
        "addr": [_name_of(listener) for listener in sockets.rpc],
        "http_addr": _name_of(sockets.http),
        "pid": os.getpid(),
        "version": __version__,
    }
    log.info("daemon.serving", memory=_name_of(sockets.memory), **facts)
    path = config.ready_file
    if path is not None:
        partial = _partial(path)
        partial.write_text(json.dumps(facts))
        partial.rename(path)
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _check_ready_file(path: Path) -> None:
    """Remove what a killed daemon left, and see that the folder can be written."""
    try:
        path.unlink(missing_ok=True)
        _partial(path).touch()
    except OSError as exc:
        raise ConfigError(f"--ready-file {path} can't be written: {exc.strerror}") from None


def _allow_many_descriptors() -> None:
    """Connections and handed-over memory cost descriptors; the soft limit is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _only_refusal(group: BaseExceptionGroup[BaseException]) -> ConfigError | None:
    refusals, others = group.split(ConfigError)
    if refusals is None or others is not None:
        return None
    leaf: BaseException = refusals
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf if isinstance(leaf, ConfigError) else None


def _name_of(listener: socket.socket) -> str:
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"@{name[1:].decode()}" if isinstance(name, bytes) else f"unix:{name}"
    return str(Address(name[0], name[1]))


@contextlib.contextmanager
def _bound(address: Address, option: str) -> Iterator[socket.socket]:
    """A listening socket; a Unix one replaces the stale file of a daemon that was killed."""
    with contextlib.ExitStack() as stack:
        try:
            if address.path:
                path = Path(address.path)
                _remove_stale(path)
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.bind(address.path)
                stack.callback(path.unlink, missing_ok=True)
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


def _remove_stale(path: Path) -> None:
    """Delete a socket that nobody answers at; anything else stays, and binding fails."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


@contextlib.contextmanager
def _handover_listener(addresses: Sequence[Address]) -> Iterator[socket.socket]:
    """Beside a unix: address as PATH.memory, else an abstract name, which leaves no file."""
    paths = [address.path for address in addresses if address.path]
    if paths:
        with _bound(Address("", 0, paths[0] + ".memory"), "addr") as sock:
            yield sock
        return
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"\0pegaflow-memory-{os.getpid()}-{secrets.token_hex(8)}")
        sock.listen(LISTEN_BACKLOG)
        yield sock
