"""Does this host allow what a daemon with these settings needs?  Each finding names its fix.

Everything is read below a root folder and out of :class:`Limits`, so that tests can pretend a host.
Nothing is started, pinned or changed.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import attrs

from pegaflow.config import NodeConfig
from pegaflow.engine.cuda import find_devices
from pegaflow.engine.pinned import check_hugepages, check_memory
from pegaflow.errors import ConfigError
from pegaflow.model.units import format_size

Verdict = Literal["ok", "warning", "problem"]

OPEN_FILES_MIN = 4096
SHM_BYTES_MIN = 1 << 30
BATCHED_SINCE = 12080
"""CUDA 12.8: one call of the driver for a batch of copies."""
UNLIMITED = resource.RLIM_INFINITY


@attrs.frozen
class Finding:
    """One thing that was looked at."""

    what: str
    verdict: Verdict
    detail: str
    fix: str = ""


@attrs.frozen
class Gpu:
    """What the doctor wants to know of a GPU."""

    index: int
    uuid: str
    pci: str
    """Domain:bus:device.function, lower case, as below /sys/bus/pci/devices."""


@attrs.frozen
class Cuda:
    """The driver's version (12080 is 12.8) and the GPUs, or why there are none."""

    version: int = 0
    batched: bool = False
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""


@attrs.frozen
class Limits:
    """Of this process."""

    memlock_bytes: int
    open_files: int
    processors: int
    assertions: bool

    @classmethod
    def of_this_process(cls) -> Limits:
        """Hard limits: the daemon raises its soft ones."""
        return cls(
            resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],
            resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            len(os.sched_getaffinity(0)),
            __debug__,
        )


def look_for_cuda(config: NodeConfig) -> Cuda:
    """Asks the driver; takes a second where there is one."""
    try:
        found = find_devices(config.devices)
    except ConfigError as exc:
        return Cuda(trouble=str(exc))
    runtime = found.cupy.cuda.runtime
    gpus = tuple(
        Gpu(index, uuid, str(runtime.deviceGetPCIBusId(index)).lower())
        for index, uuid in found.uuids.items()
    )
    return Cuda(int(runtime.driverGetVersion()), found.driver.batched, gpus)


def examine(
    config: NodeConfig, limits: Limits, cuda: Cuda, root: Path = Path("/")
) -> list[Finding]:
    """All findings, in reading order."""
    return [
        *_process(limits),
        *_memory(config, root),
        *_pages(config, root),
        *_memlock(config, limits),
        *_shared_memory(root),
        *_cuda(config, cuda, root),
        *_numa(cuda, root),
    ]


def _process(limits: Limits) -> Iterator[Finding]:
    if limits.assertions:
        yield Finding("python", "ok", "assertions are on")
    else:
        fix = "unset PYTHONOPTIMIZE and start without -O"
        yield Finding("python", "problem", "the daemon does not run without assertions", fix)
    if limits.open_files == UNLIMITED or limits.open_files >= OPEN_FILES_MIN:
        yield Finding("open files", "ok", f"limit {_limit(limits.open_files)}")
    else:
        fix = f"raise it: LimitNOFILE={OPEN_FILES_MIN} in the unit, or ulimit -Hn {OPEN_FILES_MIN}"
        detail = f"limit {limits.open_files}; each connection and each region of memory takes one"
        yield Finding("open files", "warning", detail, fix)
    if limits.processors >= 2:
        yield Finding("processors", "ok", f"{limits.processors} usable")
    else:
        fix = "give it two: calls are answered on one while copies are queued on the other"
        yield Finding("processors", "warning", "only one is usable", fix)


def _memory(config: NodeConfig, root: Path) -> Iterator[Finding]:
    try:
        check_memory(config.pool_bytes, config.memory_reserve_bytes, root)
    except ConfigError as exc:
        fix = "a smaller --pool-size, or a larger limit of the container"
        yield Finding("memory", "problem", str(exc), fix)
    else:
        yield Finding("memory", "ok", f"a pool of {format_size(config.pool_bytes)} fits")


def _pages(config: NodeConfig, root: Path) -> Iterator[Finding]:
    if config.use_hugepages:
        try:
            check_hugepages(config.pool_bytes, root / "proc/meminfo")
        except ConfigError as exc:
            fix = "sysctl -w vm.nr_hugepages=N as the text says, early after boot"
            yield Finding("huge pages", "problem", str(exc), fix)
        else:
            yield Finding("huge pages", "ok", "enough of 2 MiB are reserved and free")
        return
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in text:
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        detail = "transparent huge pages are off: the pool is pinned and copied page by page"
        yield Finding("huge pages", "warning", detail, fix)
    else:
        yield Finding("huge pages", "ok", f"transparent huge pages: {text or 'unknown'}")


def _memlock(config: NodeConfig, limits: Limits) -> Iterator[Finding]:
    if limits.memlock_bytes == UNLIMITED or limits.memlock_bytes >= config.pool_bytes:
        yield Finding("memlock", "ok", f"limit {_limit(limits.memlock_bytes)}")
        return
    detail = (
        f"limit {_limit(limits.memlock_bytes)}, below the pool's {format_size(config.pool_bytes)}: "
        "CUDA pins without it, an RDMA card does not"
    )
    fix = "LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 for a container"
    yield Finding("memlock", "warning", detail, fix)


def _shared_memory(root: Path) -> Iterator[Finding]:
    try:
        about = os.statvfs(root / "dev/shm")
    except OSError:
        fix = "mount a tmpfs there; the daemon itself does not need it"
        yield Finding("/dev/shm", "warning", "absent: CPU engines put their KV memory there", fix)
        return
    size = about.f_blocks * about.f_frsize
    if size >= SHM_BYTES_MIN:
        yield Finding("/dev/shm", "ok", format_size(size))
    else:
        fix = "--shm-size for a container, or remount it larger"
        detail = f"{format_size(size)}: CPU engines put their KV memory there"
        yield Finding("/dev/shm", "warning", detail, fix)


def _cuda(config: NodeConfig, cuda: Cuda, root: Path) -> Iterator[Finding]:
    if config.devices == ():
        yield Finding("cuda", "ok", "not wanted: --devices none")
        return
    if cuda.trouble:
        wanted = config.devices is not None or (root / "dev/nvidiactl").exists()
        fix = (
            "install pegaflow[cuda12] or pegaflow[cuda13] to match the driver; in a container "
            "run with the NVIDIA runtime and the same GPUs as the engine"
        )
        detail = cuda.trouble if wanted else "no GPU here: CPU engines only"
        yield Finding("cuda", "problem" if wanted else "ok", detail, fix if wanted else "")
        return
    version = f"driver for CUDA {cuda.version // 1000}.{cuda.version % 1000 // 10}"
    if cuda.batched and cuda.version >= BATCHED_SINCE:
        yield Finding("cuda", "ok", f"{version}, {len(cuda.gpus)} GPUs")
    else:
        detail = f"{version} has no batched copies: small ranges are queued one by one"
        yield Finding("cuda", "warning", detail, "a driver for CUDA 12.8 or later")
    for gpu in cuda.gpus:
        yield from _link(gpu, root)


def _link(gpu: Gpu, root: Path) -> Iterator[Finding]:
    folder = root / "sys/bus/pci/devices" / gpu.pci
    now, most = _read(folder / "current_link_width"), _read(folder / "max_link_width")
    name = f"GPU {gpu.index}"
    if now and most and now != most:
        fix = "reseat the card or look at the slot and riser: copies run at that share of the rate"
        yield Finding(name, "warning", f"{gpu.uuid}: PCIe x{now} of x{most}", fix)
    else:
        yield Finding(name, "ok", f"{gpu.uuid} at {gpu.pci}, PCIe x{now or '?'}")


def _numa(cuda: Cuda, root: Path) -> Iterator[Finding]:
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        yield Finding("numa", "ok", "one node")
        return
    homes = {_read(root / "sys/bus/pci/devices" / gpu.pci / "numa_node") for gpu in cuda.gpus}
    if "-1" in homes:
        fix = "let the hypervisor or the firmware tell the GPUs' nodes"
        detail = f"{len(nodes)} nodes, but a GPU does not say which is its own"
        yield Finding("numa", "warning", detail, fix)
    else:
        where = ", ".join(sorted(homes)) or "none"
        yield Finding("numa", "ok", f"{len(nodes)} nodes; GPUs on {where}")


def summary(findings: Sequence[Finding]) -> str:
    """For the last line."""
    problems = sum(found.verdict == "problem" for found in findings)
    warnings = sum(found.verdict == "warning" for found in findings)
    return f"problems: {problems}, warnings: {warnings}, looked at: {len(findings)}"


def _limit(value: int) -> str:
    return "unlimited" if value == UNLIMITED else str(value)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
