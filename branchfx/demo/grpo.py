"""One GRPO step on a padded batch: group advantages, batch layout, loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class GroupBatch:
    """The rollouts of one prompt, padded on the right.

    Attributes:
        input_ids: Token ids `[B, T]`.
        attention_mask: 1 at valid tokens `[B, T]`.
        response_mask: 1 at response tokens, over the last R columns `[B, R]`.
        advantages: One a row `[B]`, float32.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    advantages: Tensor


def group_advantages(rewards: Sequence[float]) -> Tensor | None:
    """Return (reward - mean) / std over a group `[G]`; None when all rewards are equal, which teaches nothing."""
    values = torch.tensor(list(rewards), dtype=torch.float32)
    if bool((values == values[0]).all()):
        return None
    return (values - values.mean()) / (values.std() + 1e-4)


def make_batch(
    prompt_ids: Sequence[int], responses: Sequence[Sequence[int]], advantages: Tensor, pad_id: int, device: torch.device
) -> GroupBatch:
    """Lay out one prompt's rollouts as the usual padded batch."""
    longest = max(len(r) for r in responses)
    rows = [[*prompt_ids, *r, *[pad_id] * (longest - len(r))] for r in responses]
    response_mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in responses])
    prompt_mask = torch.ones(len(responses), len(prompt_ids), dtype=torch.long)
    return GroupBatch(
        input_ids=torch.tensor(rows, device=device),
        attention_mask=torch.cat([prompt_mask, response_mask], 1).to(device),
        response_mask=response_mask.to(device),
        advantages=advantages.to(device),
    )


def policy_loss(model: Any, batch: GroupBatch) -> Tensor:
    """Return -(advantage * log-probability) summed over a batch's response tokens."""
    responses = batch.response_mask.shape[1]
    out = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
        logits_to_keep=responses + 1,
    )
    targets = batch.input_ids[:, -responses:, None]
    log_probs = out.logits[:, :-1].float().log_softmax(-1).gather(2, targets).squeeze(2)
    weighted: Tensor = batch.advantages[:, None] * log_probs * batch.response_mask
    return -weighted.sum()


def train_step(model: Any, batches: Sequence[GroupBatch]) -> float:
    """Run forward and backward of every prompt's batch; gradients add up in `.grad`.

    Returns:
        The loss a response token.
    """
    tokens = sum(int(b.response_mask.sum()) for b in batches)
    total = 0.0
    for batch in batches:
        loss = policy_loss(model, batch) / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def unique_tokens(batch: GroupBatch) -> int:
    """Count the distinct (prefix, token) pairs of a batch, independently of branchfx's own tree."""
    trie: dict[tuple[int, int, int], int] = {}
    for ids, mask in zip(batch.input_ids.tolist(), batch.attention_mask.tolist(), strict=True):
        parent = -1
        for column, (token, is_valid) in enumerate(zip(ids, mask, strict=True)):
            if is_valid:
                parent = trie.setdefault((parent, column, token), len(trie))
    return len(trie)
