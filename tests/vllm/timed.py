"""The connector with a stop watch on every hook of the scheduler.  Runs in an engine's environment.

A hook's time is counted as wall time minus what the kernel says the thread spent waiting for a
processor: a busy machine is no finding, waiting for the daemon is.
"""

# mypy: ignore-errors
# It wraps methods of a class whose base is vLLM's: nothing here has types.

from __future__ import annotations

import time
from pathlib import Path

from pegaflow.connector.vllm.connector import PegaKVConnector

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
)
SCHEDSTAT = Path("/proc/thread-self/schedstat")

worst: dict[str, list[float]] = {}
"""Hook -> [wall, wall without waiting for a processor, processor] ms of its slowest call."""


def waited_ns() -> int:
    """Nanoseconds that this thread was ready to run and did not."""
    return int(SCHEDSTAT.read_text().split()[1]) if SCHEDSTAT.exists() else 0


def timed(name: str):
    def hook(self, *args, **kwargs):
        waited, cpu, wall = waited_ns(), time.thread_time(), time.perf_counter()
        try:
            return getattr(PegaKVConnector, name)(self, *args, **kwargs)
        finally:
            wall = (time.perf_counter() - wall) * 1e3
            own = wall - (waited_ns() - waited) / 1e6
            row = [round(wall, 3), round(own, 3), round((time.thread_time() - cpu) * 1e3, 3)]
            if name not in worst or own > worst[name][1]:
                worst[name] = row

    return hook


TimedConnector = type("TimedConnector", (PegaKVConnector,), {name: timed(name) for name in HOOKS})
