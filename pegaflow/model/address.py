"""Where a daemon listens: ``host:port`` or ``unix:/path``."""

from __future__ import annotations

import attrs

from pegaflow.errors import ConfigError

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

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it."""
        return bool(self.path) or self.host in ("localhost", "::1") or self.host.startswith("127.")


def parse_address(text: str, *, default_port: int = DEFAULT_PORT) -> Address:
    """Read "host:port", "[v6]:port", "host", "http://host:port" or "unix:/path".

    Raises :exc:`ConfigError` for anything else.
    """
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
    if not host or not (port.isascii() and port.isdecimal()) or not 0 <= int(port) <= 65535:
        raise ConfigError(
            f"{text!r} is no address: write HOST:PORT (127.0.0.1:50055) or unix:/path"
        )
    return Address(host, int(port))
