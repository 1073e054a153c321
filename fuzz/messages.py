"""Valid messages of the node protocol, byte by byte, and ways to spoil them."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import capnp
import numpy as np

from pegaflow.model import messages as m
from pegaflow.model.keys import (
    REQUIRED_MANIFEST_FIELDS,
    BlockHash,
    InstanceId,
    LeaseToken,
    Manifest,
    Namespace,
)
from pegaflow.model.layout import CudaIpc, GroupLayout, HandedOver, Region, Run
from pegaflow.rpc import convert, schema

_SITE = str(Path(capnp.__file__).resolve().parent.parent)
rpc = capnp.load(str(Path(capnp.__file__).parent / "rpc.capnp"), imports=[_SITE])

MANIFEST = Manifest(dict.fromkeys(REQUIRED_MANIFEST_FIELDS, "fuzz"))
MARK = 0x5A5B5C5D
"""Question id of template calls; :func:`renumbered` puts a fresh one in its place."""

SENTINEL_QUESTION = 0x5EED
"""The question id of the bootstrap request that ends a stream: its answer shows that all before it
was read."""

EVIL_WORDS = (
    0, 1, 2, 3, 2**64 - 1, 0x7FFFFFFF00000001, 0xFFFFFFFF00000001, 0x0000000100000002,
    0xFFFFFFF9FFFFFFFD, 0xFFFFFFFF00000003, 0xFFFFFFFC, 0xFFFFFFFFFFFFFFFC, 0x0001000100000000,
    0xFFFFFFFF00000000, 0xFFFFFFFFFFFFFFFE, 0x0000000800000006, 3 | (2**28 << 32),
)  # fmt: skip
EVIL_HEADERS = (
    struct.pack("<II", 0xFFFFFFFF, 5),
    struct.pack("<II", 511, 1),
    struct.pack("<II", 510, 1) + b"\1\0\0\0" * 600,
    struct.pack("<II", 0, 0xFFFFFFFF),
    struct.pack("<II", 0, 8 << 20),
    struct.pack("<II", 0, 0),
    struct.pack("<II", 1, 0) + struct.pack("<II", 0, 0),
    struct.pack("<II", 0x7FFFFFFF, 1),
    struct.pack("<II", 3, 0xFFFFFFFF) + struct.pack("<IIII", 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0),
)
SELF_POINTER = struct.pack("<iHH", -4, 0, 1)

Fill = Callable[[object], None]


def bootstrap(question: int) -> bytes:
    """Ask for the main capability."""
    message = rpc.Message.new_message()
    message.init("bootstrap").questionId = question
    return bytes(message.to_bytes())


def _call(
    question: int, interface: object, method: str, asked: int, path: tuple[int, ...], fill: Fill
) -> bytes:
    """A call on the capability at ``path`` inside the answer to question ``asked``."""
    known = interface.schema  # type: ignore[attr-defined]  # pycapnp is untyped
    found = known.methods[method]
    message = rpc.Message.new_message()
    call = message.init("call")
    call.questionId = question
    target = call.init("target").init("promisedAnswer")
    target.questionId = asked
    for step, pointer in zip(target.init("transform", len(path)), path, strict=True):
        step.getPointerField = pointer
    call.interfaceId = known.node.id
    call.methodId = list(known.method_names).index(method)
    params = capnp._MallocMessageBuilder().init_root(found.param_type)
    fill(params)
    call.init("params").content = params
    return bytes(message.to_bytes())


def _session(question: int, method: str, fill: Fill) -> bytes:
    return _call(question, schema.node.Session, method, 1, (0, 0, 0), fill)


def _request(write: Callable[..., None], value: object) -> Fill:
    return lambda params: write(params.request, value)  # type: ignore[attr-defined]


def conversation(dice: random.Random, instance: str) -> list[bytes]:
    """What a whole life of a client sends, pipelined: bootstrap, open, then session calls."""
    hashes = [BlockHash(dice.randbytes(32)) for _ in range(dice.randint(1, 12))]
    count = len(hashes)
    ids = np.arange(count, dtype=np.uint32)
    deadline = time.monotonic_ns() + 10**9
    lease = LeaseToken(dice.randbytes(16))
    opened = m.OpenRequest(
        1, 1, "fuzz", InstanceId(instance), Namespace("fuzz"), MANIFEST, 1, time.monotonic_ns()
    )
    source = (
        HandedOver(dice.randbytes(16), 0, 0) if dice.random() < 0.7
        else CudaIpc(dice.randbytes(64), "GPU-0", 0)
    )  # fmt: skip
    registered = m.RegisterRequest(
        0, 0, 1, (Region(1 << 16, source),), (GroupLayout(0, 16, (Run(0, 0, 4096, 4096),)),)
    )
    calls = [
        _session(2, "register", _request(convert.write_register_request, registered)),
        _session(
            3,
            "query",
            _request(convert.write_query_request, m.QueryRequest(0, hashes, b"", "r")),
        ),
        _session(
            4,
            "save",
            _request(
                convert.write_save_request,
                m.SaveRequest(0, (m.SaveRun(0, hashes, b"", ids),), deadline),
            ),
        ),
        _session(
            5,
            "load",
            _request(convert.write_load_request, m.LoadRequest(0, lease, 0, ids, ids, deadline)),
        ),
        _session(6, "release", lambda p: setattr(p, "leases", [lease])),
        _session(7, "renew", lambda p: setattr(p, "lease", lease)),
        _session(8, "ping", lambda p: None),
        _call(9, schema.node.Node, "health", 0, (), lambda p: None),
        _call(10, schema.node.Node, "statistics", 0, (), lambda p: None),
        _session(11, "unregister", lambda p: None),
    ]
    dice.shuffle(calls)
    start = [
        bootstrap(0),
        _call(1, schema.node.Node, "open", 0, (), _request(convert.write_open_request, opened)),
    ]
    return start + calls


def hostile(dice: random.Random) -> bytes:
    """A well-formed rpc.Message with content that no client sends."""
    message = rpc.Message.new_message()
    number = dice.choice([0, 1, 2, 3, 5, 1000, 2**31, 2**32 - 1])
    kind = dice.choice(_KINDS)
    if kind == "call":
        _hostile_call(dice, message.init("call"), number)
    elif kind == "return":
        _hostile_return(dice, message.init("return"), number)
    elif kind == "finish":
        part = message.init("finish")
        part.questionId, part.releaseResultCaps = number, dice.random() < 0.5
    elif kind == "resolve":
        part = message.init("resolve")
        part.promiseId = number
        part.init("cap").senderHosted = dice.choice([0, 1, 2**32 - 1])
    elif kind == "release":
        part = message.init("release")
        part.id, part.referenceCount = number, dice.choice([0, 1, 2, 2**32 - 1])
    elif kind == "disembargo":
        part = message.init("disembargo")
        part.init("target").importedCap = number
        part.context.senderLoopback = number
    elif kind == "abort":
        message.init("abort").reason = "a" * dice.choice([0, 100, 10000])
    elif kind == "unimplemented":
        message.init("unimplemented").init("call").questionId = number
    else:
        message.init(kind).questionId = number
    return bytes(message.to_bytes())


_KINDS = (
    "call", "call", "call", "return", "finish", "resolve", "release", "disembargo", "bootstrap",
    "provide", "accept", "join", "abort", "unimplemented",
)  # fmt: skip


def _hostile_call(dice: random.Random, call: object, number: int) -> None:
    assert hasattr(call, "init")
    call.questionId = number  # type: ignore[attr-defined]
    target = call.init("target")
    if dice.random() < 0.5:
        target.importedCap = dice.choice([0, 1, 2, 99, 2**32 - 1])
    else:
        answer = target.init("promisedAnswer")
        answer.questionId = dice.choice([0, 1, 2, 77, 2**32 - 1])
        for step in answer.init("transform", dice.choice([0, 1, 3, 100])):
            step.getPointerField = dice.choice([0, 1, 2, 65535])
    interface = dice.choice([schema.node.Node, schema.node.Session])
    call.interfaceId = dice.choice(  # type: ignore[attr-defined]
        [0xDEADBEEF, interface.schema.node.id]
    )
    method = dice.choice([0, 1, 2, 3, 4, 5, 6, 7, 9, 65535])
    call.methodId = method  # type: ignore[attr-defined]
    if dice.random() < 0.4:
        for entry in call.init("params").init("capTable", dice.choice([0, 1, 3, 200])):
            what = dice.choice(["senderHosted", "senderPromise", "receiverHosted"])
            setattr(entry, what, dice.choice([0, 1, 2, 2**32 - 1]))


def _hostile_return(dice: random.Random, answer: object, number: int) -> None:
    assert hasattr(answer, "init")
    answer.answerId = number  # type: ignore[attr-defined]
    what = dice.choice(["results", "exception", "canceled", "takeFromOtherQuestion"])
    if what == "results":
        answer.init("results")
    elif what == "exception":
        answer.init("exception").reason = "x" * dice.choice([0, 10, 5000])
    elif what == "canceled":
        answer.canceled = None  # type: ignore[attr-defined]
    else:
        answer.takeFromOtherQuestion = number  # type: ignore[attr-defined]


def calls_to_spoil(dice: random.Random, instance: str) -> list[bytes]:
    """Valid calls behind an opened session, with :data:`MARK` for their question."""
    number = struct.pack("<I", MARK)
    return [
        _with_question(call, number) for call in conversation(dice, instance)[2:] if len(call) > 160
    ]


def _with_question(call: bytes, number: bytes) -> bytes:
    """The question id is the first data word of the Call struct: behind header and Message."""
    at = 8 + 8 + 16
    return call[:at] + number + call[at + 4 :]


def renumbered(call: bytes, question: int) -> bytes:
    """The same call under another question id: one that is in use would end the connection."""
    return _with_question(call, struct.pack("<I", question))


ENVELOPE_BYTES = 8 + 19 * 8
"""Frame header, Message, Call, target and Payload: behind them a call's parameters begin."""


def body_start(message: bytes) -> int:
    """Where the segments begin behind the frame's header."""
    segments: int = struct.unpack_from("<I", message)[0] + 1
    return (4 + 4 * segments + 7) & ~7


def spoil_body(dice: random.Random, message: bytes, start: int = 0) -> bytes:
    """Damage the content and leave the frame's length right, so that the stream stays in step.

    From byte ``start`` on: with :data:`ENVELOPE_BYTES` only a call's parameters, which its method
    meets; else also the envelope, which ends the connection as a rule.
    """
    out = bytearray(message)
    start = start or body_start(message)
    kind = dice.randrange(4)
    if kind == 0:
        for _ in range(dice.randint(1, 12)):
            out[dice.randrange(start, len(out))] ^= 1 << dice.randrange(8)
    elif kind == 1:
        for _ in range(dice.randint(1, 5)):
            at = dice.randrange(start, len(out), 8)
            out[at : at + 8] = struct.pack("<Q", dice.choice(EVIL_WORDS))
    elif kind == 2:
        for at in range(start, len(out), 8):
            if dice.random() < 0.15:
                out[at : at + 8] = SELF_POINTER
    else:
        at = dice.randrange(start, len(out), 8)
        size = dice.randint(8, 64)
        out[at : at + size] = dice.randbytes(len(out[at : at + size]))
    return bytes(out)


def spoil_stream(dice: random.Random, stream: bytes) -> bytes:
    """Damage the framing itself: what follows means nothing any more."""
    kind = dice.randrange(4)
    if kind == 0:
        return dice.randbytes(dice.randint(1, 4096))
    if kind == 1:
        return stream[: dice.randrange(1, len(stream))]
    if kind == 2:
        return dice.choice(EVIL_HEADERS) + (stream[8:] if dice.random() < 0.5 else b"")
    out = bytearray(stream)
    for _ in range(dice.randint(1, 16)):
        out[dice.randrange(len(out))] ^= 1 << dice.randrange(8)
    return bytes(out)


def unique_name() -> str:
    """Instances of one name must not meet."""
    return f"fuzz-{os.getpid()}-{time.monotonic_ns()}"
