"""Exact counts of the multiplications of a training step: linear layers, attention and the head."""

from __future__ import annotations

import dataclasses

import torch
from transformers import Qwen3Config

from benchmarks.cases.case import Case


@dataclasses.dataclass(frozen=True)
class Work:
    """What a forward has to compute.

    Attributes:
        tokens: Positions that pass through the layers.
        pairs: Visible (query, key) pairs, a layer and a head.
        logits: Positions that pass through the head.
    """

    tokens: int
    pairs: int
    logits: int


def padded_work(case: Case) -> Work:
    """Return the work of the padded batch; its attention is counted as causal."""
    rows, length = case.ids.shape
    return Work(rows * length, rows * length * (length + 1) // 2, rows * case.keep)


def unique_work(case: Case) -> Work:
    """Return the work of the unique tokens; each sees its own past once."""
    unique = case.first_of_its_kind
    position = torch.arange(unique.shape[1]) + 1
    return Work(int(unique.sum()), int((unique * position).sum()), int(unique[:, -case.keep :].sum()))


def step_flops(work: Work, config: Qwen3Config) -> int:
    """Return the floating-point operations of forward and backward: two a multiplication, and thrice the forward."""
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    layer = 2 * hidden * width + 2 * hidden * kv_width + 3 * hidden * config.intermediate_size
    linear = work.tokens * layer + 2 * width * work.pairs
    return 6 * (config.num_hidden_layers * linear + work.logits * hidden * config.vocab_size)
