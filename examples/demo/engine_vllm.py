"""One real vLLM engine over the demo's prompts; started by main.py, which may kill it.

engine_vllm.py MODEL PHASE RESULT [PORT]      without PORT there is no connector
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from workload import BLOCK_TOKENS, OUTPUT_TOKENS, Answer, Run, prompts, warm_up

SOURCES = "vllm:prompt_tokens_by_source"
ASKED = "vllm:external_prefix_cache_queries"


def transfer_config(port: int) -> dict[str, object]:
    """What a user passes as --kv-transfer-config."""
    return {
        "kv_connector": "PegaKVConnector",
        "kv_connector_module_path": "pegaflow.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pegaflow.host": "http://127.0.0.1", "pegaflow.port": port},
    }


def counters(engine) -> dict[str, float]:  # noqa: ANN001  the engine's types are not here when types are checked
    """Where prompt tokens came from so far, and how many PegaFlow was asked for."""
    found: dict[str, float] = {}
    for metric in engine.get_metrics():
        if metric.name == SOURCES:
            found[metric.labels["source"]] = metric.value
        elif metric.name == ASKED:
            found["asked"] = metric.value
    return found


def ask(engine, tokens: list[int], output_tokens: int):  # noqa: ANN001, ANN201  as above
    """One greedy request by itself; returns vLLM's output object."""
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
    )
    return engine.generate([{"prompt_token_ids": tokens}], greedy, use_tqdm=False)[0]


def main() -> None:
    """Run, write the result, and stay until the parent says so or kills us."""
    model, phase, result = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    port = int(sys.argv[4]) if len(sys.argv) > 4 else None
    started = time.monotonic()
    from vllm import LLM

    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        seed=0,
        max_model_len=1024,
        enforce_eager=True,
        dtype="float32",  # bfloat16 may flip a near tie when requests are batched differently
        kv_cache_memory_bytes=192 << 20,
        block_size=BLOCK_TOKENS,
        distributed_executor_backend="uni",
        disable_log_stats=False,
        kv_transfer_config=transfer_config(port) if port else None,
    )
    run = Run(phase, start_s=time.monotonic() - started)
    ask(engine, warm_up(phase), 4)
    before_all = before = counters(engine)
    for number, tokens in enumerate(prompts(), 1):
        output = ask(engine, tokens, OUTPUT_TOKENS)
        after = counters(engine)
        spent = {name: int(after.get(name, 0) - before.get(name, 0)) for name in after}
        before = after
        ttft_ms = output.metrics.first_token_latency * 1e3
        answer = Answer(
            list(output.outputs[0].token_ids), ttft_ms,
            computed=spent.get("local_compute", 0),
            own_cache=spent.get("local_cache_hit", 0),
            pegaflow=spent.get("external_kv_transfer", 0),
        )  # fmt: skip
        run.answers.append(answer)
        print(f"PROMPT {number} {len(tokens)} {ttft_ms:.1f} {answer.computed}", flush=True)
    run.asked = int(before.get("asked", 0) - before_all.get("asked", 0))
    run.write(result)
    if sys.stdin.readline():
        engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
