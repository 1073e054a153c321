"""Scenarios with real engines, run in an engine's environment; the last line of stdout is JSON.

    python runner.py SCENARIO {"model": ..., "folder": ..., "python": ...}

``python`` is the one that has the daemon.  Engines run in this process, one after another: the
first takes 10 s, each further one about 1 s.
"""

# mypy: ignore-errors
# It reaches into vLLM, which has no types where this is checked.
# ruff: noqa: T201

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
)
os.environ.setdefault("PYTHONHASHSEED", "0")

BLOCK = 32
PATIENT = {
    "pegaflow.query_timeout_ms": 2000,
    "pegaflow.hook_budget_ms": 4000,
    "pegaflow.probe_timeout_ms": 4000,
    "pegaflow.attach_timeout_ms": 4000,
    "pegaflow.save_timeout_ms": 20000,
    "pegaflow.load_timeout_ms": 20000,
}
"""For scenarios about hits: a busy machine must not turn one into a miss."""


def prompt(seed: int, length: int = 300) -> list[int]:
    return [(i * 7 + 3 * seed * i + seed) % 900 + 10 for i in range(length)]


PROMPTS = [prompt(0), prompt(1), prompt(2)]
BRANCHES = [prompt(j)[:160] + prompt(50 + j, 90) for j in range(2)]


class Daemon:
    """A daemon of our own on a Unix-domain socket."""

    def __init__(self, python: str, folder: Path, pool: str = "256mb") -> None:
        self.python, self.folder, self.pool = python, folder, pool
        self.path = folder / "daemon.sock"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def start(self) -> float:
        """Returns the moment it served."""
        log = (self.folder / "daemon.log").open("ab")
        self.process = subprocess.Popen(
            [self.python, "-m", "pegaflow", "server", "--addr", self.address,
             "--pool-size", self.pool, "--http-addr", "127.0.0.1:0", "--devices", "none"],
            stdout=log, stderr=log, cwd=self.folder,
        )  # fmt: skip
        for _ in range(600):
            with socket.socket(socket.AF_UNIX) as sock:
                if sock.connect_ex(str(self.path)) == 0:
                    return time.monotonic()
            if self.process.poll() is not None:
                raise RuntimeError((self.folder / "daemon.log").read_text()[-3000:])
            time.sleep(0.02)
        raise RuntimeError("the daemon does not serve")

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def statistics(self) -> dict[str, object]:
        from pegaflow.client.blocking import BlockingNode

        with BlockingNode(self.address, 5) as node:
            return json.loads(node.statistics(5))


class Impostor:
    """Serves the daemon's address: accepts and says nothing, or garbage."""

    def __init__(self, path: Path, garbage: bool) -> None:
        path.unlink(missing_ok=True)
        self.garbage = garbage
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(64)
        self.connections: list[socket.socket] = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        chance = random.Random(1)
        while True:
            try:
                connection, _ = self.listener.accept()
                self.connections.append(connection)
                if self.garbage:
                    connection.sendall(chance.randbytes(chance.randrange(1, 5000)))
            except OSError:
                return

    def close(self) -> None:
        self.listener.close()
        for connection in self.connections:
            connection.close()


class Engine:
    """One in-process engine, with or without the connector."""

    def __init__(
        self, model: str, address: str = "", settings: dict | None = None, **extra
    ) -> None:
        from vllm import LLM

        transfer = None
        if address:
            transfer = {
                "kv_connector": "TimedConnector",
                "kv_connector_module_path": "timed",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"pegaflow.host": address, **(settings or {})},
                "kv_load_failure_policy": extra.pop("policy", "recompute"),
            }
        arguments = {
            "model": model,
            "skip_tokenizer_init": True,
            "seed": 0,
            "max_model_len": 512,
            "enforce_eager": True,
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            "distributed_executor_backend": "uni",
            "block_size": BLOCK,
            "disable_log_stats": False,
        }
        self.llm = LLM(**arguments | extra, kv_transfer_config=transfer)

    @property
    def core(self):
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self):
        return self.core.scheduler.connector

    @property
    def worker(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def direct_loads(self):
        return self.worker._worker._direct

    @property
    def save_lane(self):
        return self.worker._worker._saves

    def run(self, prompts, tokens: int = 24, salt: str | None = None) -> dict[str, object]:
        """Greedy tokens, cached tokens and finish reasons; all saves are settled afterwards."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": p} | ({"cache_salt": salt} if salt else {}) for p in prompts]
        out = self.llm.generate(inputs, greedy, use_tqdm=False)
        self.drain()
        return {
            "tokens": [list(o.outputs[0].token_ids) for o in out],
            "cached": [o.num_cached_tokens for o in out],
            "finish": [o.outputs[0].finish_reason for o in out],
        }

    def drain(self, seconds: float = 30) -> None:
        """Step until nothing is left to free."""
        end = time.monotonic() + seconds
        while self.core.scheduler.has_requests() and time.monotonic() < end:
            self.llm.llm_engine.step()
            time.sleep(0.001)

    def forget(self) -> bool:
        """Empty the engine's own prefix cache."""
        self.drain()
        return bool(self.llm.reset_prefix_cache())

    def free_blocks(self) -> int:
        return self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def preemptions(self) -> int:
        metrics = self.llm.get_metrics()
        return sum(int(m.value) for m in metrics if m.name == "vllm:num_preemptions")

    def totals(self) -> dict[str, float]:
        """Of both halves; the worker's only where it is in this process."""
        mine, theirs = self.scheduler.tally._totals, self.worker.tally._totals
        return {k: mine.get(k, 0) + theirs.get(k, 0) for k in {*mine, *theirs}}

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def before_load(engine: Engine, action) -> None:
    """Do ``action`` once, just before the next load is asked for."""
    direct = engine.direct_loads
    original = direct.submit

    def submit(order):
        direct.submit = original
        action()
        original(order)

    direct.submit = submit


def noise_after_load(engine: Engine) -> None:
    """Overwrite what every load brought with noise."""
    import numpy as np

    direct = engine.direct_loads
    original = direct._finish
    layout, fd = direct._rank.layout, direct._rank.allocations[0].fd

    def finish(load, failed):
        chance = np.random.default_rng(1)
        for block in load.order.block_ids:
            for run in layout.runs:
                noise = chance.standard_normal(run.length_bytes // 4).astype(np.float32)
                os.pwrite(fd, noise.tobytes(), run.base_bytes + block * run.stride_bytes)
        original(load, failed)

    direct._finish = finish


# --- scenarios -----------------------------------------------------------------------------------


def basics(job: dict) -> dict[str, object]:
    """Hits in every way that they come about, compared with an engine without connector."""
    model, folder = job["model"], Path(job["folder"])
    daemon = Daemon(job["python"], folder)
    daemon.start()
    result: dict[str, object] = {}
    plain = Engine(model)
    result["reference"] = {
        "prompts": plain.run(PROMPTS),
        "branches": plain.run(BRANCHES),
        "later": plain.run([prompt(9)]),
        "long": plain.run(PROMPTS, tokens=60),
    }
    plain.close()

    engine = Engine(model, daemon.address, PATIENT)
    result["runs_a_block"] = len(engine.save_lane.rank.layout.runs)
    result["cold"] = engine.run(PROMPTS)
    result["forgot"] = engine.forget()
    result["warm_same_process"] = engine.run(PROMPTS)
    result["known_after_warm"] = engine.totals().get("save_known_blocks", 0)
    engine.forget()
    result["partial_prefix"] = engine.run(BRANCHES)
    engine.forget()
    result["longer_output"] = engine.run(PROMPTS, tokens=60)
    result["salted"] = [
        engine.run(PROMPTS[:1], salt=salt) | {"forgot": engine.forget()}
        for salt in ("one", "two", "one")
    ]
    # A second engine on the same daemon, while this one lives.
    second = subprocess.run(
        [sys.executable, __file__, "second", json.dumps({**job, "address": daemon.address})],
        stdout=subprocess.PIPE, timeout=240, check=True,
    )  # fmt: skip
    result["new_process"] = json.loads(second.stdout.decode().splitlines()[-1])
    engine.forget()
    result["from_second_engine"] = engine.run([prompt(9)])
    result["abort"] = abort_while_loading(engine, daemon)
    result["after_abort"] = engine.run(PROMPTS)
    result["totals"] = engine.totals()
    engine.close()
    result["noise"] = noise(model, daemon)
    result["tight"] = tight(model, daemon)
    result["daemon"] = daemon.statistics()
    daemon.kill()
    return result


def second(job: dict) -> dict[str, object]:
    """What another process finds, and leaves behind."""
    engine = Engine(job["model"], job["address"], PATIENT)
    result: dict[str, object] = {"warm": engine.run(PROMPTS), "later": engine.run([prompt(9)])}
    result["totals"] = engine.totals()
    engine.close()
    return result


def abort_while_loading(engine: Engine, daemon: Daemon) -> dict[str, object]:
    """The daemon is stopped in the middle of a load, the request is aborted, then it goes on."""
    from vllm import SamplingParams

    engine.forget()
    free = engine.free_blocks()
    before_load(engine, lambda: daemon.signal(signal.SIGSTOP))
    core = engine.llm.llm_engine
    core.add_request(
        "doomed",
        {"prompt_token_ids": PROMPTS[0]},
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False),
    )
    for _ in range(20):
        core.step()
        time.sleep(0.01)
    states = [r.status.name for r in engine.core.scheduler.requests.values()]
    core.abort_request(["doomed"])
    for _ in range(20):
        core.step()
        time.sleep(0.01)
    held = free - engine.free_blocks()
    daemon.signal(signal.SIGCONT)
    engine.drain()
    return {
        "states": states,
        "held_while_loading": held,
        "leaked": free - engine.free_blocks(),
        "unfinished": len(engine.core.scheduler.requests),
    }


def noise(model: str, daemon: Daemon) -> dict[str, object]:
    """Noise instead of the stored bytes must change the tokens, or no test here sees anything."""
    engine = Engine(model, daemon.address, PATIENT)
    noise_after_load(engine)
    result = engine.run(PROMPTS)
    engine.close()
    return result


def tight(model: str, daemon: Daemon) -> dict[str, object]:
    """So few blocks that requests are preempted: cold, then warm."""
    result: dict[str, object] = {}
    settings = {**PATIENT, "pegaflow.namespace": "tight"}
    for name in ("cold", "warm"):
        engine = Engine(model, daemon.address, settings, num_gpu_blocks_override=22)
        result[name] = engine.run(PROMPTS, tokens=60) | {
            "preemptions": engine.preemptions(),
            "totals": engine.totals(),
        }
        engine.close()
    return result


def faults(job: dict) -> dict[str, object]:
    """One engine, with the default time limits, that outlives everything done to the daemon."""
    model, folder = job["model"], Path(job["folder"])
    daemon = Daemon(job["python"], folder)
    plain = Engine(model)
    fresh = iter(range(100, 200))
    reference = plain.run(PROMPTS, tokens=8)["tokens"]
    result: dict[str, object] = {"right": {}, "forgot": []}

    def check(name: str, engine: Engine) -> None:
        forgot = engine.forget()
        out = engine.run(PROMPTS, tokens=8)
        result["right"][name] = out["tokens"] == reference and set(out["finish"]) == {"length"}
        result["forgot"].append(forgot)

    plain.close()
    engine = Engine(model, daemon.address, {"pegaflow.load_timeout_ms": 1500}, policy="fail")
    result["policy"] = engine.core.scheduler.recompute_kv_load_failures
    check("absent at start", engine)
    result["seconds_to_saving"] = {"first start": saving_again(engine, daemon.start(), fresh)}
    check("with the daemon", engine)

    daemon.kill()
    check("killed", engine)
    result["seconds_to_saving"]["after a kill"] = saving_again(engine, daemon.start(), fresh)
    check("restarted", engine)

    before_load(engine, daemon.kill)
    check("killed in the middle of a load", engine)
    result["seconds_to_saving"]["after a kill in a load"] = saving_again(
        engine, daemon.start(), fresh
    )
    check("filled again", engine)

    daemon.signal(signal.SIGSTOP)
    check("stopped", engine)
    daemon.signal(signal.SIGCONT)
    result["seconds_to_saving"]["after a stop"] = saving_again(engine, time.monotonic(), fresh)
    before_load(engine, lambda: daemon.signal(signal.SIGSTOP))
    check("stopped in the middle of a load", engine)
    daemon.signal(signal.SIGCONT)
    result["seconds_to_saving"]["after a stop in a load"] = saving_again(
        engine, time.monotonic(), fresh
    )
    daemon.kill()
    for name, garbage in (("black hole", False), ("garbage", True)):
        impostor = Impostor(daemon.path, garbage)
        time.sleep(0.5)
        check(name, engine)
        impostor.close()
    daemon.path.unlink(missing_ok=True)
    daemon.pool = "8mb"
    result["seconds_to_saving"]["small pool"] = saving_again(engine, daemon.start(), fresh)
    for _ in range(4):
        engine.run([prompt(next(fresh)) for _ in range(4)], tokens=2)
    check("pool full", engine)
    result["small_pool"] = daemon.statistics()
    result["totals"] = engine.totals()
    result["hooks_ms"] = sys.modules["timed"].worst
    engine.close()
    daemon.kill()
    return result


def saving_again(engine: Engine, served: float, fresh) -> float:
    """Seconds from ``served`` until the daemon had stored something new of this engine."""
    stored = engine.worker.tally.total("save_stored_blocks")
    while time.monotonic() < served + 30:
        engine.run([prompt(next(fresh), 70)], tokens=1)
        if engine.worker.tally.total("save_stored_blocks") > stored:
            return round(time.monotonic() - served, 3)
        time.sleep(0.02)
    return 1e9


def ranks(job: dict) -> dict[str, object]:
    """Two tensor-parallel ranks in processes of their own."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if (os.cpu_count() or 1) > 1 else "0|0"
    daemon = Daemon(job["python"], Path(job["folder"]))
    daemon.start()
    engine = Engine(
        job["model"], daemon.address, PATIENT,
        tensor_parallel_size=2, distributed_executor_backend="mp",
    )  # fmt: skip
    result: dict[str, object] = {"cold": engine.run(PROMPTS)}
    result["forgot"] = engine.forget()
    result["warm"] = engine.run(PROMPTS)
    result["daemon"] = daemon.statistics()
    engine.close()
    daemon.kill()
    return result


def server(job: dict) -> dict[str, object]:
    """The OpenAI server, once to fill the cache and once more to find it."""
    daemon = Daemon(job["python"], Path(job["folder"]))
    daemon.start()
    result: dict[str, object] = {"cold": serve_once(job, daemon), "warm": serve_once(job, daemon)}
    daemon.kill()
    return result


def serve_once(job: dict, daemon: Daemon) -> dict[str, object]:
    import urllib.request

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    transfer = {
        "kv_connector": "PegaKVConnector",
        "kv_connector_module_path": "pegaflow.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pegaflow.host": daemon.address, **PATIENT},
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", job["model"],
        "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "512", "--block-size", str(BLOCK), "--kv-cache-memory-bytes",
        str(64 << 20), "--enable-prompt-tokens-details", "--served-model-name", "tiny",
        "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    process = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr, env=environment)

    def fetch(path: str, body: dict | None = None) -> bytes:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    try:
        wait_for_server(process, fetch)
        body = {
            "model": "tiny", "prompt": " ".join(f"t{t}" for t in prompt(3, 200)), "max_tokens": 16,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        answer = json.loads(fetch("/v1/completions", body))
        time.sleep(1.5)  # saves settle; statistics come with the next step
        fetch("/v1/completions", {**body, "prompt": "t5 t6 t7", "max_tokens": 2})
        metrics = scraped(fetch("/metrics").decode())
        details = answer["usage"].get("prompt_tokens_details") or {}
        return {
            "text": answer["choices"][0]["text"],
            "cached_tokens": details.get("cached_tokens") or 0,
            "hits": metrics.get("vllm:external_prefix_cache_hits_total", 0),
            "metrics": {k: v for k, v in metrics.items() if k.startswith("vllm:pega_")},
        }
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_server(process: subprocess.Popen[bytes], fetch) -> None:
    for _ in range(900):
        if process.poll() is not None:
            raise RuntimeError("the server ended")
        try:
            fetch("/health")
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError("the server does not serve")


def scraped(text: str) -> dict[str, float]:
    """Sum over labels."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            values[name] = values.get(name, 0) + float(value)
    return values


SCENARIOS = {
    "basics": basics,
    "second": second,
    "faults": faults,
    "ranks": ranks,
    "server": server,
}

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), path]))
    outcome = SCENARIOS[sys.argv[1]](json.loads(sys.argv[2]))
    sys.stdout.flush()
    print("\n" + json.dumps(outcome))
