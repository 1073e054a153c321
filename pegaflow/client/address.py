"""Reaching a daemon at its address."""

from __future__ import annotations

import socket
import time

from pegaflow.errors import DeadlineExceeded, PeerGone
from pegaflow.model.address import DEFAULT_HOST, DEFAULT_PORT, Address, parse_address

__all__ = ["DEFAULT_HOST", "DEFAULT_PORT", "Address", "connect_socket", "parse_address"]


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
