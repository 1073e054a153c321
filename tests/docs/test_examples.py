"""The examples of the documentation do what they say, against a real daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pegaflow.testing.daemon import running_daemon

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert {"blocking_engine", "trio_session"} <= {path.stem for path in EXAMPLES}


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    """Each takes the daemon's address as its argument and asserts its own claims."""
    with running_daemon("--devices", "none", folder=tmp_path) as daemon:
        answer = subprocess.run(
            [sys.executable, str(example), daemon.address],
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert answer.stdout, "an example says what it saw"
        assert daemon.stop() == 0, daemon.log_tail()
