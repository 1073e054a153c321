"""Mutated byte streams against a live daemon, many connections at a time."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct
import time
from collections import Counter

import attrs

from fuzz import messages
from fuzz.target import Target

CONNECTIONS = 24
PATIENCE_SECONDS = 3.0
CHUNK_BYTES = 1 << 16

Template = tuple[list[bytes], list[bytes]]
"""A whole conversation, and calls of one whose parameters may be spoiled."""


@attrs.define(eq=False)
class _Stream:
    """One connection's bytes, and how far it got."""

    sock: socket.socket
    out: memoryview
    spoiled: int
    """Spoiled messages in it; all count if the sentinel behind them is answered, else one."""
    ending: str
    due: float
    got: bytearray = attrs.field(factory=bytearray)


def run(target: Target, dice: random.Random, count: int) -> Counter[str]:
    """Send streams until ``count`` spoiled messages were taken in; returns how they ended.

    A stream is a valid conversation with spoiled and hostile messages among it, then either the
    sentinel or a broken frame.  Then the connection is half-closed, closed, reset or kept.
    """
    ended: Counter[str] = Counter()
    templates = _templates(dice)
    with selectors.DefaultSelector() as selector:
        streams = 0
        while ended["inputs"] < count or selector.get_map():
            if ended["inputs"] < count and len(selector.get_map()) < CONNECTIONS:
                streams += 1
                _begin(target, selector, dice, templates, ended)
                if streams % 2000 == 0:
                    templates = _templates(dice)
                    target.check()
                continue
            _turn(selector, ended)
    target.check()
    return ended


def _begin(
    target: Target,
    selector: selectors.BaseSelector,
    dice: random.Random,
    templates: list[Template],
    ended: Counter[str],
) -> None:
    stream, spoiled = _stream(dice, templates)
    target.remember(stream)
    sock = target.connect()
    ending = dice.choice(["half-close", "half-close", "close", "reset", "keep"])
    made = _Stream(sock, memoryview(stream), spoiled, ending, time.monotonic() + PATIENCE_SECONDS)
    ended["connections"] += 1
    selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, made)


def _templates(dice: random.Random) -> list[Template]:
    """Conversations with fresh deadlines; made anew now and then."""
    return [
        (
            messages.conversation(dice, messages.unique_name()),
            messages.calls_to_spoil(dice, messages.unique_name()),
        )
        for _ in range(24)
    ]


def _stream(dice: random.Random, templates: list[Template]) -> tuple[bytes, int]:
    """Bytes of one connection, and how many spoiled messages are in them."""
    valid, calls = dice.choice(templates)
    if dice.random() < 0.7:
        # A session whose calls have garbage for parameters: it should live through all of them.
        spoiled = dice.randint(20, 60)
        parts = valid[:2] + [
            messages.spoil_body(
                dice,
                messages.renumbered(dice.choice(calls), 100 + question),
                messages.ENVELOPE_BYTES,
            )
            for question in range(spoiled)
        ]
        if dice.random() < 0.7:
            return b"".join(parts) + messages.bootstrap(messages.SENTINEL_QUESTION), spoiled
    else:
        spoiled = dice.randint(1, 3)
        parts = list(valid) if dice.random() < 0.8 else [messages.bootstrap(0)]
        for _ in range(spoiled):
            part = messages.hostile(dice)
            if dice.random() < 0.5:
                part = messages.spoil_body(dice, dice.choice(valid))
            parts.insert(dice.randint(1, len(parts)), part)
    whole = b"".join(parts)
    return whole + messages.spoil_stream(dice, whole[-400:]), spoiled + 1


def _turn(selector: selectors.BaseSelector, ended: Counter[str]) -> None:
    now = time.monotonic()
    for key, events in selector.select(0.05):
        stream: _Stream = key.data
        if events & selectors.EVENT_WRITE and not _write(stream):
            _end(selector, stream, "write-failed", ended)
        elif events & selectors.EVENT_WRITE and not stream.out:
            _sent_all(selector, stream, ended)
        elif events & selectors.EVENT_READ:
            _read(selector, stream, ended)
    for key in list(selector.get_map().values()):
        if key.data.due <= now:
            _end(selector, key.data, "kept", ended)


def _write(stream: _Stream) -> bool:
    try:
        sent = stream.sock.send(stream.out[:CHUNK_BYTES])
    except BlockingIOError:
        return True
    except OSError:
        return False
    stream.out = stream.out[sent:]
    return True


def _sent_all(selector: selectors.BaseSelector, stream: _Stream, ended: Counter[str]) -> None:
    """Everything is out: end our side as the dice said, and read on if we may."""
    sock = stream.sock
    if stream.ending == "close":
        _end(selector, stream, "closed-by-us", ended)
        return
    if stream.ending == "reset":
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        _end(selector, stream, "reset-by-us", ended)
        return
    if stream.ending == "half-close":
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
    else:
        stream.due = time.monotonic() + 0.1
    selector.modify(sock, selectors.EVENT_READ, stream)


def _read(selector: selectors.BaseSelector, stream: _Stream, ended: Counter[str]) -> None:
    try:
        data = stream.sock.recv(CHUNK_BYTES)
    except BlockingIOError:
        return
    except OSError:
        data = b""
    if data:
        stream.got += data
        if len(stream.got) > 1 << 20:
            _end(selector, stream, "flood", ended)
        return
    _end(selector, stream, "closed-by-daemon", ended)


def _end(selector: selectors.BaseSelector, stream: _Stream, how: str, ended: Counter[str]) -> None:
    answered = struct.pack("<I", messages.SENTINEL_QUESTION) in stream.got
    ended["inputs"] += stream.spoiled if answered else 1
    ended["answered to the end" if answered else how] += 1
    selector.unregister(stream.sock)
    stream.sock.close()
