"""Nothing that raises may escape into the engine: one decorator for every hook.

A cache that fails costs time; an exception in an engine's step costs all of its requests.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from pegaflow.connector.tally import Tally

_log = logging.getLogger("vllm.pegaflow")
"""Below vLLM's own logger, so that its handler and format apply."""

P = ParamSpec("P")
R = TypeVar("R")


class Complaints:
    """A log that says the same at most once in ``interval_s``, and how often it was held back."""

    def __init__(self, interval_s: float = 30.0) -> None:
        """Empty; thread-safe."""
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}

    def warn(self, topic: str, text: str, *, trace: bool = False) -> bool:
        """Log ``text`` unless ``topic`` was logged recently; True if it was."""
        now = time.monotonic()
        with self._lock:
            last, held = self._seen.get(topic, (float("-inf"), 0))
            if now - last < self._interval_s:
                self._seen[topic] = (last, held + 1)
                return False
            self._seen[topic] = (now, 0)
        more = f" ({held} more like it since)" if held else ""
        _log.warning("PegaFlow: %s%s", text, more, exc_info=trace)
        return True


class Guarded(Protocol):
    """What a class with guarded hooks has."""

    complaints: Complaints
    tally: Tally


S = TypeVar("S", bound=Guarded)


class guarded:  # used as a decorator
    """Turn an exception of a hook into ``default()``, a counter and a rate-limited log."""

    def __init__(self, default: Callable[[], object]) -> None:
        """``default`` makes the harmless answer; it must have the hook's type."""
        self._default = default

    def __call__(self, method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        """Wrap ``method``."""
        name, default = method.__name__, self._default

        def hook(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self.tally.add("hook_errors")
                self.complaints.warn(name, f"{name} failed; the engine goes on", trace=True)
                return cast("R", default())

        return functools.update_wrapper(hook, method)
