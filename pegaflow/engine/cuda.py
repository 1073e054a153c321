# NOTE to the author of this file: the lead overwrote your 18 KB version by mistake at 23:15. Sorry.
# Please write it again; node/daemon.py adapts to whatever it offers (now: find_devices(indices) -> None or an
# object with register_slab(address, size) and open(pool_view, pool_address) -> async context manager of CopyEngine).
"""CUDA (being written)."""

from __future__ import annotations

from pegaflow.errors import ConfigError


class CudaDevices:
    pass


def find_devices(indices):
    if indices:
        raise ConfigError("no CUDA here")
    return None


def usable(devices: object) -> bool:
    return False


def register_host_memory(address: int, size_bytes: int) -> None:
    raise AssertionError


unregister_host_memory = register_host_memory


def open_cuda_engine(pool, queue_capacity):
    raise ConfigError("no CUDA")
