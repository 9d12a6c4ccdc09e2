"""Builds tiny models of any type that transformers ships, from the names of configuration fields."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

# field names that mean one thing; whichever a configuration has is set, in it and in its text configuration
_SIZES: dict[str, int | float | bool | None] = {
    **dict.fromkeys(("vocab_size", "n_vocab", "text_vocab_size", "vocab_size_per_layer_input"), 101),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "n_embed", "emb_dim", "embedding_size"), 64),
    **dict.fromkeys(("embed_dim", "hidden_dim", "word_embed_proj_dim", "input_embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_query_groups"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "d_head", "d_kv", "attention_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dim_ff", "dff", "ffn_hidden_size"), 80),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp", "d_inner"), 80),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 40),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), 6),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "rotary_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim",), 8),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "residual_dropout", "emb_pdrop"), 0.0),
    **dict.fromkeys(
        ("activation_dropout", "embedding_dropout", "layerdrop", "decoder_layerdrop", "summary_last_dropout"), 0.0
    ),
    **dict.fromkeys(("activation_dropout_prob", "classifier_dropout", "ffn_dropout", "router_jitter_noise"), 0.0),
    **dict.fromkeys(("hidden_act_dropout", "resid_dropout", "embed_dropout", "attn_dropout", "moe_dropout"), 0.0),
    **dict.fromkeys(("input_jitter_noise", "relu_dropout", "layer_dropout", "conv_dropout", "token_dropout"), 0.0),
    "layer_norm_eps": 1e-5,
    "use_cache": False,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "padding_idx"), 1),
    "is_decoder": True,
}
_KEPT_NONE = ("n_inner", "classifier_dropout", "num_key_value_heads", "q_lora_rank", "sliding_window")

# what the names do not tell
_FIXES: dict[str, dict[str, Any]] = {
    "bert-generation": {"is_decoder": True},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "attn_pdrop": 0.0, "clip_qkv": 8.0}},
    "dots3_note": {"per_layer_config": None},
    "gemma3n_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "laurel_rank": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "llama4_text": {"no_rope_layers": [1, 0], "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 2},
    "opt": {"do_layer_norm_before": True},
    "reformer": {"axial_pos_shape": [2, 7], "axial_pos_embds_dim": [32, 32], "is_decoder": True},
    "xlm": {"causal": True, "asm": False},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX", "is_decoder": True},
}

NOT_ATTENTION_ONLY: dict[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), "recurrence"),
    **dict.fromkeys(("bamba", "falcon_h1", "jamba", "granitemoehybrid", "nemotron_h", "zamba", "zamba2"), "recurrence"),
    **dict.fromkeys(("bailing_hybrid", "minimax", "recurrent_gemma", "kimi_linear", "olmo_hybrid"), "recurrence"),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"), "recurrence"),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), "recurrence"),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3", "zaya", "lara_mini"), "convolution"),
    **dict.fromkeys(("inkling_text", "inkling2_text", "inkling2_loop_text"), "convolution"),
    **dict.fromkeys(("reformer",), "hashed buckets over the whole row"),
    **dict.fromkeys(("xlm", "xlnet"), "bidirectional by default"),
    **dict.fromkeys(("blt",), "patches of bytes"),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "deepseek_v4", "hy_v4"), "top-k over the past"),
}


def build(name: str) -> PreTrainedModel:
    """Return a tiny model of a type, in train mode, without dropout, its weights random enough to tell.

    Raises:
        Exception: Whatever the configuration or the model raises at these sizes.
    """
    config = shrink(AutoConfig.for_model(name), name)
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    _randomize(model)
    return model.train()


def shrink(config: PreTrainedConfig, name: str) -> PreTrainedConfig:
    """Return the configuration of its type with every known size made small."""
    given = config.to_dict()
    fields = _small(given)
    for key, value in given.items():
        if isinstance(value, dict) and key.endswith("_config"):
            fields[key] = _small(value) | ({"model_type": value["model_type"]} if "model_type" in value else {})
    # per-layer lists are left out, so that the configuration makes them from the number of layers
    return type(config)(**fields | _FIXES.get(name, {}))


def _small(given: dict[str, Any]) -> dict[str, Any]:
    """Return the known sizes of a configuration, in the type that it has them."""
    sizes = {k: v for k, v in _SIZES.items() if k in given and not (given[k] is None and k in _KEPT_NONE)}
    if "kv_lora_rank" in given and "num_key_value_heads" in sizes:
        # latent attention expands to all heads
        sizes["num_key_value_heads"] = 4
    if "qk_rope_head_dim" in given and "head_dim" in sizes:
        # what it is called where the rotary part is split off
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    return {k: int(v) if v == 0.0 and type(given[k]) is int else v for k, v in sizes.items()}


def _randomize(model: nn.Module) -> None:
    """Make norms, biases and attention differ from what a fresh model has."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.requires_grad:
                continue
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, min(parameter.shape[-2:]) ** -0.5)
