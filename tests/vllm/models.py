"""Tiny checkpoints, written locally: seeded weights whose output really depends on the KV cache.

Run in an engine's environment: ``python models.py FOLDER``.  With dummy weights of +-1e-3 greedy
decoding falls into a cycle of two tokens whatever the cache holds; these do not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_llama(folder: Path, seed: int = 7, std: float = 0.06) -> None:
    """A Llama of 8 MB."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head = 256, 512, 64
    query, kv, vocabulary = 4 * head, 2 * head, 1000

    def normal(*shape: int, scale: float = std) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": normal(vocabulary, hidden, scale=1.0),
        "lm_head.weight": normal(vocabulary, hidden),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}self_attn.q_proj.weight": normal(query, hidden),
            f"{prefix}self_attn.k_proj.weight": normal(kv, hidden),
            f"{prefix}self_attn.v_proj.weight": normal(kv, hidden),
            f"{prefix}self_attn.o_proj.weight": normal(hidden, query),
            f"{prefix}mlp.gate_proj.weight": normal(inner, hidden),
            f"{prefix}mlp.up_proj.weight": normal(inner, hidden),
            f"{prefix}mlp.down_proj.weight": normal(hidden, inner),
            f"{prefix}input_layernorm.weight": ones.clone(),
            f"{prefix}post_attention_layernorm.weight": ones.clone(),
        }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def write_tokenizer(folder: Path) -> None:
    """Word-level, t0 .. t999: the HTTP server wants one."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"t{i}": i for i in range(3, 1000)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 2048,
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    write_llama(Path(sys.argv[1]))
    write_tokenizer(Path(sys.argv[1]))
