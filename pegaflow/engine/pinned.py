"""The host memory blocks live in: reserved at once, made usable slab by slab."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import attrs
import numpy as np
import trio

from pegaflow.errors import ConfigError, DeviceLost
from pegaflow.model.units import format_size

PAGE_BYTES: Final = mmap.PAGESIZE
HUGE_PAGE_BYTES: Final = 2 << 20
FIRST_SLAB_BYTES: Final = 64 << 20
SLAB_BYTES: Final = 1 << 30
_STRIPE_BYTES: Final = 64 << 20  # one thread's turn; also how long a shutdown waits for it

_MAP_NORESERVE: Final = 0x4000
_MAP_HUGETLB: Final = 0x40000
_MADV_DONTFORK: Final = 10
_MADV_HUGEPAGE: Final = 14
_MADV_DONTDUMP: Final = 16
_MADV_POPULATE_WRITE: Final = 23
_MPOL_PREFERRED, _MPOL_INTERLEAVE = 1, 3
_MBIND: Final = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_NODES_MAX: Final = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int

Registrar = Callable[[int, int], None]
"""Called with the address and bytes of a slab: pin it for a device, or let go of it."""


@attrs.define(eq=False)
class Pool:
    """Anonymous private memory of one process: nothing of it survives the process.

    ``view`` covers the whole range from the start, but only slabs that :meth:`grow` has
    announced are backed by memory (and pinned).
    """

    size_bytes: int
    view: memoryview
    address: int
    threads: int
    hugepages: bool
    seams: tuple[int, ...]
    """Where slabs begin, rising: each is registered with devices on its own."""
    numa_nodes: tuple[int, ...]
    """Where its memory comes from first; () for no preference."""
    populated_bytes: int = attrs.field(init=False, default=0)
    _register: Registrar | None
    _unregister: Registrar | None
    _registered: list[tuple[int, int]] = attrs.field(init=False, factory=list)
    _send: trio.MemorySendChannel[tuple[int, int]]
    _receive: trio.MemoryReceiveChannel[tuple[int, int]]

    @staticmethod
    @asynccontextmanager
    async def open(
        size_bytes: int,
        *,
        hugepages: bool = False,
        threads: int | None = None,
        first_slab_bytes: int = FIRST_SLAB_BYTES,
        slab_bytes: int = SLAB_BYTES,
        numa_nodes: Sequence[int] = (),
        register: Registrar | None = None,
        unregister: Registrar | None = None,
    ) -> AsyncIterator[Pool]:
        """Reserve ``size_bytes`` (rounded up to a page) and populate them in the background.

        Memory comes from ``numa_nodes`` in turn while they have some, from others after that.
        Takes milliseconds whatever the size.  ``register`` and ``unregister`` run on worker
        threads; the block ends with every slab let go of.  Raises :exc:`ConfigError` when the
        range, or the huge pages for it, can't be had.
        """
        page_bytes = HUGE_PAGE_BYTES if hugepages else PAGE_BYTES
        size_bytes = -(-size_bytes // page_bytes) * page_bytes
        slabs = list(plan_slabs(size_bytes, first_slab_bytes, slab_bytes))
        whole = _reserve(size_bytes, hugepages=hugepages)
        address = np.frombuffer(whole, np.uint8).ctypes.data
        on_nodes = prefer_nodes(address, whole.nbytes, numa_nodes)
        skip = -address % HUGE_PAGE_BYTES  # transparent huge pages start at such addresses
        pool = Pool(
            size_bytes,
            whole[skip : skip + size_bytes],  # unmapped when the last view of it is dropped
            address + skip,
            threads or max(1, len(os.sched_getaffinity(0)) - 1),
            hugepages,
            tuple(offset for offset, _ in slabs),
            on_nodes,
            register,
            unregister,
            *trio.open_memory_channel[tuple[int, int]](len(slabs)),
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pool._populate, slabs)
                yield pool
                nursery.cancel_scope.cancel()
        finally:
            pool._receive.close()
            # Shielded inside; how long it takes is the driver's affair, and it must be finished.
            await pool._let_go()  # noqa: ASYNC102 - see above

    def grow(self) -> trio.MemoryReceiveChannel[tuple[int, int]]:
        """Iterate with ``async for``: (offset, bytes) of each slab as it becomes usable.

        Ends after the last.  One consumer; nothing is lost by coming late.
        """
        return self._receive

    async def _populate(self, slabs: list[tuple[int, int]]) -> None:
        limiter = trio.CapacityLimiter(self.threads)
        with self._send:
            for offset, size_bytes in slabs:
                await self._back(offset, size_bytes, limiter)
                if self._register is not None:
                    await trio.to_thread.run_sync(self._pin, self.address + offset, size_bytes)
                self.populated_bytes += size_bytes
                self._send.send_nowait((offset, size_bytes))

    async def _back(self, offset: int, size_bytes: int, limiter: trio.CapacityLimiter) -> None:
        """Give the slab memory, stripe by stripe, on as many threads as ``limiter`` allows."""
        async with trio.open_nursery() as nursery:
            for begin in range(offset, offset + size_bytes, _STRIPE_BYTES):
                await limiter.acquire_on_behalf_of(begin)
                length = min(_STRIPE_BYTES, offset + size_bytes - begin)
                nursery.start_soon(self._stripe, begin, length, limiter)

    async def _stripe(self, begin: int, length: int, limiter: trio.CapacityLimiter) -> None:
        try:
            await trio.to_thread.run_sync(
                populate, self.address + begin, length, limiter=trio.CapacityLimiter(1)
            )
        finally:
            limiter.release_on_behalf_of(begin)

    def _pin(self, address: int, size_bytes: int) -> None:
        assert self._register is not None
        self._register(address, size_bytes)
        self._registered.append((address, size_bytes))

    async def _let_go(self) -> None:
        if self._unregister is not None and self._registered:
            with trio.CancelScope(shield=True):  # memory must not be unmapped while it is pinned
                for address, size_bytes in self._registered:
                    await trio.to_thread.run_sync(self._unregister, address, size_bytes)


def prefer_nodes(address: int, size_bytes: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """Ask the kernel for memory of these NUMA nodes; the nodes, or () where it says no.

    A wish: a node that is full sends us to another one, and nothing fails.
    """
    number = _MBIND.get(os.uname().machine)
    wanted = sorted({node for node in nodes if 0 <= node < _NODES_MAX})
    if not wanted or number is None:
        return ()
    mask = sum(1 << node for node in wanted).to_bytes(_NODES_MAX // 8, "little")
    mode = _MPOL_PREFERRED if len(wanted) == 1 else _MPOL_INTERLEAVE
    # 64-bit arguments in full: ctypes would pass them as C ints.
    arguments = (ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(size_bytes))
    more = (ctypes.c_long(mode), mask, ctypes.c_ulong(_NODES_MAX + 1), ctypes.c_long(0))
    return () if _libc.syscall(*arguments, *more) else tuple(wanted)


def plan_slabs(
    size_bytes: int, first_slab_bytes: int = FIRST_SLAB_BYTES, slab_bytes: int = SLAB_BYTES
) -> Iterator[tuple[int, int]]:
    """(offset, bytes): a small one to be useful at once, growing fourfold to ``slab_bytes``."""
    offset, step = 0, first_slab_bytes
    while offset < size_bytes:
        step_bytes = min(step, slab_bytes, size_bytes - offset)
        yield offset, step_bytes
        offset += step_bytes
        step *= 4


def populate(address: int, size_bytes: int) -> None:
    """Back a range of anonymous memory with pages.  Blocks, without the GIL.

    Raises :exc:`DeviceLost` when the kernel has no memory for it.
    """
    _libc.madvise(address, size_bytes, _MADV_HUGEPAGE)  # a wish: kernels without it say no
    if not _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE):
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise DeviceLost(
            f"{format_size(size_bytes)} of host memory can't be had: {os.strerror(code)}"
        )
    touch(address, size_bytes)  # before Linux 5.14


def touch(address: int, size_bytes: int) -> None:
    """Write to each page; NumPy releases the GIL meanwhile.  What was there is overwritten."""
    pages = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
    pages[::PAGE_BYTES] = 0


def check_memory(total_bytes: int, reserve_bytes: int, root: Path = Path("/")) -> None:
    """Raise :exc:`ConfigError` unless pool and reserve fit what this process may still use.

    ``reserve_bytes`` is what the daemon needs besides the pool.  ``root`` holds ``proc`` and
    ``sys``.  Every cgroup above us counts, as they are limits all of them.
    """
    needed = total_bytes + reserve_bytes
    sum_text = (
        f"pool {format_size(total_bytes)} + reserve {format_size(reserve_bytes)}"
        f" = {format_size(needed)} ({needed} bytes)"
    )
    for name, limit_bytes, free_bytes in _limits(root):
        if needed > free_bytes:
            raise ConfigError(
                f"{sum_text} does not fit: {name} is {format_size(limit_bytes)} ({limit_bytes} "
                f"bytes) and leaves {format_size(free_bytes)}; make --pool-size smaller"
            )


def _limits(root: Path) -> Iterator[tuple[str, int, int]]:
    """(name, limit, free) in bytes, of each limit that there is."""
    yield from _cgroup_limits(root)
    available = _fields(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        yield "MemAvailable", available << 10, available << 10


def _cgroup_limits(root: Path) -> Iterator[tuple[str, int, int]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        yield from _cgroup_chain(top, path.strip("/"), names)


def _cgroup_chain(
    top: Path, path: str, names: tuple[str, str, str]
) -> Iterator[tuple[str, int, int]]:
    """Limits from our group up to the mount.  In a container the path may not exist below it."""
    limit_name, usage_name, cache_name = names
    group = top / path
    for folder in (group, *group.parents):
        limit = _number(folder / limit_name)
        usage = _number(folder / usage_name)
        if limit is not None and usage is not None and limit < 1 << 60:
            cache = _fields(folder / "memory.stat").get(cache_name, 0)
            yield str(folder / limit_name), limit, max(0, limit - usage + cache)
        if folder == top:
            return


def _number(path: Path) -> int | None:
    """None for a file that is absent or says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """``Name: 12 kB`` and ``name 12`` lines as numbers."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = [line.replace(":", " ").split() for line in lines]
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}


def _reserve(size_bytes: int, *, hugepages: bool) -> memoryview:
    """Address space, and for huge pages their reservation; 2 MiB more than asked, for alignment."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if hugepages:
        check_hugepages(size_bytes + HUGE_PAGE_BYTES)
    flags |= _MAP_HUGETLB if hugepages else _MAP_NORESERVE
    try:
        area = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=flags)
    except OSError as error:
        raise ConfigError(
            f"{format_size(size_bytes)} of address space can't be reserved: {error.strerror}"
        ) from error
    area.madvise(_MADV_DONTFORK)  # a forked child must not make pinned pages copy-on-write
    area.madvise(_MADV_DONTDUMP)  # a core dump of the daemon is about its state, not about KV
    return memoryview(area)


def check_hugepages(size_bytes: int, meminfo: Path = Path("/proc/meminfo")) -> None:
    """Raise :exc:`ConfigError` unless so much is reserved in pages of 2 MiB, and free."""
    fields = _fields(meminfo)
    page_bytes = fields.get("Hugepagesize", 0) << 10
    free_bytes = (fields.get("HugePages_Free", 0) - fields.get("HugePages_Rsvd", 0)) * page_bytes
    if page_bytes != HUGE_PAGE_BYTES:
        raise ConfigError("--use-hugepages needs a default huge page size of 2 MiB")
    if free_bytes < size_bytes:
        raise ConfigError(
            f"--use-hugepages needs {format_size(size_bytes)}, but huge pages of "
            f"{format_size(free_bytes)} are free: set vm.nr_hugepages to at least "
            f"{-(-size_bytes // page_bytes)}, or leave the flag out"
        )
