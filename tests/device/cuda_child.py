"""An engine process on a GPU: allocates KV memory, exports it, reads and writes it on command.

Commands are JSON lines on standard input, answers JSON lines on standard output; content follows
its line as raw bytes.
"""

from __future__ import annotations

import json
import sys

import cupy
import numpy as np


def say(**fields: object) -> None:
    sys.stdout.buffer.write(json.dumps(fields).encode() + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    runtime = cupy.cuda.runtime
    uuid = bytes(runtime.getDeviceProperties(0)["uuid"])[:16].hex()
    arrays: list[cupy.ndarray] = []
    keep = []
    for line in sys.stdin.buffer:
        command = json.loads(line)
        if command["do"] == "allocate":
            # cudaMalloc itself: a pooled allocation would export its neighbours too.
            pointer = runtime.malloc(command["size"])
            memory = cupy.cuda.UnownedMemory(pointer, command["size"], None)
            keep.append(memory)
            arrays.append(
                cupy.ndarray((command["size"],), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
            )
            arrays[-1][...] = 0
            runtime.deviceSynchronize()
            say(handle=runtime.ipcGetMemHandle(pointer).hex(), uuid=uuid, number=len(arrays) - 1)
        elif command["do"] == "read":
            end = command["begin"] + command["count"] if "count" in command else None
            content = arrays[command["number"]][command["begin"] : end].get()
            say(size=len(content))
            sys.stdout.buffer.write(content.tobytes())
            sys.stdout.buffer.flush()
        elif command["do"] == "write":
            content = np.frombuffer(sys.stdin.buffer.read(command["size"]), np.uint8)
            arrays[command["number"]][command["begin"] :].set(content)
            runtime.deviceSynchronize()
            say()
        elif command["do"] == "fill":
            words = arrays[command["number"]].view(cupy.uint64)
            numbers = cupy.arange(words.size, dtype=cupy.uint64) + command["seed"]
            words[...] = numbers * cupy.uint64(0x9E3779B97F4A7C15)
            runtime.deviceSynchronize()
            say()
        elif command["do"] == "wipe":
            arrays[command["number"]][...] = 0
            runtime.deviceSynchronize()
            say()
        elif command["do"] == "free":
            runtime.free(arrays[command["number"]].data.ptr)
            say()


if __name__ == "__main__":
    main()
