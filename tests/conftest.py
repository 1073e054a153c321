"""Which tests run, and with which chances."""

from __future__ import annotations

import os
import random
from pathlib import Path

import hypothesis
import hypothesis.core
import pytest

import pegaflow

# No deadlines: a busy machine is not a finding.
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True)
hypothesis.settings.register_profile("quick", deadline=None, print_blob=True, max_examples=30)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-profile") is None:
        hypothesis.settings.load_profile("ci" if config.getoption("--run-slow") else "quick")
    if config.getoption("--hypothesis-seed") is None:
        hypothesis.core.global_force_seed = random.getrandbits(32)  # type: ignore[assignment]  # None or a number


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Where the package comes from, and how to have the same chances again."""
    seed = config.getoption("--hypothesis-seed")
    if seed is None:
        seed = hypothesis.core.global_force_seed
    return [
        f"pegaflow {pegaflow.__version__} from {Path(pegaflow.__file__).parent}",
        f"repeat the random choices with --hypothesis-seed={seed}",
    ]


def pytest_sessionstart(session: pytest.Session) -> None:
    """CI tests the wheel: the checkout must not shadow it."""
    if os.environ.get("PEGAFLOW_EXPECT_WHEEL") and "site-packages" not in pegaflow.__file__:
        pytest.exit(f"the wheel is not what is tested: pegaflow is {pegaflow.__file__}", 3)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons: dict[str, pytest.MarkDecorator] = {}
    if not config.getoption("--run-slow"):
        reasons["slow"] = pytest.mark.skip(reason="slow: --run-slow runs it")
    if not os.environ.get("PEGAFLOW_VLLM_PYTHONS"):
        reasons["vllm"] = pytest.mark.skip(reason="PEGAFLOW_VLLM_PYTHONS names no engine")
    if not Path("/dev/nvidiactl").exists():
        reasons["gpu"] = pytest.mark.skip(reason="no NVIDIA GPU here")
    for item in items:
        for name, skip in reasons.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)
