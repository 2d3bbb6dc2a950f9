"""Tiny random models built by transformers, with biases and norms that are not their initial zeros and ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DENSE: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"model_type": "llama"},
    "llama tied": SIZES | {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 8},
    "llama3 rope": SIZES | {"model_type": "llama", "rope_theta": 500.0, "rope_scaling": LLAMA3},
    "llama biases": SIZES | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": SIZES | {"model_type": "qwen2", "rope_theta": 1e6},
    "qwen3": SIZES | {"model_type": "qwen3", "head_dim": 8},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 300,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": SIZES | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": SIZES
    | {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
    },
}


def build(settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A random transformers model."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(**settings)
    config._experts_implementation = "eager"  # its grouped product has no float64
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype).eval()
