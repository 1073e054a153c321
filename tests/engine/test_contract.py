"""The promise of engine/base.py, kept by the host engine and by the CUDA engine's own half."""

from __future__ import annotations

import fake_cuda
import host_memory
import pytest

from pegaflow.testing.contract import CASES, Case, World

pytestmark = pytest.mark.slow
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


@by_name
async def test_host_engine(case: Case) -> None:
    await case(World(host_memory.open_engine, host_memory.make_memory))


@by_name
@pytest.mark.parametrize("batched", [True, False])
async def test_cuda_engine_on_a_pretended_device(case: Case, batched: bool) -> None:
    cuda = fake_cuda.FakeCuda(batched)
    await case(World(cuda.open_engine, cuda.make_memory))
    assert not cuda.open_handles, "a handle stayed open"
    assert not cuda.open_events, "an event was not destroyed"
