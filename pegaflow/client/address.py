"""Where a daemon listens: ``host:port`` or ``unix:/path``."""

from __future__ import annotations

import socket
import time

import attrs

from pegaflow.errors import ConfigError, DeadlineExceeded, PeerGone

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 50055


@attrs.frozen
class Address:
    """One endpoint; ``path`` is set for a Unix-domain socket, else host and port."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, default_port: int = DEFAULT_PORT) -> Address:
    """ "host:port", "[v6]:port", "host", "http://host:port" (as upstream writes it), "unix:/path"."""
    rest = text.strip()
    if rest.startswith("unix:"):
        path = rest[len("unix:") :]
        if not path.startswith("/"):
            raise ConfigError(f"{text!r} is no address: write unix: and an absolute path")
        return Address("", 0, path)
    rest = rest.removeprefix("http://").removesuffix("/")
    host, colon, port = rest.rpartition(":")
    if not colon or (rest.endswith("]") and rest.startswith("[")):
        host, port = rest, str(default_port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ConfigError(
            f"{text!r} is no address: write HOST:PORT (127.0.0.1:50055) or unix:/path"
        )
    return Address(host, int(port))


def connect_socket(address: Address, timeout_s: float) -> socket.socket:
    """A connected socket, or :exc:`PeerGone` / :exc:`DeadlineExceeded` within ``timeout_s``."""
    end = time.monotonic() + timeout_s
    try:
        if address.path:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(timeout_s)
            try:
                sock.connect(address.path)
            except BaseException:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((address.host, address.port), timeout_s)
    except TimeoutError:
        raise DeadlineExceeded(f"no connection to {address} within {timeout_s:g} s") from None
    except BlockingIOError:  # a Unix socket whose backlog is full
        raise DeadlineExceeded(f"{address} accepts no connections now") from None
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise PeerGone(f"nothing serves at {address}: {reason}") from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if time.monotonic() > end:
        sock.close()
        raise DeadlineExceeded(f"no connection to {address} within {timeout_s:g} s")
    return sock
