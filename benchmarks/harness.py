"""What benchmarks share: progress on stderr, one flat JSON object as the last line of stdout.

``commit`` and ``machine`` are added here.  With SAVE=1 in the environment (``make bench NAME=x
SAVE=1``) the object is also appended to ``benchmarks/results/x.jsonl``.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import __main__

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Figure = float | int | str | None

_started = time.monotonic()


def progress(text: str) -> None:
    """One line for the person who waits."""
    print(f"[{time.monotonic() - _started:6.1f} s] {text}", file=sys.stderr, flush=True)


def commit() -> str:
    """The commit that was measured, with ``-dirty`` when the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def machine() -> str:
    """Processor, cores, memory and kernel: what the figures depend on."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{model}, {os.cpu_count()} cores, {memory_gb:.0f} GiB, Linux {platform.release()}"


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that is at least as large as ``percent`` % of all (nearest rank)."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def emit(result: Mapping[str, Figure], name: str | None = None) -> None:
    """Print the result, and keep it when SAVE=1.  Call it last.

    Keys are flat and end in their unit.  ``name`` is the file to keep it in, by default the
    benchmark's own.
    """
    for key, value in result.items():
        if not isinstance(value, float | int | str | None):
            raise TypeError(f"{key} is {type(value).__name__}; a result is flat")
    line = json.dumps({**result, "commit": commit(), "machine": machine()})
    if os.environ.get("SAVE") == "1":
        stem = name or Path(str(__main__.__file__)).stem
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{stem}.jsonl").open("a") as out:
            out.write(line + "\n")
        progress(f"kept in benchmarks/results/{stem}.jsonl")
    sys.stdout.flush()
    print(line, flush=True)
