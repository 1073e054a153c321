"""Fuzz targets.

    python -m fuzz frames    --seed 1 --count 100000 [--address HOST:PORT]
    python -m fuzz sequences --seed 1 --count 100000 [--address HOST:PORT]
    python -m fuzz hostile-server --seed 1 --count 2000
    python -m fuzz smoke     all of them, briefly
    python -m fuzz canary    kills the daemon under fire: must fail, or the harness is blind

Without --address a daemon of its own is started.  The last line is a JSON object.  What brought the
daemon down is written to fuzz/corpus/ with its seed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fuzz import frames, hostile_server, sequences
from fuzz.hostile_server import ClientMisbehaved
from fuzz.sequences import InternalError
from fuzz.target import DaemonDied, Target
from pegaflow.testing.daemon import running_daemon

Live = Callable[[Target, random.Random, int], Counter[str]]

LIVE: dict[str, Live] = {"frames": frames.run, "sequences": sequences.run}
SMOKE = {"frames": 6000, "sequences": 4000, "hostile-server": 150}
GROWTH_MB_MAX = 48.0
"""A daemon whose memory grew by more over one target, after its warm-up, fails the run."""
WARM_UP_SHARE = 5
"""The first fifth fills the allocator's arenas with the largest messages; a leak grows on."""


def canary(target: Target, dice: random.Random, count: int) -> Counter[str]:
    """Fire at a daemon that somebody kills meanwhile: the harness must see it."""
    import os
    import signal

    threading.Timer(0.5, os.kill, (target.pid, signal.SIGKILL)).start()
    return frames.run(target, dice, count)


def attack(name: str, work: Live, target: Target, seed: int, count: int) -> dict[str, object]:
    """One target against one live daemon.  Raises what the run must fail of."""
    target.settle()
    began, dice = time.monotonic(), random.Random(seed)
    try:
        ended = work(target, dice, count // WARM_UP_SHARE)
        before = target.rss_mb()
        ended += work(target, dice, count - count // WARM_UP_SHARE)
    except (DaemonDied, InternalError) as exc:
        path = target.write_down(f"{name}-{seed}")
        print(f"{name}: {exc}", file=sys.stderr)
        replay = f"python -m fuzz {name} --seed {seed} --count {count}"
        print(f"replay: {replay}; the last inputs are in {path}", file=sys.stderr)
        raise
    print(f"{name}: {dict(ended.most_common(40))}", file=sys.stderr, flush=True)
    time.sleep(1.0)  # closed connections are being taken down
    after = target.rss_mb()
    return {
        "target": name,
        "seed": seed,
        "inputs": ended["inputs"],
        "connections": ended["connections"],
        "rss_before_mb": round(before, 1),
        "rss_after_mb": round(after, 1),
        "exits": 0,
        "seconds": round(time.monotonic() - began, 1),
    }


def run_live(
    name: str, work: Live, seed: int, count: int, address: str | None
) -> dict[str, object]:
    """Against the daemon at ``address``, or against one of our own."""
    if address is not None:
        return attack(name, work, Target.at(address), seed, count)
    with tempfile.TemporaryDirectory(prefix="pegaflow-") as folder:
        flags = ("--log-level", "error", "--idle-secs", "30")
        with running_daemon(*flags, pool_size="64mb", folder=Path(folder)) as daemon:
            target = Target.at(daemon.address, daemon.process.pid)
            try:
                result = attack(name, work, target, seed, count)
            except (DaemonDied, InternalError):
                print(daemon.log_tail(30), file=sys.stderr)
                raise
            if daemon.stop() != 0:
                raise DaemonDied("it did not end with status 0 afterwards")
            return result


def run_one(name: str, seed: int, count: int, address: str | None) -> dict[str, object]:
    """One target by name."""
    if name == "hostile-server":
        began = time.monotonic()
        ended = hostile_server.run(random.Random(seed), count)
        print(f"{name}: {dict(ended)}", file=sys.stderr)
        seconds = round(time.monotonic() - began, 1)
        return {"target": name, "seed": seed, "inputs": ended["inputs"], "seconds": seconds}
    work = canary if name == "canary" else LIVE[name]
    result = run_live(name, work, seed, count, address)
    before, after = result["rss_before_mb"], result["rss_after_mb"]
    assert isinstance(before, float)
    assert isinstance(after, float)
    if after - before > GROWTH_MB_MAX:
        raise DaemonDied(f"its memory grew from {before} to {after} MB")
    return result


def main() -> int:
    """0 when everything lived, 1 when not."""
    parser = argparse.ArgumentParser(
        prog="python -m fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = (*LIVE, "hostile-server", "canary", "smoke")
    parser.add_argument("target", choices=names)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--address", help="a running daemon; without it one is started")
    options = parser.parse_args()
    jobs = SMOKE if options.target == "smoke" else {options.target: options.count}
    results: list[dict[str, object]] = []
    try:
        results = [run_one(name, options.seed, n, options.address) for name, n in jobs.items()]
    except (DaemonDied, InternalError, ClientMisbehaved) as exc:
        print(json.dumps({"target": options.target, "failed": str(exc)}))
        return 1
    if len(results) == 1:
        print(json.dumps(results[0]))
    else:
        print(json.dumps({"target": "smoke", "inputs": sum(SMOKE.values()), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
