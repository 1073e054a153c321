"""The daemon as a process: signals, kill -9, restarts, and what its clients see of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from pegaflow.client.blocking import BlockingNode
from pegaflow.client.mock import MockRank, chained_hashes
from pegaflow.errors import DeadlineExceeded, LeaseExpired, PeerGone, PegaflowError
from pegaflow.model.keys import BlockHash
from pegaflow.testing.daemon import (
    Daemon,
    free_address,
    running_daemon,
    start_daemon,
    wait_until_ready,
)

pytestmark = pytest.mark.slow

HASHES = chained_hashes(range(16 * 16), 16)
IDS = list(range(len(HASHES)))


def saved(daemon: Daemon, *, blocks: int = 64, layer_bytes: int = 4096) -> MockRank:
    """A rank that has saved all of HASHES; the caller closes it."""
    rank = MockRank.connect(daemon.address, blocks=blocks, layer_bytes=layer_bytes)
    rank.compute(HASHES, IDS)
    assert rank.save(HASHES, IDS).stored == len(HASHES)
    return rank


def statistics(daemon: Daemon) -> dict[str, int]:
    with BlockingNode(daemon.address, 5) as node:
        numbers: dict[str, int] = json.loads(node.statistics(5))
        return numbers


def seconds_until(done: Callable[[], bool], limit_s: float = 10.0) -> float:
    began = time.monotonic()
    while not done():
        assert time.monotonic() - began < limit_s, "it never came"
        time.sleep(0.02)  # sleep: another process is polled
    return time.monotonic() - began


@contextlib.contextmanager
def restarted(daemon: Daemon, folder: Path) -> Iterator[Daemon]:
    """Another daemon at the address of one that is gone."""
    again = start_daemon(address=daemon.address, http_address=daemon.http_address, folder=folder)
    try:
        wait_until_ready(again)
        yield again
    finally:
        again.kill()


# --- ends


def test_sigterm_lets_a_load_end_and_exits_0(tmp_path: Path) -> None:
    with running_daemon(pool_size="512mb", folder=tmp_path) as daemon:
        seconds_until(lambda: statistics(daemon)["capacity_bytes"] == 512 << 20)
        with saved(daemon, blocks=32, layer_bytes=8 << 20) as rank:
            rank.kv[:] = 0
            found = rank.query(HASHES)
            kv = rank.kv

            def terminate() -> None:
                seconds_until(lambda: bool(kv[0, 0].any()))  # the load is under way
                daemon.process.send_signal(signal.SIGTERM)

            watch = threading.Thread(target=terminate)
            watch.start()
            assert rank.load(found.lease, IDS) == []
            watch.join()
            assert rank.wrong_blocks(HASHES, IDS) == []
        assert daemon.process.wait(10) == 0


def test_sigterm_with_idle_sessions_does_not_wait_for_them(tmp_path: Path) -> None:
    with running_daemon(folder=tmp_path) as daemon, saved(daemon) as rank:
        assert rank.query(HASHES).hit_count == len(HASHES)  # a lease is no reason to wait either
        assert daemon.stop(5) == 0


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with running_daemon(folder=tmp_path) as daemon:
        daemon.process.send_signal(signal.SIGSTOP)  # so that both are pending when it goes on
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.send_signal(signal.SIGINT)
        daemon.process.send_signal(signal.SIGCONT)
        assert daemon.process.wait(5) in {128 + signal.SIGTERM, 128 + signal.SIGINT}


# --- starts


def refusal(*flags: str) -> str:
    """What a daemon says that does not start; it must be one sentence."""
    command = [sys.executable, "-P", "-m", "pegaflow.node.cli", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode == 2, ended
    lines = ended.stderr.strip().splitlines()
    assert lines[-1].startswith("pegaflow-server: "), ended.stderr
    assert "Traceback" not in ended.stderr
    return lines[-1]


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with running_daemon(folder=tmp_path) as daemon:
        says = refusal("--addr", daemon.address, "--pool-size", "64mb")
        assert daemon.address in says
        assert "another daemon" in says
        with BlockingNode(daemon.address, 5) as node:
            assert node.health(5).ready  # the one that is there was not disturbed


def test_a_socket_left_by_a_killed_daemon_is_replaced_and_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pegaflow.sock"
    first = start_daemon(address=f"unix:{path}", folder=tmp_path)
    try:
        wait_until_ready(first)
        assert "another daemon" in refusal("--addr", f"unix:{path}", "--pool-size", "64mb")
        saved(first).close()
        first.kill()
        assert path.exists()
        with restarted(first, tmp_path) as again:
            saved(again).close()
            assert again.stop() == 0
        assert not list(tmp_path.glob("pegaflow.sock*"))
    finally:
        first.kill()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU, so it would start")
def test_a_gpu_that_is_not_there_is_one_sentence() -> None:
    says = refusal(
        "--devices", "0", "--pool-size", "64mb",
        "--addr", free_address(), "--http-addr", free_address(),
    )  # fmt: skip
    assert "--devices: CUDA's driver is missing" in says


def test_t23_a_pool_beyond_the_memory_is_refused_with_sum_and_limit() -> None:
    says = refusal("--addr", free_address(), "--http-addr", free_address(), "--pool-size", "100tb")
    assert "pool 100tb + reserve" in says
    assert "make --pool-size smaller" in says


@pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/cgroup.subtree_control", os.W_OK)
    or "memory" not in Path("/sys/fs/cgroup/cgroup.controllers").read_text(),
    reason="no cgroup with a memory limit can be made here; test_t23 in tests/engine pretends one",
)
def test_t23_a_real_cgroup_below_the_pool(tmp_path: Path) -> None:
    group = Path("/sys/fs/cgroup") / f"pegaflow-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.max").write_text(str(256 << 20))
        script = (
            f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -P -m pegaflow.node.cli "
            f"--addr {free_address()} --http-addr {free_address()} --pool-size 512mb"
        )
        ended = subprocess.run(
            ["sh", "-c", script], capture_output=True, text=True, timeout=20, check=False
        )
        assert ended.returncode == 2
        assert "memory.max" in ended.stderr
    finally:
        group.rmdir()


# --- kill -9


def stream_saves(rank: MockRank) -> NoReturn:
    while True:
        rank.save(HASHES, IDS, timeout_s=5)


def test_t11_clients_that_stream_notice_kill_9_and_save_again_soon(tmp_path: Path) -> None:
    with running_daemon(folder=tmp_path) as daemon:
        with saved(daemon) as rank:
            killed_at: list[float] = []

            def kill() -> None:
                killed_at.append(time.monotonic())
                daemon.kill()

            threading.Timer(0.3, kill).start()
            with pytest.raises(PeerGone):
                stream_saves(rank)
            assert time.monotonic() - killed_at[0] < 1.0
        with restarted(daemon, tmp_path) as again:
            began = time.monotonic()
            with saved(again) as fresh:
                assert fresh.query(HASHES).hit_count == len(HASHES)
            assert time.monotonic() - began < 2.0


def test_t15_what_belongs_to_a_former_boot_is_refused(tmp_path: Path) -> None:
    with running_daemon(folder=tmp_path) as daemon:
        with saved(daemon) as rank:
            lease, boot_id = rank.query(HASHES).lease, rank.session.ping(5)
            daemon.kill()
        with restarted(daemon, tmp_path) as again, saved(again) as rank:
            assert rank.session.ping(5) != boot_id
            rank.kv[:] = 0xEE
            with pytest.raises(LeaseExpired):
                rank.load(lease, IDS)
            assert (rank.kv == 0xEE).all()


CHILD = """
import sys, time
from pegaflow.client.mock import MockRank, chained_hashes
hashes, ids = chained_hashes(range(256), 16), list(range(16))
whole = MockRank.connect(sys.argv[1], instance="whole")
whole.compute(hashes, ids); whole.save(hashes, ids); whole.query(hashes)
half = MockRank.connect(sys.argv[1], instance="half", namespace="half", ranks=2)
half.compute(hashes, ids); half.save(hashes, ids)
print("holding", flush=True)
time.sleep(100)
"""


@contextlib.contextmanager
def client_that_holds(daemon: Daemon) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a lease on sealed blocks and with half-saved ones."""
    command = [sys.executable, "-P", "-c", CHILD, daemon.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"holding\n"
            yield child
        finally:
            child.kill()


def test_t20_what_a_killed_client_held_comes_back(tmp_path: Path) -> None:
    with running_daemon(folder=tmp_path) as daemon:
        with client_that_holds(daemon) as child:
            held = statistics(daemon)
            assert held["pinned_blocks"] == held["unsealed"] == len(HASHES)
            child.kill()

        def gone() -> bool:
            now = statistics(daemon)
            return not (now["pinned_blocks"] or now["unsealed"] or now["leases"])

        seconds_until(gone, 5)
        assert statistics(daemon)["blocks"] == len(HASHES)  # the sealed ones stay


def leftovers() -> tuple[set[str], set[str], str]:
    """Shared memory files, abstract sockets of ours, and reserved huge pages."""
    names = set(Path("/proc/net/unix").read_text().split())
    pages = [s for s in Path("/proc/meminfo").read_text().splitlines() if "HugePages_Free" in s]
    shm = {path.name for path in Path("/dev/shm").iterdir()}
    return shm, {name for name in names if "pegaflow" in name}, "".join(pages)


def test_t24_killed_daemons_and_clients_leave_nothing_that_stops_the_next(tmp_path: Path) -> None:
    """PEGAFLOW_RESTARTS=100 repeats it as often as the fault's report asks; 10 takes seconds."""
    before = leftovers()
    address, http = f"unix:{tmp_path}/p.sock", free_address()
    for _ in range(int(os.environ.get("PEGAFLOW_RESTARTS", "10"))):
        daemon = start_daemon(address=address, http_address=http, pool_size="16mb", folder=tmp_path)
        try:
            wait_until_ready(daemon)
            with client_that_holds(daemon) as child:
                child.kill()
        finally:
            daemon.kill()
    assert leftovers() == before


# --- a daemon that does not answer


def test_t12_a_stopped_daemon_costs_each_call_its_deadline_and_no_more(tmp_path: Path) -> None:
    with running_daemon(folder=tmp_path) as daemon, saved(daemon) as rank:
        found = rank.query(HASHES)

        def ask_anew() -> None:
            # Closed here: a connection that is only dropped would keep this thread's KJ loop.
            with BlockingNode(daemon.address, 0.2) as node:
                node.health(0.2)

        daemon.process.send_signal(signal.SIGSTOP)
        calls: list[Callable[[], object]] = [
            lambda: rank.session.ping(0.2),
            lambda: rank.load(found.lease, IDS, timeout_s=0.2),
            lambda: rank.save(HASHES, IDS, timeout_s=0.2),
            ask_anew,
        ]
        for call in calls:
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                call()
            assert time.monotonic() - began < 1.0
        daemon.process.send_signal(signal.SIGCONT)
        assert rank.session.ping(5)
        assert rank.query(HASHES).hit_count == len(HASHES)


@pytest.mark.parametrize("answer", [b"", b"\0", b"\xff" * 4096], ids=["nothing", "dribble", "junk"])
def test_t12_a_peer_that_is_no_daemon_costs_the_deadline(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            with contextlib.suppress(OSError):
                peer, _ = listener.accept()
                with peer:
                    while True:
                        peer.sendall(answer)
                        time.sleep(0.05)  # sleep: the fault is slowness

        threading.Thread(target=talk, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(PegaflowError), BlockingNode(address, 0.3) as node:
            node.health(0.3)
        assert time.monotonic() - began < 1.0


# --- between look-up and load


def test_t2_a_load_after_the_cache_was_cleared_and_filled_again_is_right_or_refused(
    tmp_path: Path,
) -> None:
    """The canary in the target shows that what is refused was not written."""
    with running_daemon(pool_size="16mb", folder=tmp_path) as daemon:
        with saved(daemon, blocks=64, layer_bytes=64 << 10) as rank:
            leased = rank.query(HASHES)
            given_up = rank.query(HASHES)
            rank.session.release([given_up.lease], 5)
            others = [BlockHash(bytes([number]) * 32) for number in range(1, 49)]
            for _ in range(20):  # five times what fits, so everything that may go has gone
                rank.compute(others, range(16, 64))
                rank.save(others, np.arange(16, 64))
                others = [BlockHash(name[1:] + bytes([7])) for name in others]
            rank.kv[:] = 0xEE
            with pytest.raises(LeaseExpired):
                rank.load(given_up.lease, IDS)
            assert (rank.kv == 0xEE).all()
            assert rank.load(leased.lease, IDS) == []
            assert rank.wrong_blocks(HASHES, IDS) == []
            with pytest.raises(LeaseExpired):  # used up
                rank.load(leased.lease, IDS)
