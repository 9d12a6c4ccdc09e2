"""The ways to run one and the same training step: eager, Inductor, PrefixGrouper, packed by hand, and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.cases.case import Case
from benchmarks.packed_by_hand import GroupAttention

Arm = Callable[[], Tensor]
"""Returns the log-probabilities of the tokens in the loss, in row order; all arms agree on them."""


def build_model(layers: int = 6, hidden: int = 512, vocabulary: int = 4096) -> Qwen3ForCausalLM:
    """Return the benchmark's model: like Qwen3, small enough for two cores."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=1 << 20,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config).train()


def make_arms(model: nn.Module, case: Case, names: list[str], options: Mapping[str, Any]) -> dict[str, Arm]:
    """Return the arms that can run a case, in the order asked for.

    Args:
        model: Shared by all arms.
        case: What they run.
        names: From `ARMS`.
        options: Of the backend.
    """
    makers = {
        "eager": lambda: _padded(model, model, case),
        "inductor": lambda: _padded(model, torch.compile(model), case),
        "prefix_grouper": lambda: _prefix_grouper(model, case) if case.prefix else None,
        "hand": lambda: _by_hand(model, model.model, case) if case.branches_are_leaves else None,
        "hand_inductor": lambda: (
            _by_hand(model, torch.compile(model.model), case) if case.branches_are_leaves else None
        ),
        "ours": lambda: _padded(model, torch.compile(model, backend="branchreplay", options=dict(options)), case),
    }
    made = {name: makers[name]() for name in names}
    return {name: arm for name, arm in made.items() if arm is not None}


ARMS = ("eager", "inductor", "prefix_grouper", "hand", "hand_inductor", "ours")


def _logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)


def _padded(model: Any, call: Callable[..., Any], case: Case) -> Arm:
    """Return the ordinary step over the padded batch."""
    keep = case.keep
    labels, in_loss = case.ids[:, 1 - keep :], case.in_loss[:, 1 - keep :]

    def run() -> Tensor:
        model.set_attn_implementation("sdpa")
        logits = call(input_ids=case.ids, attention_mask=case.mask, use_cache=False, logits_to_keep=keep).logits
        return _logprobs(logits[:, :-1], labels)[in_loss]

    return run


def _sdpa_bottom_right(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """Run SDPA by the rule that PrefixGrouper expects of FlashAttention 2: causal, aligned at the end."""
    n, t = query.shape[2], key.shape[2]
    visible = None if n == t else torch.ones(n, t, dtype=torch.bool).tril(t - n)[None, None]
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, visible, **kwargs)


def _prefix_grouper(model: Any, case: Case) -> Arm:
    """Return the step of the package `prefix_grouper`, its attention given SDPA."""
    from prefix_grouper import PrefixGrouper
    from prefix_grouper.utils.register_transformers import register_attention

    register_attention()
    ALL_MASK_ATTENTION_FUNCTIONS.register("prefix_grouper_attention", lambda *args, **kwargs: None)
    ALL_ATTENTION_FUNCTIONS.register("sdpa_bottom_right", _sdpa_bottom_right)
    assert case.prefix is not None
    p, rows = case.prefix, len(case.ids)
    suffix = case.ids[:, p:]
    ones, suffix_ones = torch.ones(1, p, dtype=torch.long), torch.ones_like(suffix)
    positions = torch.cat([torch.arange(p), torch.arange(p, case.ids.shape[1]).repeat(rows)])[None]

    def run() -> Tensor:
        model.set_attn_implementation("prefix_grouper_attention")
        grouper = PrefixGrouper.from_ungrouped_masks(
            prefix_mask=ones, suffix_mask=suffix_ones, group_sizes=rows, padding_mode="right", device="cpu"
        )
        hidden = model.model(
            input_ids=grouper.concat_input(case.ids[:1, :p], ones, suffix, suffix_ones),
            position_ids=positions,
            use_cache=False,
            prefix_grouper=grouper,
            prefix_grouper_attn_func="sdpa_bottom_right",
        ).last_hidden_state
        _, _, suffix_hidden, _ = grouper.split_output(hidden, include_prefix_last=1)
        return _logprobs(model.lm_head(suffix_hidden[:, :-1]), suffix)[case.in_loss[:, p:]]

    return run


def _by_hand(model: Any, trunk: Callable[..., Any], case: Case) -> Arm:
    """Return the step of somebody who packs one group and writes its attention for this very shape."""
    assert case.prefix is not None
    p, rows, r = case.prefix, len(case.ids), case.ids.shape[1] - case.prefix
    suffix = case.ids[:, p:]
    packed = torch.cat([case.ids[0, :p], suffix.flatten()])[None]
    positions = torch.cat([torch.arange(p), torch.arange(p, p + r).repeat(rows)])[None]

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> Any:
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
        return GroupAttention.apply(query, key, value, p, rows, scaling).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("by_hand", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("by_hand", lambda *args, **kwargs: None)

    def run() -> Tensor:
        model.set_attn_implementation("by_hand")
        hidden = trunk(input_ids=packed, position_ids=positions, use_cache=False).last_hidden_state[0]
        branches = hidden[p:].reshape(rows, r, -1)[:, :-1]
        before = torch.cat([hidden[p - 1].expand(rows, 1, -1), branches], 1)
        return _logprobs(model.lm_head(before), suffix)[case.in_loss[:, p:]]

    return run
