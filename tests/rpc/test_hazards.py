"""What crashed or hung a process that uses pycapnp: each designed out, each tried in a child.

They are what the measurements behind docs/adr/0001 found.  A child that aborts or is killed by a
signal shows it by its exit status.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import capnp
import pytest

from pegaflow.rpc import schema

HERE = str(Path(__file__).parent)

SETUP = f"""
import faulthandler, gc, socket, sys, threading, time
faulthandler.enable()
sys.path.insert(0, {HERE!r})
import trio
from fake_node import *
from pegaflow import errors
from pegaflow.client.blocking import BlockingNode, BlockingSession
from pegaflow.client.session import open_session
from pegaflow.model import messages as m
from pegaflow.model.keys import BlockHash, InstanceId, LeaseToken, Namespace
ARGS = dict(instance=InstanceId("i"), namespace=Namespace("n"), manifest=MANIFEST, world_size=1)
QUERY = m.QueryRequest(0, [BlockHash(bytes(32))] * 3, b"", "r")

def storm(stop):
    "What an engine does: collect in whatever thread, whenever."
    while not stop.is_set():
        gc.collect()
"""

CASES = {
    "the context of a call is not touched after the call": """
async def main():
    def slow(session):
        session.seconds = 0.02
    node = FakeNode(prepare=slow)
    async with serving(node) as (address, loop):
        async with open_session(loop, address, **ARGS, timeout_s=5) as s:
            for round in range(30):
                async with trio.open_nursery() as nursery:
                    for _ in range(20):
                        nursery.start_soon(s.save, save_request(), 5)
                    await trio.sleep(0.002 * (round % 12))
                    nursery.cancel_scope.cancel()
            assert await s.ping(5) == BOOT_ID
trio.run(main)
""",
    "connections break with calls in flight": """
async def main():
    def slow(session):
        session.seconds = 0.01
    node = FakeNode(prepare=slow)
    async with serving(node) as (address, loop):
        for round in range(20):
            with trio.move_on_after(0.005 * (round % 5)):
                async with open_session(loop, address, **ARGS, timeout_s=5) as s:
                    async with trio.open_nursery() as nursery:
                        for _ in range(20):
                            nursery.start_soon(s.load, load_request(), 5)
        await until(lambda: all(x.closed_times == 1 for x in node.sessions))
trio.run(main)
""",
    "the collector runs in other threads of an engine": """
def serve(ready, stop):
    async def main():
        def slow(session):
            session.seconds = 0.03
        async with serving(FakeNode(prepare=slow)) as (address, _):
            ready.append(address)
            while not stop.is_set():
                await trio.sleep(0.02)
    trio.run(main)
import multiprocessing
if len(sys.argv) > 1:
    class Never:
        def is_set(self): return False
    class Say(list):
        def append(self, address): print(address, flush=True)
    serve(Say(), Never())
import subprocess
code = open("/proc/self/cmdline").read().split("\\0")[2]
command = [sys.executable, "-c", code, "serve"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
address = server.stdout.readline().strip()
stop = threading.Event()
collector = threading.Thread(target=storm, args=(stop,))
collector.start()
end = time.monotonic() + 4
kept = []
while time.monotonic() < end:
    session = BlockingSession(address, **ARGS, timeout_s=5)
    session.query(QUERY, 5)
    renew = lambda: session.renew(LeaseToken(b"x"), 5)
    for call in (lambda: session.save(save_request(), 0.005), renew):
        try:
            call()
        except errors.PegaflowError as exc:
            exc.me = exc  # a cycle through the exception and the frames of its traceback
            kept.append(exc)
    cycle = [session]
    cycle.append(cycle)  # garbage that only the collector frees, in its own thread
    del session, cycle, call, renew
    kept = kept[-3:]
def other():
    s = BlockingSession(address, **ARGS, timeout_s=5)
    s.ping(5)
    return s
threads = [threading.Thread(target=other) for _ in range(5)]
for t in threads: t.start()
for t in threads: t.join()
time.sleep(0.3)
stop.set()
collector.join()
server.kill()
""",
    "a session is dropped in another thread without close": """
import queue
async def main():
    node = FakeNode()
    async with serving(node) as (address, _):
        def owner(box):
            session = BlockingSession(address, **ARGS, timeout_s=5)
            session.ping(5)
            box.put(session)
            del session
            time.sleep(0.5)
        def dropper(box):
            session = box.get()
            del session
        box = queue.Queue()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, owner, box)
            nursery.start_soon(trio.to_thread.run_sync, dropper, box)
        await until(lambda: node.sessions[0].closed_times == 1)
gc.disable()
trio.run(main)
""",
    "the interpreter ends with connections open in several threads": """
async def main():
    node = FakeNode()
    async with serving(node) as (address, _):
        def leave_open():
            sessions.append(BlockingSession(address, **ARGS, timeout_s=5))
            sessions[-1].ping(5)
        for _ in range(3):
            await trio.to_thread.run_sync(leave_open)
sessions = []
gc.disable()
trio.run(main)
""",
    "the peer says end of stream at any moment": """
import random
def server(listener, dice):
    while True:
        sock, _ = listener.accept()
        with sock:
            if dice.random() < 0.5:
                sock.recv(dice.randrange(1, 2000))
            if dice.random() < 0.5:
                sock.sendall(bytes(8) if dice.random() < 0.5 else dice.randbytes(100))
listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=server, args=(listener, random.Random(1)), daemon=True).start()
address = "127.0.0.1:%d" % listener.getsockname()[1]
for _ in range(300):
    try:
        with BlockingNode(address, 1) as node:
            node.health(0.05)
        raise SystemExit("it cannot have answered")
    except errors.PegaflowError:
        pass
async def main():
    from pegaflow.rpc.kjloop import open_kj_loop
    async with open_kj_loop() as loop:
        for _ in range(100):
            try:
                async with open_session(loop, address, **ARGS, timeout_s=0.05):
                    raise SystemExit("it cannot have opened")
            except* errors.PegaflowError:
                pass
trio.run(main)
""",
    "a blocking client inside a running asyncio loop": """
import asyncio
async def main():
    node = FakeNode()
    async with serving(node) as (address, _):
        def client():
            async def inside():
                with BlockingSession(address, **ARGS, timeout_s=5) as one:
                    with BlockingSession(address, **ARGS, timeout_s=5) as two:
                        assert one.ping(5) == two.ping(5) == BOOT_ID
                    assert one.query(QUERY, 5).hit_count == 3
                await asyncio.sleep(0.001)  # the loop is still itself
            asyncio.run(inside())
        await trio.to_thread.run_sync(client)
gc.disable()
trio.run(main)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_hazard(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETUP + CASES[name]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"


def test_the_seams_of_pycapnp_that_we_drive_are_there() -> None:
    """Another version may move them; it needs the hazards above tried again."""
    assert capnp.__version__ == "2.2.4"
    for method in ("create_server", "close"):
        assert hasattr(capnp.AsyncIoStream, method)
    for interface, methods in (
        (schema.node.Node, {"open", "health", "statistics", "shutdown"}),
        (
            schema.node.Session,
            {"register", "query", "load", "save", "release", "renew", "unregister", "ping"},
        ),
    ):
        assert set(interface.schema.method_names) == methods
