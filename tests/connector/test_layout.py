"""Strides to runs, against NumPy's own indexing."""

from __future__ import annotations

import attrs
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from pegaflow.connector.layout import TensorView, block_layout
from pegaflow.errors import BadRequest
from pegaflow.model.layout import GroupLayout, HandedOver, Region


def view_of(array: NDArray[np.uint32], memory: NDArray[np.uint8], name: str) -> TensorView:
    base = array.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    return TensorView(name, str(array.dtype), 0, base, array.itemsize, array.shape, array.strides)


def read_slot(memory: NDArray[np.uint8], layout: GroupLayout, block: int) -> bytes:
    parts = [memory[r.base_bytes + block * r.stride_bytes :][: r.length_bytes] for r in layout.runs]
    return b"".join(part.tobytes() for part in parts)


Case = tuple[NDArray[np.uint8], list[NDArray[np.uint32]], int, int]
"""Memory, a view a layer, blocks, kernel blocks a block."""


@st.composite
def layouts(draw: st.DrawFn) -> Case:
    """All layers of a model as views [B*k, H, N, C] (any order) of one allocation in any order."""
    sizes = {
        "L": draw(st.integers(1, 4)),
        "B": draw(st.integers(2, 5)),
        "H": draw(st.integers(1, 3)),
        "N": draw(st.integers(1, 4)),
        "C": draw(st.integers(1, 4)),
    }
    kernel = draw(st.sampled_from([1, 1, 2]))
    physical = draw(st.permutations("LBHNC"))
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.uint32]))
    full = {**sizes, "B": sizes["B"] * kernel}
    shape = [full[axis] for axis in physical]
    count = int(np.prod(shape))
    lead = draw(st.integers(0, 3)) * 8
    memory = np.zeros(lead + count * np.dtype(dtype).itemsize, np.uint8)
    memory[:] = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 256, len(memory))
    array = memory[lead:].view(dtype).reshape(shape)
    logical = draw(st.permutations("BHNC"))
    # The dimension of blocks is the first whose size fits; keep smaller ones from looking alike.
    logical = ["B", *(axis for axis in logical if axis != "B")]
    order = [physical.index(axis) for axis in ("L", *logical)]
    whole = array.transpose(order)
    return memory, [whole[layer] for layer in range(sizes["L"])], sizes["B"], kernel


@given(layouts())
def test_a_slot_is_exactly_the_bytes_of_its_block(case: Case) -> None:
    memory, layers, count, kernel = case
    views = [view_of(layer, memory, f"layer.{i}") for i, layer in enumerate(layers)]
    layout, _ = block_layout(views, count)
    layout.check([Region(len(memory), HandedOver(b"t" * 16, 0, 0))])
    for block in range(count):
        wanted = np.concatenate(
            [layer[block * kernel : (block + 1) * kernel].ravel() for layer in layers]
        )
        assert len(wanted) * wanted.itemsize == layout.slot_bytes
        got = np.frombuffer(read_slot(memory, layout, block), wanted.dtype)
        assert sorted(got.tolist()) == sorted(wanted.tolist())


@given(layouts(), st.data())
def test_copying_slots_moves_blocks(case: Case, data: st.DataObject) -> None:
    """Slot bytes written back to another block give, tensor by tensor, the same block."""
    memory, layers, count, kernel = case
    views = [view_of(layer, memory, f"layer.{i}") for i, layer in enumerate(layers)]
    layout, _ = block_layout(views, count)
    source, target = data.draw(st.permutations(range(count)))[:2]
    wanted = [layer[source * kernel : (source + 1) * kernel].tobytes() for layer in layers]
    others = [
        layer[b * kernel : (b + 1) * kernel].tobytes()
        for layer in layers
        for b in range(count)
        if b != target
    ]
    slot, at = read_slot(memory, layout, source), 0
    for run in layout.runs:
        start = run.base_bytes + target * run.stride_bytes
        memory[start : start + run.length_bytes] = np.frombuffer(
            slot[at : at + run.length_bytes], np.uint8
        )
        at += run.length_bytes
    assert wanted == [layer[target * kernel : (target + 1) * kernel].tobytes() for layer in layers]
    assert others == [
        layer[b * kernel : (b + 1) * kernel].tobytes()
        for layer in layers
        for b in range(count)
        if b != target
    ]


def stacked(order: str, blocks: int = 6) -> tuple[NDArray[np.uint8], list[TensorView]]:
    sizes = {"L": 3, "B": blocks, "H": 2, "N": 4, "C": 8}
    memory = np.zeros(int(np.prod(list(sizes.values()))), np.uint8)
    array = memory.reshape([sizes[axis] for axis in order])
    whole = array.transpose([order.index(axis) for axis in "LBHNC"])
    return memory, [view_of(whole[i], memory, f"model.layers.{i}.attn") for i in range(3)]


@pytest.mark.parametrize("order", ["BLHNC", "BLNHC", "BHLNC"])
def test_block_outer_layouts_give_one_run(order: str) -> None:
    _, views = stacked(order)
    layout, _ = block_layout(views, 6)
    assert len(layout.runs) == 1
    assert layout.slot_bytes == 3 * 2 * 4 * 8


@pytest.mark.parametrize(("order", "runs"), [("LBHNC", 3), ("LBNHC", 3), ("LHBNC", 6)])
def test_layer_outer_layouts_give_a_run_a_piece(order: str, runs: int) -> None:
    _, views = stacked(order)
    assert len(block_layout(views, 6)[0].runs) == runs


def test_the_fingerprint_is_about_content_not_about_size() -> None:
    prints = {order: block_layout(stacked(order)[1], 6)[1] for order in ("LBHNC", "LBNHC", "BHLNC")}
    assert len(set(prints.values())) == 3
    assert block_layout(stacked("LBHNC", 60)[1], 60)[1] == prints["LBHNC"]
    assert block_layout(stacked("LHBNC", 60)[1], 60)[1] == block_layout(stacked("LHBNC")[1], 6)[1]


def test_the_fingerprint_covers_names_and_types() -> None:
    _, views = stacked("LBHNC")
    base = block_layout(views, 6)[1]
    assert block_layout([attrs.evolve(views[0], name="x"), *views[1:]], 6)[1] != base
    assert block_layout([attrs.evolve(views[0], dtype="int8"), *views[1:]], 6)[1] != base


def test_layers_that_share_a_tensor_count_once() -> None:
    _, views = stacked("LBHNC")
    shared = [*views, attrs.evolve(views[0], name="model.layers.9.attn")]
    assert block_layout(shared, 6)[0] == block_layout(views, 6)[0]


def test_padding_behind_a_block_is_not_copied() -> None:
    view = TensorView("mamba", "int8", 0, 0, 1, (4, 1, 1, 68608), (131072, 68608, 68608, 1))
    layout, _ = block_layout([view], 4)
    assert [(r.stride_bytes, r.length_bytes) for r in layout.runs] == [(131072, 68608)]


def test_keys_and_values_half_a_tensor_apart() -> None:
    view = TensorView("old", "bf16", 0, 0, 2, (2, 8, 4, 16), (1024, 128, 32, 2))
    layout, _ = block_layout([view], 8)
    assert [(r.base_bytes, r.stride_bytes, r.length_bytes) for r in layout.runs] == [
        (0, 128, 128),
        (1024, 128, 128),
    ]


def test_a_tensor_without_blocks_is_refused() -> None:
    with pytest.raises(BadRequest, match="no dimension"):
        block_layout([TensorView("x", "int8", 0, 0, 1, (3, 4), (4, 1))], 7)
