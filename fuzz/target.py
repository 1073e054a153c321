"""The daemon under fire: where it is, whether it lives, how much memory it has."""

from __future__ import annotations

import collections
import socket
import time
from pathlib import Path

import attrs

from pegaflow.client.address import connect_socket
from pegaflow.client.blocking import BlockingNode
from pegaflow.errors import PegaflowError
from pegaflow.model.address import Address, parse_address

CORPUS = Path(__file__).parent / "corpus"
ALIVE_SECONDS = 10.0


class DaemonDied(Exception):
    """It does not answer any more, or it is another process than before."""


@attrs.define(eq=False)
class Target:
    """A live daemon.  ``pid`` is 0 when it was given by address: then no memory is read."""

    address: Address
    pid: int = 0
    boot_id: bytes = b""
    recent: collections.deque[bytes] = attrs.field(factory=lambda: collections.deque(maxlen=64))

    @classmethod
    def at(cls, address: str, pid: int = 0) -> Target:
        """Reach it once, to know its boot id."""
        target = cls(parse_address(address), pid)
        target.check()
        return target

    def connect(self) -> socket.socket:
        """A fresh non-blocking connection."""
        try:
            sock = connect_socket(self.address, ALIVE_SECONDS)
        except PegaflowError as exc:
            raise DaemonDied(f"no connection: {exc}") from None
        sock.setblocking(False)
        return sock

    def remember(self, data: bytes) -> None:
        """Keep the last inputs, to be written down if they were the last."""
        self.recent.append(data)

    def check(self) -> None:
        """Raise :exc:`DaemonDied` unless the same process still answers."""
        try:
            with BlockingNode(self.address, ALIVE_SECONDS) as node:
                boot_id = node.health(ALIVE_SECONDS).boot_id
        except PegaflowError as exc:
            raise DaemonDied(f"no answer: {exc}") from None
        if self.boot_id and boot_id != self.boot_id:
            raise DaemonDied("the daemon was restarted: it had ended")
        self.boot_id = boot_id

    def rss_mb(self) -> float:
        """Resident memory without the pool's growth being over: read it after that."""
        if not self.pid:
            return 0.0
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return 0.0

    def settle(self) -> None:
        """Wait until the pool has grown to its size, so that memory figures mean something."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with BlockingNode(self.address, ALIVE_SECONDS) as node:
                health = node.health(ALIVE_SECONDS)
            if health.pool_ready_bytes >= health.pool_total_bytes:
                return
            time.sleep(0.1)

    def write_down(self, name: str) -> Path:
        """The last inputs, for a replay."""
        CORPUS.mkdir(exist_ok=True)
        path = CORPUS / f"failed-{name}.bin"
        path.write_bytes(b"".join(self.recent))
        return path
