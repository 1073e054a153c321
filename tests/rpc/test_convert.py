"""Wire <-> model: what goes in comes out, what is malformed is a BadRequest with a field."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from pegaflow.errors import BadRequest
from pegaflow.model import messages as m
from pegaflow.model.keys import (
    BlockHash,
    InstanceId,
    LeaseToken,
    Manifest,
    Namespace,
    pack_hashes,
    unpack_hashes,
)
from pegaflow.model.layout import CudaIpc, GroupLayout, HandedOver, Region, Run
from pegaflow.rpc import convert, schema

U16, U32, U64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1)
NAMES = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=40)
TOKENS = st.binary(min_size=16, max_size=16)
NUMBERS = arrays.arrays(np.uint32, st.integers(0, 20), elements=st.integers(0, 2**32 - 1))
HASHES = st.integers(16, 64).flatmap(
    lambda width: st.lists(st.binary(min_size=width, max_size=width).map(BlockHash), max_size=12)
)
MANIFESTS = st.dictionaries(NAMES, st.text("abc", max_size=9), max_size=9).map(Manifest)
OPENS = st.builds(
    m.OpenRequest,
    U16,
    U16,
    NAMES,
    NAMES.map(InstanceId),
    NAMES.map(Namespace),
    MANIFESTS,
    st.integers(1, 4096),
    U64,
)
QUERIES = st.builds(m.QueryRequest, U16, HASHES, st.binary(max_size=64), NAMES)


def same(a: object, b: object) -> bool:
    """Equal, field by field, arrays included."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and bool(np.array_equal(a, b))
    if isinstance(a, tuple | list):
        return (
            isinstance(b, tuple | list)
            and len(a) == len(b)
            and all(same(x, y) for x, y in zip(a, b, strict=True))
        )
    if attrs.has(type(a)):
        names = list(attrs.fields_dict(type(a)))  # type: ignore[arg-type]  # it has attrs
        return type(a) is type(b) and all(same(getattr(a, n), getattr(b, n)) for n in names)
    return a == b


def through(  # type: ignore[explicit-any]  # functions of many types
    kind: str, write: Callable[..., None], read: Callable[..., object], value: object
) -> object:
    builder = getattr(schema.node, kind).new_message()
    write(builder, value)
    with getattr(schema.node, kind).from_bytes(builder.to_bytes()) as reader:
        return read(reader)


@st.composite
def registrations(draw: st.DrawFn) -> m.RegisterRequest:
    sources = st.builds(HandedOver, TOKENS, U16, U64) | st.builds(
        CudaIpc, st.binary(min_size=64, max_size=64), NAMES, U64
    )
    regions = tuple(
        draw(st.lists(st.builds(Region, st.integers(1 << 20, 1 << 40), sources), min_size=1))[:4]
    )
    runs = st.builds(
        Run,
        st.integers(0, len(regions) - 1),
        st.integers(0, 1000),
        st.integers(512, 1000),
        st.integers(1, 512),
    )
    groups = tuple(
        GroupLayout(number, draw(st.integers(1, 100)), tuple(draw(st.lists(runs, min_size=1))))
        for number in range(draw(st.integers(1, 3)))
    )
    slots = draw(st.integers(1, 4096))
    return m.RegisterRequest(draw(U32), draw(st.integers(0, slots - 1)), slots, regions, groups)


@given(OPENS)
def test_open(value: m.OpenRequest) -> None:
    got = through("OpenRequest", convert.write_open_request, convert.read_open_request, value)
    assert same(got, value)


@given(registrations())
def test_register(value: m.RegisterRequest) -> None:
    got = through(
        "RegisterRequest", convert.write_register_request, convert.read_register_request, value
    )
    assert same(got, value)


@given(QUERIES)
def test_query(value: m.QueryRequest) -> None:
    got = through("QueryRequest", convert.write_query_request, convert.read_query_request, value)
    assert same(got, value)


@given(st.builds(m.Ready, U32, TOKENS.map(LeaseToken), U32) | st.just(m.Loading()))
def test_query_reply(value: m.QueryReply) -> None:
    got = through("QueryResult", convert.write_query_reply, convert.read_query_reply, value)
    assert same(got, value)


@given(U32, TOKENS, U16, NUMBERS, U64)
def test_load(rank: int, token: bytes, group: int, ids: NDArray[np.uint32], deadline: int) -> None:
    value = m.LoadRequest(rank, LeaseToken(token), group, ids, ids[::-1].copy(), deadline)
    got = through("LoadRequest", convert.write_load_request, convert.read_load_request, value)
    assert same(got, value)


@given(U32, st.lists(st.tuples(U16, HASHES, st.binary(max_size=64)), max_size=4), U64)
def test_save(rank: int, parts: list[tuple[int, list[BlockHash], bytes]], deadline: int) -> None:
    runs = tuple(
        m.SaveRun(group, hashes, parent, np.arange(len(hashes), dtype=np.uint32))
        for group, hashes, parent in parts
    )
    value = m.SaveRequest(rank, runs, deadline)
    got = through("SaveRequest", convert.write_save_request, convert.read_save_request, value)
    assert same(got, value)


@given(st.builds(m.Saved, U32, U32, U32, U32), NUMBERS)
def test_results(saved: m.Saved, failed: NDArray[np.uint32]) -> None:
    assert same(through("Saved", convert.write_saved, convert.read_saved, saved), saved)
    loaded = m.Loaded(failed)
    assert same(through("Loaded", convert.write_loaded, convert.read_loaded, loaded), loaded)


@given(HASHES)
def test_hashes_are_cut_where_they_were_joined(hashes: list[BlockHash]) -> None:
    assert unpack_hashes(*pack_hashes(hashes)) == hashes


@pytest.mark.parametrize("width", [0, 15, 65, 31])
def test_hashes_of_a_wrong_width(width: int) -> None:
    with pytest.raises(BadRequest, match="width"):
        unpack_hashes(b"x" * 64, width)


def spoiled_open(**changes: object) -> object:
    builder = schema.node.OpenRequest.new_message()
    good = m.OpenRequest(1, 1, "c", InstanceId("i"), Namespace("n"), Manifest({"model": "x"}), 1, 0)
    convert.write_open_request(builder, good)
    for name, value in changes.items():
        setattr(builder, name, value)
    with schema.node.OpenRequest.from_bytes(builder.to_bytes()) as reader:
        return convert.read_open_request(reader)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"worldSize": 0}, "worldSize"),
        ({"worldSize": 4097}, "worldSize"),
        ({"instance": ""}, "instance"),
        ({"instance": "x" * 300}, "instance"),
        ({"namespace": "a\nb"}, "namespace"),
        ({"namespace": "ü" * 200}, "namespace"),
        ({"client": "x" * 300}, "client"),
    ],
)
def test_a_malformed_open_names_its_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        spoiled_open(**changes)
    assert caught.value.field == field


def test_a_manifest_field_twice() -> None:
    builder = schema.common.Manifest.new_message()
    for item in builder.init("fields", 2):
        item.name, item.value = "model", "x"
    with pytest.raises(BadRequest, match="twice"):
        convert.read_manifest(builder.as_reader())


REGION = Region(1000, HandedOver(b"t" * 16, 0, 0))


@pytest.mark.parametrize(
    ("groups", "slots", "field"),
    [
        ((), (0, 1), "groups"),
        ((GroupLayout(0, 1, (Run(0, 0, 8, 8),)),) * 2, (0, 1), "groups"),
        ((GroupLayout(0, 0, (Run(0, 0, 8, 8),)),), (0, 1), "blockCount"),
        ((GroupLayout(0, 1, ()),), (0, 1), "runs"),
        ((GroupLayout(0, 1, (Run(1, 0, 8, 8),)),), (0, 1), "runs.region"),
        ((GroupLayout(0, 1, (Run(0, 0, 8, 0),)),), (0, 1), "runs.lengthBytes"),
        ((GroupLayout(0, 2, (Run(0, 0, 4, 8),)),), (0, 1), "runs.strideBytes"),
        ((GroupLayout(0, 126, (Run(0, 0, 8, 8),)),), (0, 1), "runs.baseBytes"),
        ((GroupLayout(0, 1, (Run(0, 0, 8, 8),)),), (1, 1), "slotIndex"),
        ((GroupLayout(0, 1, (Run(0, 0, 8, 8),)),), (0, 5000), "slotIndex"),
    ],
)
def test_a_layout_that_leaves_its_region(
    groups: tuple[GroupLayout, ...], slots: tuple[int, int], field: str
) -> None:
    value = m.RegisterRequest(0, slots[0], slots[1], (REGION,), groups)
    with pytest.raises(BadRequest) as caught:
        through(
            "RegisterRequest", convert.write_register_request, convert.read_register_request, value
        )
    assert caught.value.field == field


def test_lists_that_do_not_match() -> None:
    one, two = np.zeros(1, np.uint32), np.zeros(2, np.uint32)
    load = m.LoadRequest(0, LeaseToken(b"l" * 16), 0, one, two, 0)
    with pytest.raises(BadRequest, match="one each"):
        through("LoadRequest", convert.write_load_request, convert.read_load_request, load)
    save = m.SaveRequest(0, (m.SaveRun(0, [BlockHash(bytes(32))], b"", two),), 0)
    with pytest.raises(BadRequest, match="one each"):
        through("SaveRequest", convert.write_save_request, convert.read_save_request, save)
    builder = schema.node.LoadRequest.new_message()
    builder.lease, builder.positions = b"l" * 16, b"abc"
    with pytest.raises(BadRequest, match="multiple of 4"):
        convert.read_load_request(builder.as_reader())
    builder.lease, builder.positions = b"short", b""
    with pytest.raises(BadRequest, match="must have 16"):
        convert.read_load_request(builder.as_reader())
