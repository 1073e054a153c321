"""One start of a real vLLM engine with dummy weights of Llama-3.1-8B's shape; see vllm_ttft.py.

    python -m benchmarks.vllm_ttft_engine CONNECTOR PASS[,PASS...]

CONNECTOR is none, pegaflow (whichever package of that name is on the path) or offloading.  A pass
is ``cold:SEED``, ``warm:SEED`` (the prompts of that seed, after the engine's own prefix cache was
emptied), ``gpu:SEED`` (not emptied), each with ``+frag`` for a fragmented block pool; or ``itl``.
Prints one JSON line a pass.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import percentile

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("PYTHONHASHSEED", "0")

PROMPTS, PROMPT_TOKENS, REQUESTS_PER_S = 8, 10_000, 4.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "bos_token_id": 128000, "eos_token_id": 128001, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
CONNECTORS: dict[str, dict[str, object]] = {
    "pegaflow": {
        "kv_connector": "PegaKVConnector",
        "kv_connector_module_path": "pegaflow.connector",
        "kv_load_failure_policy": "recompute",
    },
    "offloading": {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 12 << 30, "num_cpu_blocks": 6000},
    },
}


def prompts(seed: int, count: int = PROMPTS, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(1000, 120_000) for _ in range(tokens)] for _ in range(count)]


class Engine:
    """An engine in this process, stepped by hand so that nothing polls between."""

    def __init__(self, connector: str) -> None:
        from vllm import LLM, SamplingParams

        # Always the same name: it is part of who may share the cache.
        folder = Path(tempfile.gettempdir(), "pegaflow-bench-llama-8b")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        began = time.perf_counter()
        extra = {}
        if connector in CONNECTORS:
            extra["kv_transfer_config"] = {"kv_role": "kv_both", **CONNECTORS[connector]}
        self.llm = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            max_model_len=16384, gpu_memory_utilization=0.6, enforce_eager=True, seed=0,
            enable_prefix_caching=True, max_num_batched_tokens=8192, block_size=16, **extra,
        )  # fmt: skip
        self.ready_s = time.perf_counter() - began
        self.engine = self.llm.llm_engine
        self.sampling = SamplingParams
        self.numbers = iter(range(1 << 30))

    def add(self, tokens: list[int], new_tokens: int = 1) -> str:
        name = f"r{next(self.numbers)}"
        params = self.sampling(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        self.engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def settle(self) -> None:
        """Let saves end: small requests carry the news that blocks are free again."""
        time.sleep(1.0)
        for size in range(64, 67):
            self.add(prompts(99, 1, size)[0])
            self.drain()
            time.sleep(0.3)

    def empty_prefix_cache(self) -> None:
        self.settle()
        assert self.llm.reset_prefix_cache(), "blocks are held: the GPU's own cache would hit"

    def fragment(self) -> None:
        """Shuffle the queue of free blocks: the state of a pool that has served a while."""
        core = self.engine.engine_core.engine_core
        queue = core.scheduler.kv_cache_manager.block_pool.free_block_queue
        blocks = queue.popleft_n(queue.num_free_blocks)
        random.Random(3).shuffle(blocks)
        queue.append_n(blocks)


def time_to_first_token(engine: Engine, seed: int) -> dict[str, object]:
    """Prompts arrive at a fixed rate; their first tokens are timed from the arrival."""
    todo = prompts(seed)
    due: dict[str, float] = {}
    took: dict[str, float] = {}
    tokens: dict[str, int] = {}
    cached: dict[str, int] = {}
    start, sent = time.perf_counter(), 0
    while sent < len(todo) or engine.engine.has_unfinished_requests():
        while sent < len(todo) and time.perf_counter() - start >= sent / REQUESTS_PER_S:
            name = engine.add(todo[sent])
            due[name] = start + sent / REQUESTS_PER_S
            sent += 1
        if not engine.engine.has_unfinished_requests():
            time.sleep(0.0005)
            continue
        for output in engine.engine.step():
            name = output.request_id.split("-")[0]
            if name in due and name not in took and output.outputs[0].token_ids:
                took[name] = (time.perf_counter() - due[name]) * 1e3
                tokens[name] = int(output.outputs[0].token_ids[0])
                cached[name] = int(output.num_cached_tokens or 0)
    times = [took[name] for name in due]
    return {
        "ttft_mean_ms": round(sum(times) / len(times), 2),
        "ttft_p50_ms": round(percentile(times, 50), 2),
        "ttft_max_ms": round(max(times), 2),
        "tokens": [tokens[name] for name in due],
        "cached": sum(cached.values()),
    }


def between_tokens(engine: Engine, address: str) -> dict[str, object]:
    """A batch that decodes, first alone and then while blocks are copied beside it."""
    out: dict[str, object] = {}
    for label in ("alone", "beside", "alone again"):
        traffic = None
        if label == "beside":
            command = [sys.executable, "-m", "benchmarks.gpu_engine", "traffic", address]
            traffic = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert traffic.stdout is not None
            traffic.stdout.readline()  # it has begun
        for prompt in prompts(5, 16, 512):
            engine.add(prompt, 220)
        for _ in range(20):
            engine.engine.step()
        gaps = []
        for _ in range(190):
            began = time.perf_counter()
            engine.engine.step()
            gaps.append((time.perf_counter() - began) * 1e3)
        engine.drain()
        if traffic is not None:
            traffic.kill()
            traffic.wait()
        key = label.replace(" ", "_")
        out[f"itl_{key}_p50_ms"] = round(percentile(gaps, 50), 3)
        out[f"itl_{key}_p99_ms"] = round(percentile(gaps, 99), 3)
    return out


def main() -> None:
    connector, passes = sys.argv[1], sys.argv[2].split(",")
    engine = Engine(connector)
    for tokens in prompts(77, 2, 2000):  # kernels are chosen and compiled on first use
        engine.add(tokens)
    engine.drain()
    fragmented = False
    for each in passes:
        if each == "itl":
            result = between_tokens(engine, os.environ["TRAFFIC_ADDRESS"])
        else:
            plain, _, frag = each.partition("+")
            kind, _, seed = plain.partition(":")
            if kind == "warm":
                engine.empty_prefix_cache()
            if frag and not fragmented:
                engine.settle()
                engine.fragment()
                fragmented = True
            result = time_to_first_token(engine, int(seed))
        line = {"pass": each, "ready_s": round(engine.ready_s, 1), **result}
        print("RESULT " + json.dumps(line), flush=True)
    engine.settle()
    os._exit(0)  # the engine's own shutdown takes seconds and shows nothing


if __name__ == "__main__":
    main()
