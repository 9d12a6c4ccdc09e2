"""Tiny causal language models with random weights, one of every family that the backend promises to share."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 97
WINDOW = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """How a family is built tiny.

    Attributes:
        model_type: The name under which transformers registers the configuration.
        config: What differs from `_COMMON`; a value of None removes the key. A callable gets the number of layers.
        attentions: The attention implementations that the family has.
        experts: Whether the feed-forward layers are routed experts.
    """

    model_type: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    attentions: tuple[str, ...] = ("sdpa", "eager")
    experts: bool = False


# 2 KV heads for 4 heads, and a head dim that is no divisor of anything else, so that a mixed-up dim is noticed.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
    "use_cache": False,
}


def _alternating(layers: int) -> list[str]:
    """Return layer types that switch between a window and the whole past, the window first."""
    return ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]


_WINDOWS = {"sliding_window": WINDOW, "layer_types": _alternating}
_SPARSE = {"num_local_experts": 8, "num_experts_per_tok": 2}
_FALCON = {"head_dim": None, "hidden_dropout": 0.0}
_OLD_NAMES = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

_FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "mistral": Family("mistral", {"sliding_window": WINDOW}),
    "gemma2": Family(
        "gemma2",
        _WINDOWS | {"query_pre_attn_scalar": 12, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0},
        ("eager",),
    ),
    "gemma3_text": Family("gemma3_text", _WINDOWS | {"query_pre_attn_scalar": 12}),
    "gpt2": Family("gpt2", _OLD_NAMES | {"n_inner": 80}),
    "gpt_neo": Family(
        "gpt_neo",
        {
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
            "embed_dropout": 0.0,
            "resid_dropout": 0.0,
        },
        ("eager",),
    ),
    "gpt_neox": Family("gpt_neox", {"hidden_dropout": 0.0, "rotary_pct": 0.5}),
    "phi3": Family("phi3", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "sliding_window": WINDOW}),
    "olmo2": Family("olmo2"),
    "cohere2": Family("cohere2", _WINDOWS | {"logit_scale": 0.5}),
    "smollm3": Family("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": False}),
    "starcoder2": Family("starcoder2", {"sliding_window": WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "granite": Family(
        "granite",
        {
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
        },
    ),
    "stablelm": Family("stablelm", {"hidden_dropout": 0.0, "partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "falcon": Family("falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": Family("bloom", {"n_head": 4, "hidden_dropout": 0.0}, ("eager",)),
    "mpt": Family(
        "mpt",
        {"d_model": 64, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 2048, "resid_pdrop": 0.0, "emb_pdrop": 0.0},
        ("eager",),
    ),
    "opt": Family("opt", {"ffn_dim": 80, "dropout": 0.0, "word_embed_proj_dim": 64}),
    "gpt_oss": Family("gpt_oss", _SPARSE | _WINDOWS, ("eager",), experts=True),
    "mixtral": Family("mixtral", _SPARSE | {"sliding_window": None, "router_jitter_noise": 0.0}, experts=True),
    "qwen3_moe": Family(
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
        experts=True,
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "head_dim": None,
            "q_lora_rank": 24,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
        },
        experts=True,
    ),
}

# spellings of a family that reach other code: they are tested beside it, and are no families of their own
_VARIANTS: dict[str, Family] = {
    "falcon_mqa": Family("falcon", _FALCON | {"multi_query": True}),
    "falcon_alibi": Family("falcon", _FALCON | {"multi_query": False, "alibi": True}),
    "opt_post_norm": Family(
        "opt", {"ffn_dim": 80, "dropout": 0.0, "word_embed_proj_dim": 32, "do_layer_norm_before": False}
    ),
    "gpt_neox_sequential": Family("gpt_neox", {"hidden_dropout": 0.0, "use_parallel_residual": False}),
    "llama_tied": Family("llama", {"tie_word_embeddings": True}),
    "llama_mqa": Family("llama", {"num_key_value_heads": 1}),
    "llama4_text": Family(
        "llama4_text",
        {
            "attention_chunk_size": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 80,
            "no_rope_layers": [1, 0],
            "interleave_moe_layer_step": 2,
            "attn_temperature_tuning": False,
        },
    ),
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
VARIANTS: tuple[str, ...] = tuple(_VARIANTS)


def family(name: str) -> Family:
    """Return how a family or a variant is built."""
    return _FAMILIES[name] if name in _FAMILIES else _VARIANTS[name]


def attentions(name: str) -> tuple[str, ...]:
    """Return the attention implementations that a family has."""
    return family(name).attentions


def build(
    name: str,
    *,
    attn: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    experts: str = "grouped_mm",
    seed: int = 0,
    **overrides: Any,
) -> PreTrainedModel:
    """Build a tiny model of a family in train mode, without dropout, with weights that make mistakes visible.

    Args:
        name: A member of `FAMILIES` or `VARIANTS`.
        attn: The attention implementation; one that the family lacks falls back to its only one.
        dtype: Of the parameters.
        layers: Number of decoder layers.
        experts: How routed experts are computed: "grouped_mm", "batched_mm" or "eager".
        seed: Of the weights.
        **overrides: Fields of the configuration.

    Returns:
        The model, without a cache.
    """
    spec = family(name)
    fields = _COMMON | {"num_hidden_layers": layers} | spec.config | overrides
    fields = {k: v(layers) if callable(v) else v for k, v in fields.items() if v is not None or k == "sliding_window"}
    fields |= _legacy_names(spec.model_type, layers)
    config = AutoConfig.for_model(spec.model_type, **fields)
    if spec.experts:
        config._experts_implementation = experts
    transformers.logging.set_verbosity_error()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attn if attn in spec.attentions else spec.attentions[0]
        )
        _randomize(model)
    return model.to(dtype).train()


def _legacy_names(model_type: str, layers: int) -> dict[str, Any]:
    """Return the fields whose names an old family spells its own way."""
    if model_type in ("bloom", "gpt2"):
        return {"n_layer": layers} | ({"n_embd": 64, "n_head": 4, "n_positions": 2048} if model_type == "gpt2" else {})
    return {"n_layers": layers} if model_type == "mpt" else {}


def _randomize(model: nn.Module) -> None:
    """Give every parameter values whose effect shows in the output: attention must not be uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0.0, 1.0)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.normal_(0.0, 0.5)
            else:
                # transposed layouts included, the smaller dim is about the fan-in of these square-ish matrices
                parameter.normal_(0.0, 1.2 * min(parameter.shape[-2:]) ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
