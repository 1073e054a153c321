"""Shared memory, and layouts out of arrays."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegaflow.client.memory import SharedMemory, hand_over, layout_of
from pegaflow.errors import BadRequest, PeerGone


def test_shared_memory_is_behind_its_descriptor_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names
    memory = SharedMemory(1 << 16)
    memory.view[100:104] = [1, 2, 3, 4]
    assert os.pread(memory.fd, 4, 100) == b"\1\2\3\4"
    memory.close()
    memory.close()
    assert (set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))) == before  # noqa: PTH208


def test_hand_over_to_nobody(tmp_path: Path) -> None:
    with pytest.raises(PeerGone, match="hand-over"):
        hand_over(str(tmp_path / "none"), [0], 1)
    for fds in ([], [0] * 65):
        with pytest.raises(BadRequest, match="descriptors"):
            hand_over("@nobody", fds, 1)


@given(
    layers=st.integers(1, 4),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    blocks=st.integers(1, 5),
    block_axis=st.integers(0, 1),
    padding=st.integers(0, 3),
)
def test_a_layout_reaches_exactly_the_bytes_of_a_block(
    layers: int, shape: list[int], blocks: int, block_axis: int, padding: int
) -> None:
    axis = min(block_axis, len(shape))
    whole = [*shape]
    if axis < len(shape):
        whole[-1] += padding
    whole.insert(axis, blocks)
    size = int(np.prod(whole))
    memory = np.arange(layers * size, dtype=np.uint16)
    views = [memory[i * size : (i + 1) * size].reshape(whole) for i in range(layers)]
    if padding and axis < len(shape):
        views = [view[..., : shape[-1]] for view in views]
    base = memory.__array_interface__["data"][0]
    layout = layout_of(views, region=0, base_address=base, block_axis=axis)
    raw, want = memory.view(np.uint8), b""
    for block in range(blocks):
        got = b"".join(
            raw[
                run.base_bytes + block * run.stride_bytes :
                run.base_bytes + block * run.stride_bytes + run.length_bytes
            ].tobytes()
            for run in layout.runs
        )  # fmt: skip
        want = b"".join(np.take(view, block, axis).tobytes() for view in views)
        assert got == want
    assert layout.slot_bytes == len(want)


def test_layers_with_different_block_counts() -> None:
    with pytest.raises(BadRequest, match="groups of their own"):
        layout_of([np.zeros((2, 4)), np.zeros((3, 4))], region=0, base_address=0)
