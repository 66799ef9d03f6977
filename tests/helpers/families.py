"""Tiny random models of many families, built in milliseconds."""

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

WINDOW = 8
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_SLIDING = {"sliding_window": WINDOW, "layer_types": _ALTERNATING}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, **_SLIDING}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61}
_LLAMA4 = {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}
_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
}

_COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

# By name: class of the model, and fields of its config that are added to `_COMMON` or replace it.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped heads": ("LlamaForCausalLM", {}),
    "llama, one head for each query head": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama, one head for all": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama, tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama, wide heads": ("LlamaForCausalLM", {"head_dim": 12}),
    "mistral": ("MistralForCausalLM", {"head_dim": 8, "sliding_window": WINDOW}),
    "ministral": ("MinistralForCausalLM", {"head_dim": 8, **_SLIDING}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2, sliding": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**_GEMMA, "attn_implementation": "eager"}),
    "gemma3": ("Gemma3ForCausalLM", _GEMMA),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {
            **_GEMMA,
            **_PER_LAYER,
            "num_kv_shared_layers": 2,
            "laurel_rank": 4,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "gemma4, heads of two widths": (
        "Gemma4ForCausalLM",
        {**_GEMMA, **_PER_LAYER, "global_head_dim": 16, "num_kv_shared_layers": 0},
    ),
    "gemma4, shared rows": (
        "Gemma4ForCausalLM",
        {**_GEMMA, **_PER_LAYER, "global_head_dim": 8, "num_kv_shared_layers": 2},
    ),
    "phi": ("PhiForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "phi3, sliding": ("Phi3ForCausalLM", {"sliding_window": WINDOW}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_EXPERTS, "head_dim": 8}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", _SLIDING),
    "exaone4": ("Exaone4ForCausalLM", _SLIDING),
    "granite": (
        "GraniteForCausalLM",
        {"logits_scaling": 0.5, "embedding_multiplier": 2.0, "residual_multiplier": 0.7},
    ),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gptj": ("GPTJForCausalLM", {"rotary_dim": 4}),
    "falcon": ("FalconForCausalLM", {}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "opt, projected": (
        "OPTForCausalLM",
        {"ffn_dim": 48, "word_embed_proj_dim": 16, "init_std": 0.3},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": WINDOW}),
    "cohere": ("CohereForCausalLM", {"logit_scale": 0.5}),
    "cohere2": ("Cohere2ForCausalLM", {"logit_scale": 0.5, **_SLIDING}),
    "stablelm": ("StableLmForCausalLM", {}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **_LATENT,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "llama4": ("Llama4ForCausalLM", {**_LLAMA4, "attention_chunk_size": WINDOW}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"head_dim": 8, "num_local_experts": 4, "attn_implementation": "eager", **_SLIDING},
    ),
}

_DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "head_dim": 8,
}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 16}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 1,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "chunk_size": 16,
    "head_dim": 8,
    "layers_block_type": ["mamba", "attention", "mlp", "attention"],
}
_JAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 1, "attn_layer_period": 2}

# As in `FAMILIES`: families with recurrent layers, which verify chains.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2ForCausalLM", _CONVOLUTIONS),  # states are known after every token
    "lfm2_moe": ("Lfm2MoeForCausalLM", {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1}),
    "qwen3_next": ("Qwen3NextForCausalLM", {**_DELTA, **_SHARED_EXPERT}),
    "qwen3_5": ("Qwen3_5ForCausalLM", _DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {**_DELTA, **_SHARED_EXPERT}),
    "olmo_hybrid": ("OlmoHybridForCausalLM", {**_DELTA, "num_key_value_heads": 4}),
    # Each layer has both attention and states.
    "falcon_h1": ("FalconH1ForCausalLM", {**_MAMBA, "mamba_d_ssm": 64, "head_dim": 8}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
        },
    ),
    "bamba": ("BambaForCausalLM", {**_MAMBA, "attn_layer_indices": [1, 3]}),
    # These read several tokens otherwise than one by one: the scan starts without a state, or
    # limits time steps from below, which affects few tokens.
    "jamba": ("JambaForCausalLM", {**_JAMBA, "attn_layer_offset": 1}),
    "nemotron_h": ("NemotronHForCausalLM", _NEMOTRON),
}
REFUSED = {"jamba", "nemotron_h"}

# Families in `make test`, which cover each mechanism; the others run only in `make test-all`.
MECHANISMS = {
    "llama, grouped heads",
    "mistral",  # sliding window
    "phi",  # partial rotary embedding, parallel block
    "gpt2",  # learned positions
    "deepseek_v3",  # latent attention, experts
    "mixtral",  # experts
    "cohere",  # scale of logits, parallel block
    "gemma4, heads of two widths",
    "gemma3n",  # layers that share keys and values
    "llama4",  # chunked attention
}
RECURRENT_MECHANISMS = {"lfm2", "qwen3_next", "falcon_h1"}
EVERY_RECURRENT_FAMILY = [
    pytest.param(name, marks=() if name in RECURRENT_MECHANISMS else pytest.mark.slow)
    for name in sorted(RECURRENT.keys() - REFUSED)
]
EVERY_FAMILY = [
    pytest.param(name, marks=() if name in MECHANISMS else pytest.mark.slow) for name in FAMILIES
]


def tiny_model(model_class: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a random model of a class; its output distributions are far from uniform."""
    torch.manual_seed(seed)
    kind = getattr(transformers, model_class)
    return kind(kind.config_class(**{**_COMMON, **changes})).eval()


def tiny_family(family: str, **changes: Any) -> PreTrainedModel:
    """Return a random model of a family in `FAMILIES` or `RECURRENT`."""
    model_class, fields = (FAMILIES | RECURRENT)[family]
    return tiny_model(model_class, **{**fields, **changes})
