"""The pool: grows slab by slab, never beyond what the machine allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio

from pegaflow.engine.pinned import Pool, check_memory, plan_slabs
from pegaflow.errors import ConfigError, DeviceLost

MIB = 1 << 20


def pretended(root: Path, *, limit: str, usage: int, cache: int = 0, version: int = 2) -> Path:
    """A root with one cgroup two levels deep; the limit is on the upper one."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemAvailable: {64 << 20} kB\n")
    if version == 2:
        (root / "proc/self/cgroup").write_text("0::/pod/engine\n")
        group, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
    else:
        (root / "proc/self/cgroup").write_text("5:cpu:/x\n4:memory:/pod/engine\n")
        group = root / "sys/fs/cgroup/memory"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for path, value in ((group / "pod", limit), (group / "pod/engine", "max")):
        path.mkdir(parents=True, exist_ok=True)
        (path / names[0]).write_text(value + "\n")
        (path / names[1]).write_text(f"{usage}\n")
        (path / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\n")
    return root


@pytest.mark.parametrize("version", [1, 2])
def test_t23_a_cgroup_above_ours_limits_the_pool(version: int, tmp_path: Path) -> None:
    limit = str(1 << 30)
    root = pretended(tmp_path, limit=limit, usage=300 * MIB, cache=100 * MIB, version=version)
    check_memory(700 * MIB, 100 * MIB, root)  # what is only cached can be had
    with pytest.raises(ConfigError) as caught:
        check_memory(800 * MIB, 100 * MIB, root)
    text = str(caught.value)
    assert "pool 800mb + reserve 100mb = 900mb" in text
    assert f"({1 << 30} bytes) and leaves 824mb" in text
    assert "pod" in text


def test_t23_without_any_limit_the_machine_counts(tmp_path: Path) -> None:
    root = pretended(tmp_path, limit="max", usage=0)
    check_memory(63 << 30, 1 << 30, root)
    with pytest.raises(ConfigError, match="MemAvailable is 64gb"):
        check_memory(64 << 30, 1 << 30, root)


@pytest.mark.parametrize("size", [1, MIB, 64 * MIB, 100 * MIB + 4096, 5 << 30])
def test_slabs_cover_the_pool_once_in_order(size: int) -> None:
    at = 0
    for offset, size_bytes in plan_slabs(size):
        assert offset == at
        assert 0 < size_bytes <= 1 << 30
        at += size_bytes
    assert at == size


async def test_only_what_was_announced_is_backed_and_each_slab_is_pinned_once() -> None:
    pinned: list[tuple[int, int]] = []
    released: list[tuple[int, int]] = []
    async with Pool.open(
        20 * MIB,
        first_slab_bytes=4 * MIB,
        slab_bytes=8 * MIB,
        register=lambda *slab: pinned.append(slab),
        unregister=lambda *slab: released.append(slab),
    ) as pool:
        announced = [slab async for slab in pool.grow()]
        assert announced == [(0, 4 * MIB), (4 * MIB, 8 * MIB), (12 * MIB, 8 * MIB)]
        assert pinned == [(pool.address + offset, size) for offset, size in announced]
        assert not released
        view = np.frombuffer(pool.view, np.uint8)
        assert not view.any()
        del view
    assert released == pinned


async def test_a_numa_node_is_preferred_and_one_that_is_not_there_is_no_failure() -> None:
    async with Pool.open(4 * MIB, numa_nodes=(0,)) as pool:
        async for _ in pool.grow():
            pass
        if pool.numa_nodes:  # a kernel without NUMA has no such policy
            assert policy_of_mapping(pool.address).startswith("prefer")
    async with Pool.open(4 * MIB, numa_nodes=(1023,)) as pool:
        async for _ in pool.grow():
            pass
        assert pool.populated_bytes == 4 * MIB


async def test_leaving_early_lets_go_of_what_was_pinned() -> None:
    pinned: list[tuple[int, int]] = []
    with trio.CancelScope() as scope:
        async with Pool.open(
            64 * MIB,
            first_slab_bytes=4 * MIB,
            slab_bytes=4 * MIB,
            register=lambda *slab: pinned.append(slab),
            unregister=lambda *slab: pinned.remove(slab),
        ) as pool:
            assert await anext(aiter(pool.grow())) == (0, 4 * MIB)
            scope.cancel()
            await trio.lowlevel.checkpoint()
    assert not pinned


async def test_memory_that_can_not_be_pinned_ends_the_pool() -> None:
    def refuse(address: int, size_bytes: int) -> None:
        raise DeviceLost("the driver refuses")

    with pytest.RaisesGroup(pytest.RaisesExc(DeviceLost), flatten_subgroups=True):
        async with Pool.open(4 * MIB, register=refuse):
            await trio.sleep(5)


async def test_neither_a_forked_child_nor_a_core_dump_gets_the_pool() -> None:
    """A child that shared pinned pages would make them copy-on-write under the device."""
    async with Pool.open(4 * MIB) as pool:
        assert {"dc", "dd"} <= flags_of_mapping(pool.address)  # don't copy, don't dump


def flags_of_mapping(address: int) -> set[str]:
    """The kernel's two-letter words about the mapping around an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError(f"{address:x} is not mapped")


def policy_of_mapping(address: int) -> str:
    """The kernel's word for where a mapping's memory comes from."""
    lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    return max((int(words[0], 16), words[1]) for words in lines if int(words[0], 16) <= address)[1]
