"""Every method of the node protocol as a pair: how to start it, how to read its answer.

The blocking and the Trio client share these, so a method is spelled once.  ``start`` gets the
capability and returns pycapnp's promise; ``read`` gets the answer and returns plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pegaflow.errors import BadRequest
from pegaflow.model import messages as m
from pegaflow.model.keys import LeaseToken
from pegaflow.rpc import convert, schema
from pegaflow.rpc.convert import Field, Struct

T = TypeVar("T")

NODE: object = schema.node.Node
"""The interface that a connection's bootstrap capability is cast to."""

Start = Callable[[object], object]
Read = Callable[[object], T]


def _pair(
    method: str, write: Callable[[Field], None], read: Callable[[Field], T]
) -> tuple[Start, Read[T]]:
    """``write`` fills the call's parameters, ``read`` takes its results struct."""

    def start(capability: object) -> object:
        request: Field = getattr(capability, f"{method}_request")()
        trouble = ""
        try:
            write(request)
        except Exception as exc:  # a number out of range, text that does not encode
            trouble = type(exc).__name__
        if trouble:  # raised out here: no context that would keep capnp objects
            raise BadRequest(f"{method}: a value does not fit the wire's types ({trouble})", method)
        return request.send()

    return start, read  # type: ignore[return-value]  # pycapnp's answers are untyped


def health() -> tuple[Start, Read[m.Health]]:
    """``Node.health``."""
    return _pair("health", lambda _: None, lambda answer: convert.read_health(answer.health))


def statistics() -> tuple[Start, Read[str]]:
    """``Node.statistics``."""
    return _pair("statistics", lambda _: None, lambda answer: str(answer.json))


def shutdown(grace_ms: int, boot_id: bytes) -> tuple[Start, Read[None]]:
    """``Node.shutdown``."""

    def write(request: Struct) -> None:
        request.graceMillis, request.bootId = grace_ms, boot_id

    return _pair("shutdown", write, _read_nothing)


def open_session(request: m.OpenRequest) -> tuple[Start, Read[m.Opened]]:
    """``Node.open``; the capability is taken out by :func:`session_of`."""
    return _pair(
        "open",
        lambda call: convert.write_open_request(call.request, request),
        lambda answer: convert.read_opened(convert.read_result(answer.result)),
    )


def session_of(answer: object) -> object:
    """The Session capability in the answer of ``open``."""
    return answer.result.ok.session  # type: ignore[attr-defined]  # pycapnp's answers are untyped


def register(request: m.RegisterRequest) -> tuple[Start, Read[int]]:
    """``Session.register``."""
    return _pair(
        "register",
        lambda call: convert.write_register_request(call.request, request),
        lambda answer: int(convert.read_result(answer.result).ranksMissing),
    )


def query(request: m.QueryRequest) -> tuple[Start, Read[m.QueryReply]]:
    """``Session.query``."""
    return _pair(
        "query",
        lambda call: convert.write_query_request(call.request, request),
        lambda answer: convert.read_query_reply(answer.result),
    )


def load(request: m.LoadRequest) -> tuple[Start, Read[m.Loaded]]:
    """``Session.load``."""
    return _pair(
        "load",
        lambda call: convert.write_load_request(call.request, request),
        lambda answer: convert.read_loaded(convert.read_result(answer.result)),
    )


def save(request: m.SaveRequest) -> tuple[Start, Read[m.Saved]]:
    """``Session.save``."""
    return _pair(
        "save",
        lambda call: convert.write_save_request(call.request, request),
        lambda answer: convert.read_saved(convert.read_result(answer.result)),
    )


def release(leases: Sequence[LeaseToken]) -> tuple[Start, Read[None]]:
    """``Session.release``."""

    def write(request: Struct) -> None:
        request.leases = list(leases)

    return _pair("release", write, _read_nothing)


def renew(lease: LeaseToken) -> tuple[Start, Read[int]]:
    """``Session.renew``."""

    def write(request: Struct) -> None:
        request.lease = lease

    def read(answer: Field) -> int:
        if str(answer.result.which()) == "error":
            raise convert.read_error(answer.result.error)
        return int(answer.result.ttlMillis)

    return _pair("renew", write, read)


def unregister() -> tuple[Start, Read[None]]:
    """``Session.unregister``."""
    return _pair("unregister", lambda _: None, _read_nothing)


def ping() -> tuple[Start, Read[bytes]]:
    """``Session.ping``."""
    return _pair("ping", lambda _: None, lambda answer: bytes(answer.bootId))


def _read_nothing(answer: Field) -> None:
    convert.read_result(answer.result)
