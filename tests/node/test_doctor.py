"""The doctor on pretended hosts: it names the cause and the fix, and never cries wolf."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from pegaflow.config import NodeConfig, resolve
from pegaflow.node.doctor import UNLIMITED, Cuda, Finding, Gpu, Limits, examine, summary

GOOD = Limits(UNLIMITED, 1 << 20, 16, True)
GPU = Gpu(0, "GPU-1234", "0000:1b:00.0")
CUDA = Cuda(13000, True, (GPU,))


def config(**flags: str) -> NodeConfig:
    given = {"pool-size": "1gb", **{name.replace("_", "-"): text for name, text in flags.items()}}
    return resolve(given, {}, None).config


def host(root: Path, *, thp: str = "always [madvise] never", huge_free: int = 0) -> Path:
    """One NUMA node, a GPU with its full link, plenty of memory."""
    files = {
        "proc/meminfo": f"MemAvailable: {64 << 20} kB\nHugepagesize: 2048 kB\n"
        f"HugePages_Free: {huge_free}\nHugePages_Rsvd: 0\n",
        "proc/self/cgroup": "0::/\n",
        "sys/kernel/mm/transparent_hugepage/enabled": thp + "\n",
        f"sys/bus/pci/devices/{GPU.pci}/current_link_width": "16\n",
        f"sys/bus/pci/devices/{GPU.pci}/max_link_width": "16\n",
        f"sys/bus/pci/devices/{GPU.pci}/numa_node": "0\n",
        "sys/devices/system/node/node0/meminfo": "",
        "dev/nvidiactl": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "dev/shm").mkdir(exist_ok=True)
    return root


def of(findings: list[Finding], what: str) -> Finding:
    (found,) = [each for each in findings if each.what == what]
    return found


def test_a_good_host_has_no_finding(tmp_path: Path) -> None:
    findings = examine(config(), GOOD, CUDA, host(tmp_path))
    assert [f for f in findings if f.verdict != "ok" and f.what != "/dev/shm"] == []
    assert not any(f.fix for f in findings if f.verdict == "ok")


@pytest.mark.parametrize(
    ("limits", "what", "verdict", "says", "fix"),
    [
        (attrs.evolve(GOOD, memlock_bytes=64 << 10), "memlock", "warning", "RDMA", "LimitMEMLOCK="),
        (attrs.evolve(GOOD, open_files=256), "open files", "warning", "256", "LimitNOFILE"),
        (attrs.evolve(GOOD, processors=1), "processors", "warning", "one", "two"),
        (attrs.evolve(GOOD, assertions=False), "python", "problem", "asser", "PYTHONOPTIMIZE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_limits_of_the_process(
    limits: Limits, what: str, verdict: str, says: str, fix: str, tmp_path: Path
) -> None:
    findings = examine(config(), limits, CUDA, host(tmp_path))
    found = of(findings, what)
    assert found.verdict == verdict
    assert says in found.detail
    assert fix in found.fix


def test_a_pool_that_does_not_fit(tmp_path: Path) -> None:
    found = of(examine(config(pool_size="100tb"), GOOD, CUDA, host(tmp_path)), "memory")
    assert found.verdict == "problem"
    assert "MemAvailable is 64gb" in found.detail


def test_huge_pages_that_are_not_reserved_and_those_that_are(tmp_path: Path) -> None:
    wanted = config(use_hugepages="true")
    found = of(examine(wanted, GOOD, CUDA, host(tmp_path)), "huge pages")
    assert found.verdict == "problem"
    assert "vm.nr_hugepages" in found.detail + found.fix
    enough = host(tmp_path, huge_free=1024)
    assert of(examine(wanted, GOOD, CUDA, enough), "huge pages").verdict == "ok"


def test_transparent_huge_pages_that_are_off(tmp_path: Path) -> None:
    found = of(
        examine(config(), GOOD, CUDA, host(tmp_path, thp="always madvise [never]")), "huge pages"
    )
    assert found.verdict == "warning"
    assert "transparent_hugepage" in found.fix


def test_a_gpu_without_cupy_is_a_problem_and_a_host_without_gpu_is_none(tmp_path: Path) -> None:
    trouble = Cuda(trouble="CUDA needs CuPy")
    found = of(examine(config(), GOOD, trouble, host(tmp_path)), "cuda")
    assert found.verdict == "problem"
    assert "pegaflow[cuda12]" in found.fix
    (tmp_path / "dev/nvidiactl").unlink()
    assert of(examine(config(), GOOD, trouble, tmp_path), "cuda").verdict == "ok"
    named = of(examine(config(devices="0"), GOOD, trouble, tmp_path), "cuda")
    assert named.verdict == "problem"
    assert of(examine(config(devices="none"), GOOD, trouble, tmp_path), "cuda").verdict == "ok"


def test_an_old_driver_and_half_a_link(tmp_path: Path) -> None:
    root = host(tmp_path)
    (root / f"sys/bus/pci/devices/{GPU.pci}/current_link_width").write_text("8\n")
    findings = examine(config(), GOOD, Cuda(12040, False, (GPU,)), root)
    assert "12.4" in of(findings, "cuda").detail
    assert "12.8" in of(findings, "cuda").fix
    assert of(findings, "GPU 0").detail.endswith("PCIe x8 of x16")


def test_numa_nodes(tmp_path: Path) -> None:
    root = host(tmp_path)
    (root / "sys/devices/system/node/node1").mkdir()
    assert of(examine(config(), GOOD, CUDA, root), "numa").detail == "2 nodes; GPUs on 0"
    (root / f"sys/bus/pci/devices/{GPU.pci}/numa_node").write_text("-1\n")
    assert of(examine(config(), GOOD, CUDA, root), "numa").verdict == "warning"


def test_the_command() -> None:
    command = [sys.executable, "-P", "-m", "pegaflow", "doctor", "--devices", "none"]
    small = [*command, "--pool-size", "64mb", "--json"]
    ended = subprocess.run(small, capture_output=True, text=True, check=False)
    findings = json.loads(ended.stdout)
    assert ended.returncode == (1 if any(f["verdict"] == "problem" for f in findings) else 0)
    assert {f["what"] for f in findings} >= {"memory", "huge pages", "memlock", "numa", "cuda"}
    large = [*command, "--pool-size", "100tb"]
    ended = subprocess.run(large, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "problem  memory" in ended.stdout
    assert "problems: 1" in ended.stdout
    assert "make --pool-size smaller" in ended.stdout


def test_the_summary_of_nothing() -> None:
    assert summary([]) == "problems: 0, warnings: 0, looked at: 0"
