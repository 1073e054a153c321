"""Where a block lies in an engine's KV tensors, derived from shapes and strides alone.

No layout of any engine is written down here.  In each tensor one dimension counts blocks; the rest
of the strides say which contiguous pieces a block consists of.  Pieces of all layers are put in
memory order and neighbours are joined: a layout in which a block is one range gives one run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from pegaflow.errors import BadRequest
from pegaflow.model.layout import GroupLayout, Run


@attrs.frozen
class TensorView:
    """One layer's tensor: a view into allocation number ``region``.  Strides are in bytes."""

    name: str
    dtype: str
    region: int
    offset_bytes: int
    item_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]


@attrs.frozen
class _Axis:
    """A dimension that is not the block's: its number, size and stride."""

    number: int
    size: int
    stride: int


@attrs.frozen
class _Piece:
    """A contiguous part of block 0 of one layer."""

    region: int
    base: int
    stride: int
    length: int
    layer: str


def block_layout(
    views: Sequence[TensorView], block_count: int, group: int = 0
) -> tuple[GroupLayout, str]:
    """The layout of one group of one rank, and a fingerprint of what a slot's bytes mean.

    The fingerprint covers names, types, the order of dimensions and the order of pieces, but
    neither addresses nor the number of blocks: equal fingerprints mean interchangeable bytes.
    Raises :exc:`BadRequest` for a tensor that has no dimension of blocks.
    """
    pieces: list[_Piece] = []
    meaning: list[str] = []
    for view in _distinct(views):
        stride, axes = split_block_axis(view, block_count)
        offsets, length = contiguous_pieces(axes, view.item_bytes)
        order = [f"{axis.number}:{axis.size}" for axis in axes]
        meaning.append(f"{view.name} {view.dtype} {view.item_bytes} {' '.join(order)}")
        pieces += [
            _Piece(view.region, view.offset_bytes + int(at), stride, length, view.name)
            for at in offsets
        ]
    pieces.sort(key=lambda piece: (piece.region, piece.base))
    meaning += [f"{piece.layer} {piece.length}" for piece in pieces]
    runs = tuple(Run(p.region, p.base, p.stride, p.length) for p in pieces)
    if block_count == 1:  # a stride without a second block means nothing; the wire wants one
        runs = tuple(attrs.evolve(run, stride_bytes=run.length_bytes) for run in runs)
    digest = hashlib.sha256("\n".join(meaning).encode()).hexdigest()
    return GroupLayout(group, block_count, runs).merged(), digest


def split_block_axis(view: TensorView, block_count: int) -> tuple[int, list[_Axis]]:
    """(stride of a block, all other dimensions in memory order).

    The dimension may count *kernel* blocks, several to a block: they stay as a dimension.
    """
    axes = [
        _Axis(number, size, stride)
        for number, (size, stride) in enumerate(zip(view.shape, view.strides_bytes, strict=True))
    ]
    blocks = next((a for a in axes if a.size >= block_count and a.size % block_count == 0), None)
    if blocks is None:
        raise BadRequest(
            f"layer {view.name}: no dimension of {view.shape} is a multiple of {block_count} blocks"
        )
    kernel_blocks = blocks.size // block_count
    axes[blocks.number] = attrs.evolve(blocks, size=kernel_blocks)
    axes = [axis for axis in axes if axis.size > 1]
    axes.sort(key=lambda axis: (-axis.stride, axis.number))
    return blocks.stride * kernel_blocks, axes


def contiguous_pieces(axes: Sequence[_Axis], item_bytes: int) -> tuple[NDArray[np.int64], int]:
    """(offsets of the pieces of one block in rising order, bytes of each)."""
    length, kept = item_bytes, len(axes)
    while kept and axes[kept - 1].stride == length:
        kept -= 1
        length *= axes[kept].size
    offsets = np.zeros(1, np.int64)
    for axis in axes[:kept]:
        offsets = (offsets[:, None] + np.arange(axis.size, dtype=np.int64) * axis.stride).ravel()
    return np.sort(offsets), length


def _distinct(views: Sequence[TensorView]) -> list[TensorView]:
    """Layers that share one tensor count once; the first name in order stands for all."""
    seen: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], TensorView] = {}
    for view in sorted(views, key=lambda view: view.name):
        key = (view.region, view.offset_bytes, view.shape, view.strides_bytes)
        seen.setdefault(key, view)
    return list(seen.values())
