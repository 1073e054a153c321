"""Helpers beside the tests are imported by their bare names."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    """As in the daemon: a collection in a client's thread must not meet the server's objects."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()
