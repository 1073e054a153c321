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
@pytest.mark.parametrize(
    ("batched", "staged_below"),
    [(True, 0), (False, 0), (True, 1 << 40)],
    ids=["batched", "one by one", "staged"],
)
async def test_cuda_engine_on_a_pretended_device(
    case: Case, batched: bool, staged_below: int
) -> None:
    cuda = fake_cuda.FakeCuda(batched, staged_below)
    await case(World(cuda.open_engine, cuda.make_memory))
    assert not cuda.open_handles, "a handle stayed open"
    assert not cuda.open_events, "an event was not destroyed"
    assert not cuda.allocated, "device memory was not given back"
