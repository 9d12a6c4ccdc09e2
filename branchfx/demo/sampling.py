"""Sampling of rollouts: the prompt is read once, then its cache serves all rollouts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from branchfx.demo.model import DemoModel


@torch.no_grad()
def sample_rollouts(
    model: DemoModel,
    prompt_ids: Sequence[int],
    rollouts: int,
    max_new_tokens: int,
    generator: torch.Generator,
    on_token: Callable[[], object],
) -> list[list[int]]:
    """Sample responses to one prompt at temperature 1.

    Args:
        model: The model; called eagerly.
        prompt_ids: The prompt's token ids.
        rollouts: G.
        max_new_tokens: A response ends here, or right after a stop token.
        generator: The random state, on the CPU.
        on_token: Called after each of `max_new_tokens` steps.

    Returns:
        The response ids, stop token included.
    """
    device = next(model.module.parameters()).device
    prompt = torch.tensor([list(prompt_ids)], device=device)
    cache = DynamicCache()
    # the argument's name changed in transformers 5
    has_new_name = "cache" in inspect.signature(model.module.forward).parameters
    with_cache: dict[str, Any] = {"cache" if has_new_name else "past_key_values": cache, "use_cache": True}
    out: Any = model.module.forward(input_ids=prompt, logits_to_keep=1, **with_cache)
    cache.batch_repeat_interleave(rollouts)
    logits: Tensor = out.logits[:, -1].expand(rollouts, -1)
    responses: list[list[int]] = [[] for _ in range(rollouts)]
    is_open = [True] * rollouts
    for step in range(max_new_tokens):
        token = torch.multinomial(logits.float().softmax(-1).cpu(), 1, generator=generator)
        for row, picked in enumerate(token[:, 0].tolist()):
            if is_open[row]:
                responses[row].append(picked)
                is_open[row] = picked not in model.stop_ids
        on_token()
        if not any(is_open) or step + 1 == max_new_tokens:
            break
        logits = model.module.forward(input_ids=token.to(device), **with_cache).logits[:, -1]
    return responses
