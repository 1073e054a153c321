"""Kills an engine and starts it again: how much of its KV cache is still there, and is it right?

    main.py --engine vllm|mock

Three engines and one ``pegaflow-server``: a cold one answers the prompts and is killed with
SIGKILL, a new process answers them again from the cache, and an engine without PegaFlow says what
the tokens ought to be.  The last line of stdout is one JSON object; the exit status is 1 when any
token differs, or when nothing came from the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from workload import Run, prompts

from pegaflow.client.blocking import BlockingNode
from pegaflow.testing.daemon import Daemon, DaemonFailed, running_daemon

HERE = Path(__file__).resolve().parent
POOL_SIZE = "512mb"
ENGINE_SECONDS = 240.0
SETTLED_SECONDS, SETTLING_SECONDS = 0.5, 20.0

ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # before 0.29 vLLM's block hashes change with every start without it
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class DemoFailed(Exception):
    """A sentence for whoever watches."""


class Progress:
    """Which step, since when; a heartbeat while a step is silent."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._step = ""
        self._spoke = self.started
        threading.Thread(target=self._beat, daemon=True).start()

    def say(self, text: str) -> None:
        """One line with the seconds since the start."""
        self._spoke = time.monotonic()
        print(f"[{self._spoke - self.started:5.1f} s] {text}", flush=True)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """A named step; silence is broken every 10 s."""
        self.say(text)
        self._step = text
        try:
            yield
        finally:
            self._step = ""

    def _beat(self) -> None:
        while True:
            time.sleep(1)
            if self._step and time.monotonic() - self._spoke > 10:
                self.say(f"  ... {self._step}")


class EngineProcess:
    """An engine in a process of its own, which reports each prompt and then waits."""

    def __init__(self, command: list[str], log: Path, result: Path, progress: Progress) -> None:
        self._log, self._result, self._progress = log, result, progress
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **ENGINE_ENVIRONMENT},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self._log.open("a") as out:
            for line in self.process.stdout:
                out.write(line)
                out.flush()
                if line.startswith("PROMPT "):
                    number, tokens, ttft_ms, computed = line.split()[1:]
                    self._progress.say(
                        f"  prompt {number}: {tokens} tokens, {computed} computed, "
                        f"first token after {float(ttft_ms):.0f} ms"
                    )

    def result(self) -> Run:
        """Wait for the result; raises :exc:`DemoFailed` with the end of the log."""
        end = time.monotonic() + ENGINE_SECONDS
        while not self._result.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                tail = "\n".join(self._log.read_text().splitlines()[-25:])
                raise DemoFailed(f"{tail}\nthe engine gave no result; its log is {self._log}")
            time.sleep(0.02)
        return Run.read(self._result)

    def kill(self) -> None:
        """SIGKILL for it and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)

    def leave(self) -> None:
        """Let it shut down by itself; killed when that takes too long."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.process.stdin.write("leave\n")
            self.process.stdin.flush()
            self.process.wait(20)
        self.kill()


class Demo:
    """The folder, the daemon's address, and how engines are started."""

    def __init__(self, engine: str, folder: Path, progress: Progress) -> None:
        self.engine, self.folder, self.progress = engine, folder, progress

    def start(self, phase: str, daemon: Daemon | None) -> EngineProcess:
        """An engine for one phase, with PegaFlow when there is a daemon."""
        result = self.folder / f"{phase}.json"
        command = [sys.executable, str(HERE / f"engine_{self.engine}.py")]
        command += [str(self.folder / "model"), phase, str(result)]
        if daemon is not None:
            command.append(daemon.address.rpartition(":")[2])
        return EngineProcess(command, self.folder / f"{phase}.log", result, self.progress)

    def prepare(self) -> None:
        """Whatever the engine needs before its first start."""
        if self.engine != "vllm":
            return
        with self.progress.step("writing a small model with random weights"):
            import tiny_model

            count = tiny_model.write(self.folder / "model")
            self.progress.say(f"  {count / 1e6:.0f} million parameters")

    def runs(self) -> tuple[Run, Run, Run]:
        """Cold, warm and the reference."""
        with running_daemon(pool_size=POOL_SIZE, folder=self.folder) as daemon:
            self.progress.say(f"pegaflow-server serves at {daemon.address}, pool {POOL_SIZE}")
            with self.progress.step("cold: a new engine, an empty cache"):
                engine = self.start("cold", daemon)
                try:
                    cold = engine.result()
                    self.wait_for_saves(daemon)
                finally:
                    self.progress.say(f"  kill -9 {engine.process.pid}")
                    engine.kill()
            with self.progress.step("warm: a new process with the same prompts"):
                engine = self.start("warm", daemon)
                try:
                    warm = engine.result()
                finally:
                    engine.leave()
            status = daemon.stop()
            if status != 0:
                raise DemoFailed(f"pegaflow-server ended with {status}:\n{daemon.log_tail()}")
            self.progress.say("pegaflow-server drained and ended with 0")
        with self.progress.step("reference: an engine without PegaFlow"):
            engine = self.start("reference", None)
            try:
                return cold, warm, engine.result()
            finally:
                engine.leave()

    def wait_for_saves(self, daemon: Daemon) -> None:
        """Saving goes on behind the answers: wait until the daemon's counts stand still."""
        end = time.monotonic() + SETTLING_SECONDS
        with BlockingNode(daemon.address, 5.0) as node:
            seen, since = "", time.monotonic()
            while time.monotonic() < end and time.monotonic() - since < SETTLED_SECONDS:
                now = saved_so_far(node.statistics(5.0))
                if now != seen:
                    seen, since = now, time.monotonic()
                time.sleep(0.05)


def saved_so_far(statistics: str) -> str:
    """The counts that change while blocks arrive, as text."""
    values = json.loads(statistics)
    return json.dumps({name: values[name] for name in sorted(values) if "block" in name})


def table(cold: Run, warm: Run, reference: Run) -> str:
    """What a person reads."""
    rows = [("", "cold", "warm", "without PegaFlow")]
    runs = (cold, warm, reference)
    rows.append(("time to first token, median", *(f"{run.ttft_ms():.1f} ms" for run in runs)))
    for name, text in (
        ("computed", "tokens computed"),
        ("own_cache", "tokens from the engine's own cache"),
        ("pegaflow", "tokens from PegaFlow"),
    ):
        rows.append((text, *(str(run.total(name)) for run in runs)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def conclude(cold: Run, warm: Run, reference: Run) -> bool:
    """Print the table and the last line; whether all is as it should be."""
    right = [cold.outputs() == reference.outputs(), warm.outputs() == reference.outputs()]
    cached = warm.total("pegaflow")
    print()
    print(table(cold, warm, reference))
    print()
    for phase, same in zip(("cold", "warm"), right, strict=True):
        print(f"tokens of the {phase} run equal those without PegaFlow: {'yes' if same else 'NO'}")
    if not cached:
        print("NOTHING came from the cache")
    result = {
        "identical": all(right),
        "prompts": len(prompts()),
        "cached_tokens": cached,
        "hit_ratio": round(cached / warm.asked, 4) if warm.asked else 0.0,
        "ttft_cold_ms": round(cold.ttft_ms(), 2),
        "ttft_warm_ms": round(warm.ttft_ms(), 2),
    }
    print(json.dumps(result), flush=True)
    return all(right) and cached > 0


def main() -> int:
    """0 when the tokens are equal and the cache was used."""
    parser = argparse.ArgumentParser(description="kill an engine, find its cache again")
    parser.add_argument("--engine", choices=("vllm", "mock"), default="vllm")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the daemon is ended too
    progress = Progress()
    folder = Path(tempfile.mkdtemp(prefix="pegaflow-demo-"))
    demo = Demo(options.engine, folder, progress)
    try:
        demo.prepare()
        fine = conclude(*demo.runs())
    except (DemoFailed, DaemonFailed) as trouble:
        print(trouble, file=sys.stderr)
        return 1
    if fine:
        shutil.rmtree(folder)
    else:
        print(f"logs are in {folder}", file=sys.stderr)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
