"""A real ``pegaflow-server`` in a child process on free ports: for tests, benchmarks and demos."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

from pegaflow.client.blocking import BlockingNode
from pegaflow.errors import PegaflowError


class DaemonFailed(Exception):
    """It did not start, or ended before its time; the text has the end of its log."""


@attrs.define(eq=False)
class Daemon:
    """One child process.  It may be killed and a new one started at the same addresses."""

    address: str
    """``host:port`` of the protocol."""

    http_address: str
    log: Path
    process: subprocess.Popen[bytes]

    def log_tail(self, lines: int = 20) -> str:
        """The end of what it wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL: it gets no chance to say goodbye."""
        self.process.kill()
        self.process.wait()

    def stop(self, grace_s: float = 15.0) -> int:
        """SIGTERM, and the exit status; raises :exc:`subprocess.TimeoutExpired` when it stays."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(grace_s)


def free_address() -> str:
    """A loopback port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def start_daemon(
    *flags: str,
    pool_size: str = "64mb",
    address: str | None = None,
    http_address: str | None = None,
    folder: Path,
) -> Daemon:
    """Start without waiting.  ``flags`` are added to the command line; ``folder`` gets the log."""
    address, http_address = address or free_address(), http_address or free_address()
    command = [sys.executable, "-c", "from pegaflow.node.cli import main; main()"]
    command += ["--addr", address]
    command += ["--http-addr", http_address, "--pool-size", pool_size, *flags]
    log = folder / f"pegaflow-server-{Path(address).name.rpartition(':')[2]}.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            # -c would put the current folder first on the path, before the installed package.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
    return Daemon(address, http_address, log, process)


def wait_until_ready(daemon: Daemon, timeout_s: float = 20.0) -> None:
    """Return when it serves and has some memory; raises :exc:`DaemonFailed`."""
    end = time.monotonic() + timeout_s
    last: PegaflowError | None = None
    while time.monotonic() < end:
        if (status := daemon.process.poll()) is not None:
            raise DaemonFailed(f"the daemon ended with {status}:\n{daemon.log_tail()}")
        try:
            with BlockingNode(daemon.address, 1.0) as node:
                if node.health(1.0).ready:
                    return
        except PegaflowError as trouble:
            last = trouble
        time.sleep(0.02)
    raise DaemonFailed(f"not ready in {timeout_s:g} s ({last}):\n{daemon.log_tail()}")


@contextlib.contextmanager
def running_daemon(
    *flags: str, pool_size: str = "64mb", timeout_s: float = 20.0, folder: Path | None = None
) -> Iterator[Daemon]:
    """A ready daemon for the length of a ``with`` block; what still runs at its end is killed."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pegaflow-")))
        daemon = start_daemon(*flags, pool_size=pool_size, folder=folder)
        stack.callback(daemon.kill)
        wait_until_ready(daemon, timeout_s)
        yield daemon
