"""What the scheduler half tells the worker half, and the connector's configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Literal

import attrs

from pegaflow.client.address import parse_address
from pegaflow.errors import ConfigError

Mode = Literal["read_write", "save_only", "read_only"]
MODES: tuple[Mode, ...] = ("read_write", "save_only", "read_only")

NULL_BLOCK = 0
"""vLLM's placeholder block: its content belongs to nobody."""


@attrs.frozen
class LoadOrder:
    """Block i of ``lease`` goes to block ``block_ids[i]`` of every rank."""

    request_id: str
    lease: bytes
    block_ids: tuple[int, ...]


@attrs.frozen
class SaveOrder:
    """Consecutive blocks of a request; ``parent`` is the hash before the first, or b""."""

    request_id: str
    parent: bytes
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@attrs.frozen
class StepOrders:
    """One engine step's orders to each worker."""

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    revoked: frozenset[str] = frozenset()
    """Preempted requests: their blocks are about to be overwritten."""
    finished: frozenset[str] = frozenset()
    """Finished requests whose blocks are held until the worker reports their saves settled."""
    identity_wanted: bool = False
    """The scheduler does not know the workers' identity yet: report it."""


@attrs.frozen
class ConnectorConfig:
    """``kv_connector_extra_config`` and environment, checked once."""

    address: str
    mode: Mode = "read_write"
    namespace: str = ""
    instance: str = ""
    query_timeout_s: float = 0.020
    hook_budget_s: float = 0.040
    probe_interval_s: float = 0.100
    probe_timeout_s: float = 0.150
    load_timeout_s: float = 5.0
    save_timeout_s: float = 1.0
    attach_timeout_s: float = 1.0
    save_call_bytes: int = 256 << 20
    save_queue_jobs: int = 256
    block_outer_layout: bool = True
    keep_load_failure_policy: bool = False

    @property
    def loads(self) -> bool:
        """May this engine read from the cache?"""
        return self.mode != "save_only"

    @property
    def saves(self) -> bool:
        """May this engine write to the cache?"""
        return self.mode != "read_only"


_MILLISECONDS = {
    "pegaflow.query_timeout_ms": "query_timeout_s",
    "pegaflow.hook_budget_ms": "hook_budget_s",
    "pegaflow.probe_interval_ms": "probe_interval_s",
    "pegaflow.probe_timeout_ms": "probe_timeout_s",
    "pegaflow.load_timeout_ms": "load_timeout_s",
    "pegaflow.save_timeout_ms": "save_timeout_s",
    "pegaflow.attach_timeout_ms": "attach_timeout_s",
}
_OTHER_KEYS = {
    "pegaflow.host",
    "pegaflow.port",
    "pegaflow.mode",
    "pegaflow.namespace",
    "pegaflow.save_call_bytes",
    "pegaflow.keep_load_failure_policy",
}


def read_config(
    extra: Mapping[str, object],
    environ: Mapping[str, str] = os.environ,
    on_unknown: Callable[[str], None] = lambda key: None,
) -> ConnectorConfig:
    """Environment over extra config over defaults.  Raises :exc:`ConfigError` at engine start."""
    for key in sorted(extra):
        if key.startswith("pegaflow.") and key not in _MILLISECONDS.keys() | _OTHER_KEYS:
            on_unknown(key)
    mode = extra.get("pegaflow.mode", "read_write")
    if mode not in MODES:
        raise ConfigError(f"pegaflow.mode is {mode!r}; it must be one of {', '.join(MODES)}")
    config = ConnectorConfig(
        address=_address(extra, environ),
        mode=mode,
        namespace=str(extra.get("pegaflow.namespace", "")),
        instance=environ.get("PEGAFLOW_INSTANCE_ID", ""),
        block_outer_layout=environ.get("PEGAFLOW_CROSS_LAYER_BLOCKS", "1") != "0",
        keep_load_failure_policy=bool(extra.get("pegaflow.keep_load_failure_policy", False)),
    )
    if len(config.namespace.encode()) > 256:
        raise ConfigError("pegaflow.namespace is longer than 256 bytes")
    for key, name in _MILLISECONDS.items():
        if key in extra:
            changed = {name: _number(key, extra[key]) / 1000}
            config = attrs.evolve(config, **changed)  # type: ignore[arg-type]  # all of them floats
    if "pegaflow.save_call_bytes" in extra:
        size = int(_number("pegaflow.save_call_bytes", extra["pegaflow.save_call_bytes"]))
        config = attrs.evolve(config, save_call_bytes=size)
    return config


def _address(extra: Mapping[str, object], environ: Mapping[str, str]) -> str:
    """One endpoint out of host and port; a Unix-domain socket is a host ``unix:/path``."""
    host = environ.get("PEGAFLOW_HOST") or str(extra.get("pegaflow.host", "127.0.0.1"))
    port = environ.get("PEGAFLOW_PORT") or str(extra.get("pegaflow.port", "50055"))
    text = host if host.startswith("unix:") else f"{host.rstrip('/')}:{port}"
    parse_address(text)
    return text


def _number(key: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"{key} is {value!r}; it must be a positive number")
    return number
