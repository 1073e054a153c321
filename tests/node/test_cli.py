"""The command line as a process sees it: one sentence and exit code 2 for what can't work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pegaflow import config


def run(*flags: str, python: tuple[str, ...] = (), **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *python, "-m", "pegaflow.node.cli", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONSAFEPATH": "1", **environment},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def sentence(stderr: str) -> str:
    assert stderr.count("\n") == 1, stderr
    head, _, text = stderr.strip().partition(": ")
    assert head == "pegaflow-server"
    return text


def test_effective_settings_are_the_documented_ones() -> None:  # T32
    code, out, _ = run("--check-config")
    assert code == 0
    found = json.loads(out)
    assert {name: entry["value"] for name, entry in found.items()} == {
        option.name: option.default for option in config.OPTIONS
    }
    assert {entry["source"] for entry in found.values()} == {"the default"}


def test_flags_variables_and_file_arrive(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('idle-secs = 7\npool-size = "5gb"\n')
    code, out, err = run(
        *("--addr", "127.0.0.1:1", "--addr", "127.0.0.1:2", "--use-hugepages", "--check-config"),
        PEGAFLOW_CONFIG=str(file),
        PEGAFLOW_POOL_SIZE="6gb",
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["addr"] == {"value": "127.0.0.1:1,127.0.0.1:2", "source": "flag --addr"}
    assert found["use-hugepages"] == {"value": "true", "source": "flag --use-hugepages"}
    assert found["pool-size"] == {"value": "6gb", "source": "PEGAFLOW_POOL_SIZE"}
    assert found["idle-secs"] == {"value": "7", "source": f"{file}, key idle-secs"}


def test_a_switch_can_be_switched_off_against_the_environment() -> None:
    code, out, _ = run("--no-use-hugepages", "--check-config", PEGAFLOW_USE_HUGEPAGES="true")
    assert code == 0
    assert json.loads(out)["use-hugepages"]["value"] == "false"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--pool-size", "30xb"), "flag --pool-size: '30xb' is no size"),
        (("--config", "/none.toml"), "/none.toml can't be read"),
    ],
)
def test_refusals_are_one_sentence_and_exit_2(flags: tuple[str, ...], says: str) -> None:
    code, _, err = run(*flags)
    assert code == 2
    assert sentence(err).startswith(says)


def test_unknown_flags_exit_2() -> None:
    code, _, err = run("--ssd-cache-path", "/x")
    assert code == 2
    assert "No such option" in err


def test_it_does_not_run_without_assertions() -> None:
    code, _, err = run("--check-config", python=("-O",))
    assert code == 2
    assert sentence(err).startswith("python -O takes the assertions out")


def test_help_lists_every_setting_and_loads_no_heavy_module() -> None:
    code, out, _ = run("--help")
    assert code == 0
    for option in config.OPTIONS:
        assert f"--{option.name}" in out
    script = (
        "import sys; from pegaflow.node import cli; "
        "print(sorted({'numpy', 'capnp', 'trio', 'starlette', 'hypercorn'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
