"""Memory that the daemon can reach: a memfd with a NumPy view, and its hand-over."""

from __future__ import annotations

import array
import contextlib
import ctypes
import mmap
import os
import secrets
import socket
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pegaflow.errors import BadRequest, DeadlineExceeded, DeviceTrouble, PeerGone
from pegaflow.model.layout import GroupLayout, Run

TOKEN_BYTES = 16
ACCEPTED = b"\x01"
FDS_MAX = 64


class SharedMemory:
    """Anonymous memory behind a file descriptor: it has no name, so nothing is left behind."""

    def __init__(self, size_bytes: int, name: str = "pegaflow-kv") -> None:
        """Allocate; pages are touched when they are first written."""
        self.size_bytes = size_bytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size_bytes)
        self._map = mmap.mmap(self.fd, size_bytes)
        self.view: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        """All bytes, writable; valid until :meth:`close`."""

    def close(self) -> None:
        """Drop our reference; the daemon's own keeps the bytes while it copies."""
        self.view = np.zeros(0, np.uint8)
        with contextlib.suppress(BufferError):  # a view that the caller still holds keeps it
            self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def hand_over(address: str, fds: Sequence[int], timeout_s: float) -> bytes:
    """Pass file descriptors to the daemon; returns the token that names them in a registration.

    ``address`` is what ``open`` answered: a path, or '@' and a name in the abstract namespace.  The
    caller keeps its own descriptors.  Raises :exc:`PeerGone` or :exc:`DeadlineExceeded`.
    """
    if not 0 < len(fds) <= FDS_MAX:
        raise BadRequest(f"{len(fds)} descriptors in one hand-over; 1..{FDS_MAX} are possible")
    token = secrets.token_bytes(TOKEN_BYTES)
    name = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(timeout_s)
            sock.connect(name)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]
            sock.sendmsg([token], rights)
            answer = sock.recv(1)
    except TimeoutError:
        raise DeadlineExceeded(f"no memory hand-over within {timeout_s:g} s") from None
    except OSError as exc:
        raise PeerGone(f"memory hand-over to {address!r} failed: {exc.strerror or exc}") from None
    if answer != ACCEPTED:
        raise PeerGone("the daemon did not take the memory over")
    return token


def cuda_ipc_handle(address: int) -> tuple[bytes, int]:
    """(64 bytes, how far behind the handle's base ``address`` is), for memory of this process.

    Needs a current CUDA context.  The memory must outlive the registration.  Raises
    :exc:`DeviceTrouble` for memory that can't be shared: of a pool, or of expandable segments.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    status = driver.cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    handle = (ctypes.c_char * 64)()
    status = status or driver.cuIpcGetMemHandle(ctypes.byref(handle), base)
    if status:
        raise DeviceTrouble(
            f"no CUDA IPC handle for the KV memory (driver error {status}); "
            "expandable segments of the allocator make it impossible"
        )
    return bytes(handle), address - base.value


def layout_of(
    views: Sequence[NDArray[np.generic]],
    *,
    region: int,
    base_address: int,
    block_axis: int = 0,
    group: int = 0,
) -> GroupLayout:
    """The layout of one rank from its tensors, each shaped (.., blocks, ..) over one allocation.

    ``views[i]`` is one layer; ``base_address`` is where the region begins; ``block_axis`` is the
    axis that counts blocks.  The bytes of a block are cut into maximal contiguous runs, in memory
    order of the remaining axes.
    """
    runs: list[Run] = []
    count = views[0].shape[block_axis]
    for view in views:
        if view.shape[block_axis] != count:
            raise BadRequest("layers with different block counts need groups of their own")
        one = np.moveaxis(view, block_axis, 0)
        base = one.__array_interface__["data"][0] - base_address
        for offset, length in _contiguous_runs(one[0]):
            runs.append(Run(region, base + offset, one.strides[0], length))
    return GroupLayout(group, count, tuple(runs)).merged()


def _contiguous_runs(block: NDArray[np.generic]) -> list[tuple[int, int]]:
    """(offset, length) of each contiguous piece of one block, in C order of its axes."""
    length, axis = block.itemsize, block.ndim
    while axis and block.strides[axis - 1] == length:
        axis -= 1
        length *= block.shape[axis]
    offsets = np.zeros(1, np.int64)
    for size, stride in zip(block.shape[:axis], block.strides[:axis], strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
    return [(int(offset), length) for offset in offsets]
