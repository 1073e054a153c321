"""Our blocking client against a server that answers garbage: our errors only, in time."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter

from fuzz import messages
from pegaflow.client.blocking import BlockingNode
from pegaflow.errors import PegaflowError

DEADLINE_S = 0.05
SLACK_S = 2.0


class ClientMisbehaved(Exception):
    """It raised what is not in our tree, or took longer than it was given."""


def _answer(dice: random.Random, heard: bytes) -> bytes:
    """What a server may say to ``heard``: half right, spoiled, hostile, or noise."""
    known = [messages.bootstrap(0), messages.hostile(dice), messages.hostile(dice)]
    kind = dice.randrange(5)
    if kind == 0:
        return dice.randbytes(dice.randint(1, 2000))
    if kind == 1:
        return b"".join(messages.spoil_body(dice, dice.choice(known)) for _ in range(3))
    if kind == 2:
        return messages.spoil_stream(dice, b"".join(known))
    if kind == 3:
        return heard[: dice.randint(0, len(heard))]
    return b""


def _serve(listener: socket.socket, dice: random.Random, stop: threading.Event) -> None:
    while not stop.is_set():
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(0.2)
                heard = sock.recv(1 << 16)
                sock.sendall(_answer(dice, heard))
                ending = dice.randrange(3)
                if ending == 0:
                    linger = struct.pack("ii", 1, 0)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                elif ending == 1:
                    sock.recv(1 << 16)


def run(dice: random.Random, count: int) -> Counter[str]:
    """``count`` conversations."""
    ended: Counter[str] = Counter()
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        # The server's own dice: two threads drawing from one would not repeat.
        server = threading.Thread(
            target=_serve, args=(listener, random.Random(dice.random()), stop), daemon=True
        )
        server.start()
        try:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            for _ in range(count):
                ended[_one(address)] += 1
                ended["inputs"] += 1
        finally:
            stop.set()
            server.join(2)
    return ended


def _one(address: str) -> str:
    began = time.monotonic()
    try:
        with BlockingNode(address, 1.0) as node:
            node.health(DEADLINE_S)
        outcome = "answered"
    except PegaflowError as exc:
        outcome = type(exc).__name__
    except Exception as exc:
        raise ClientMisbehaved(f"the client raised {exc!r}") from exc
    took = time.monotonic() - began
    if took > DEADLINE_S + 1.0 + SLACK_S:
        raise ClientMisbehaved(f"the client took {took:.2f} s")
    return outcome
