"""How soon does a real vLLM give its first token when its cache comes from the daemon?

Would disprove: after an engine restart the mean time to first token is at most half of upstream's
with a fragmented block pool and three quarters with a fresh one, tokens are those of an engine
without a connector, and an engine that reuses nothing is at most 1 % slower.

Eight prompts of 10,000 tokens, one new token, four requests a second, dummy weights of
Llama-3.1-8B's shape.  Each engine start is a process of its own; starts of the rivals alternate.
``--upstream SITE`` is a folder with upstream's wheel unpacked.  Needs a GPU and vLLM on the path.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from benchmarks.harness import ROOT, Figure, emit, progress
from pegaflow.testing.daemon import Daemon, free_address, running_daemon

POOL = "45gb"
START_TIMEOUT_S = 240


@attrs.frozen
class Rival:
    """A connector with its own environment, started as often as asked."""

    name: str
    connector: str
    environment: Mapping[str, str]


def run_engine(rival: Rival, passes: str) -> list[dict[str, object]]:
    """One engine start; its passes' results."""
    progress(f"{rival.name}: {passes}")
    command = [sys.executable, "-m", "benchmarks.vllm_ttft_engine", rival.connector, passes]
    ended = subprocess.run(
        command,
        env={**os.environ, **rival.environment},
        cwd="/",  # python -m puts the current folder first: upstream's package has our name
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    results = [
        json.loads(line.partition(" ")[2])
        for line in ended.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    if len(results) < len(passes.split(",")):
        progress(f"{rival.name} fell short:\n{ended.stdout[-1500:]}\n{ended.stderr[-3000:]}")
    for result in results:
        shown = {k: v for k, v in result.items() if k != "tokens"}
        progress(f"{rival.name} {json.dumps(shown)}")
    return results


def metrics(daemon: Daemon) -> dict[str, float]:
    """Sums and counts that a stage table needs."""
    url = f"http://{daemon.http_address}/metrics"
    text = urllib.request.urlopen(url, timeout=5).read().decode()
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(pegaflow_\w+(?:\{[^}]*\})?) (\S+)", line)
        if match and "_bucket" not in line:
            found[match[1]] = float(match[2])
    return found


def stages(before: dict[str, float], after: dict[str, float]) -> dict[str, Figure]:
    """Mean milliseconds of what the daemon did for each load, between two scrapes."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    out: dict[str, Figure] = {}
    for method in ("query", "load"):
        labels = f'{{method="{method}",status="ok"}}'
        count = grown(f"pegaflow_rpc_duration_seconds_count{labels}")
        total = grown(f"pegaflow_rpc_duration_seconds_sum{labels}")
        out[f"stage_{method}_calls"] = int(count)
        out[f"stage_{method}_ms"] = round(1e3 * total / count, 3) if count else None
    loads = grown('pegaflow_copy_batches_total{direction="load"}')
    busy = grown('pegaflow_copy_busy_seconds_total{direction="load"}')
    out["stage_copy_ms"] = round(1e3 * busy / loads, 3) if loads else None
    out["loaded_gib"] = round(grown("pegaflow_load_bytes_total") / (1 << 30), 3)
    if busy:
        out["stage_copy_gbps"] = round(grown("pegaflow_load_bytes_total") / busy / 1e9, 2)
    return out


@attrs.frozen(eq=False)
class Upstream:
    """The other server."""

    port: str
    http: str
    process: subprocess.Popen[bytes]

    def wait(self) -> None:
        """Until it answers."""
        end = time.monotonic() + 90
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{self.http}/health", timeout=1)
                break
            time.sleep(0.2)
        progress(f"upstream serves: {self.process.poll() is None}")


@contextlib.contextmanager
def upstream_server(site: Path, folder: Path) -> Iterator[Upstream]:
    """Upstream's server from its wheel, just started: it pins its pool before it serves."""
    address, http = free_address(), free_address()
    command = [
        sys.executable, "-c", "from pegaflow._server import main; main()",
        "--addr", address, "--http-addr", http, "--pool-size", POOL, "--devices", "0",
    ]  # fmt: skip
    log = folder / "upstream.log"
    with log.open("wb") as out:
        environment = {**os.environ, "PYTHONPATH": f"{site}:{os.environ['PYTHONPATH']}"}
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd="/"
        )
        try:
            yield Upstream(address.rpartition(":")[2], http, process)
        finally:
            process.kill()
            subprocess.run(["pkill", "-9", "-f", "pegaflow-server-py"], check=False)
            progress("upstream's log ends: " + log.read_text(errors="replace")[-400:])


@attrs.define
class Table:
    """Everything that was measured, flat."""

    out: dict[str, Figure] = attrs.field(factory=dict)
    tokens: dict[str, list[int]] = attrs.field(factory=dict)
    """By seed: those of the engine without a connector."""
    different: int = 0

    def take(self, name: str, results: list[dict[str, object]], suffix: str = "") -> None:
        """Keep a start's passes; compare tokens."""
        for result in results:
            key = re.sub(r"\W+", "_", str(result["pass"]))
            for field in ("ttft_mean_ms", "ttft_p50_ms", "ttft_max_ms", "cached"):
                if field in result:
                    value = result[field]
                    assert isinstance(value, float | int)
                    self.out[f"{name}_{key}{suffix}_{field}"] = value
            for field, value in result.items():
                if field.startswith("itl_"):
                    assert isinstance(value, float | int)
                    self.out[f"{name}_{field}"] = value
            tokens = result.get("tokens")
            if isinstance(tokens, list):
                seed = str(result["pass"]).partition("+")[0].partition(":")[2]
                if self.tokens.setdefault(seed, tokens) != tokens:
                    self.different += 1
        ready = results[0].get("ready_s") if results else None
        if isinstance(ready, float):
            self.out[f"{name}{suffix}_engine_ready_s"] = ready


AGAIN = "warm:1,warm:{last}+frag,cold:{new}+frag"


def measure(
    table: Table, daemon: Daemon, upstream: Upstream | None, options: argparse.Namespace
) -> None:
    """All starts, the rivals in turn."""
    host, _, port = daemon.address.rpartition(":")
    ours = Rival("ours", "pegaflow", {"PEGAFLOW_HOST": f"http://{host}", "PEGAFLOW_PORT": port})
    none = Rival("none", "none", {"TRAFFIC_ADDRESS": daemon.address})
    cold = ",".join(f"cold:{seed + 1}" for seed in range(options.cold))
    last = options.cold
    if options.baseline:
        passes = f"{cold},gpu:{last},cold:{last + 1}+frag,itl"
        table.take("none", run_engine(none, passes))
    table.take("ours", run_engine(ours, cold))
    rivals = [ours]
    if upstream is not None:
        upstream.wait()
        path = f"{options.upstream}:{os.environ['PYTHONPATH']}"
        where = {"PEGAFLOW_HOST": "http://127.0.0.1", "PEGAFLOW_PORT": upstream.port}
        rivals.append(Rival("upstream", "pegaflow", {"PYTHONPATH": path, **where}))
        table.take("upstream", run_engine(rivals[-1], cold))
    for number in range(options.rounds):
        for rival in rivals:
            before = metrics(daemon)
            suffix = f"_{number}" if number else ""
            passes = AGAIN.format(last=last, new=10 + number)
            table.take(rival.name, run_engine(rival, passes), suffix)
            if rival is ours and not number:
                table.out |= stages(before, metrics(daemon))
    if options.offloading:
        vllms = Rival("offloading", "offloading", {})
        table.take("offloading", run_engine(vllms, "cold:1,warm:1"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", type=Path, help="a folder with upstream's wheel unpacked")
    parser.add_argument("--cold", type=int, default=2, help="sets of prompts that are new")
    parser.add_argument("--no-baseline", dest="baseline", action="store_false")
    parser.add_argument("--rounds", type=int, default=2, help="warm starts of each rival")
    parser.add_argument("--offloading", action="store_true", help="vLLM's own connector too")
    parser.add_argument("--out", type=Path, help="also write the object there")
    options = parser.parse_args()
    table = Table()
    import torch

    table.out["card"] = torch.cuda.get_device_name(0)
    table.out["date"] = time.strftime("%Y-%m-%d")
    folder = options.out.parent if options.out else ROOT / "benchmarks" / "results"
    try:
        with (
            running_daemon(pool_size=POOL, timeout_s=60, folder=folder) as daemon,
            contextlib.ExitStack() as stack,
        ):
            upstream = None
            if options.upstream:
                upstream = stack.enter_context(upstream_server(options.upstream, folder))
            measure(table, daemon, upstream, options)
    finally:
        table.out["passes_with_other_tokens"] = table.different
        if options.out:
            options.out.write_text(json.dumps(table.out, indent=1) + "\n")
    emit(table.out)


if __name__ == "__main__":
    main()
