"""What can go wrong, sorted by what the caller can do about it.

A miss, a rejection for lack of room and "still loading" are values, not errors.  An
:exc:`AssertionError` is a bug of ours: nobody catches it and the process ends.
"""

from __future__ import annotations


class PegaflowError(Exception):
    """Root of the tree.  The text is one sentence: what, where, what would be right."""


class Refused(PegaflowError):
    """The caller can fix it."""


class BadRequest(Refused):
    """The request is malformed; sending it again will not help."""

    def __init__(self, message: str, field: str = "") -> None:
        """``field`` names the offending field, empty when there is none."""
        super().__init__(message)
        self.field = field


class ConfigError(Refused):
    """A flag, environment variable or file is wrong; the process does not start."""


class UnknownInstance(Refused):
    """No such instance here, for example after a restart: open and register again."""


class NotReady(Refused):
    """Some ranks of the instance have not registered yet; treat as a miss."""


class LeaseExpired(Refused):
    """The lease is unknown, expired, of another owner, or redeemed already."""


class ManifestMismatch(Refused):
    """The namespace holds keys of another identity."""

    def __init__(self, message: str, field: str) -> None:
        """``field`` is the first manifest field that differs."""
        super().__init__(message)
        self.field = field


class VersionMismatch(Refused):
    """No protocol version in common."""


class Unavailable(PegaflowError):
    """Try later or elsewhere."""


class Overloaded(Unavailable):
    """A bound was met: calls in flight, a full queue."""


class OutOfSpace(Unavailable):
    """No room, and nothing that may be evicted."""


class DeadlineExceeded(Unavailable):
    """The deadline passed before the work was done; nothing became visible."""


class ShuttingDown(Unavailable):
    """The daemon drains."""


class PeerGone(Unavailable):
    """The other end closed, died or never answered."""


class Corrupt(PegaflowError):
    """Bytes are not what they were."""


class DeviceTrouble(PegaflowError):
    """Something below us broke."""


class MemoryGone(DeviceTrouble):
    """One engine's memory can't be read or written any more: drop that instance, go on."""


class DeviceLost(DeviceTrouble):
    """A whole device is unusable."""
