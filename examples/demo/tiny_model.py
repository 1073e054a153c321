"""Writes a small Llama checkpoint with seeded random weights: no download, and nothing to learn.

vLLM's own dummy weights are so small that the tokens hardly depend on the KV cache; a demo with
them could not tell a right cache from a wrong one.  Weights drawn from a normal distribution can.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 8, 512, 1536, 8, 4, 64, 1000
CONTEXT_TOKENS = 2048
SPREAD = 0.05


def config() -> dict[str, object]:
    """What `config.json` says."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every weight of the checkpoint by name; norms have one dimension."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        yield prefix + "self_attn.q_proj.weight", (HEADS * HEAD_SIZE, HIDDEN)
        yield prefix + "self_attn.k_proj.weight", (KV_HEADS * HEAD_SIZE, HIDDEN)
        yield prefix + "self_attn.v_proj.weight", (KV_HEADS * HEAD_SIZE, HIDDEN)
        yield prefix + "self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_SIZE)
        yield prefix + "mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield prefix + "mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield prefix + "mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield prefix + "input_layernorm.weight", (HIDDEN,)
        yield prefix + "post_attention_layernorm.weight", (HIDDEN,)


def write(folder: Path, seed: int = 7) -> int:
    """Write config and weights, and return how many parameters there are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(), indent=1))
    chance = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes():
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        spread = 1.0 if "embed" in name else SPREAD
        weights[name] = (torch.randn(*shape, generator=chance) * spread).to(torch.bfloat16)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return sum(weight.numel() for weight in weights.values())
