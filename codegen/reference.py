"""Dense, differentiable references of the operators, for tests: N x N masks and autograd, any dtype, no kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import sympy
import torch
from torch import Tensor

from branchfx.attention_rule import AttentionRule


def subtree_end(segments: Tensor, tokens: int) -> Tensor:
    """Return, for each packed token, one past the last token of its segment's subtree: `[N]`, int64."""
    end = torch.zeros(tokens, dtype=torch.int64)
    for start, stop, subtree_stop in segments.tolist():
        end[start:stop] = subtree_stop
    return end


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    position: Tensor,
    query_index: Tensor | None,
    key_bias: Tensor | None,
    sinks: Tensor | None,
    atoms: Sequence[Tensor],
    scale: float,
    rule: str,
) -> tuple[Tensor, Tensor]:
    """Compute `branchfx::tree_attention` with dense scores `[H, Nq, N]`; arguments as there."""
    heads, tokens = query.shape[1], key.shape[2]
    repeats = heads // key.shape[1]
    key_all, value_all = key[0].repeat_interleave(repeats, 0), value[0].repeat_interleave(repeats, 0)
    parsed = AttentionRule.from_json(rule)
    score = query[0] @ key_all.mT * scale
    if parsed.softcap is not None:
        score = parsed.softcap * torch.tanh(score / parsed.softcap)
    if key_bias is not None:
        score = score + key_bias[:, None, :]
    token = torch.arange(tokens) if query_index is None else query_index
    symbols = _symbols(position, token, atoms)
    if parsed.bias is not None:
        score = score + _evaluate(parsed.bias, symbols)
    seen = visible(parsed, segments, position, token)
    if parsed.predicate is not None:
        seen = seen & _evaluate(parsed.predicate, symbols).bool()
    score = torch.where(seen, score, -torch.inf)
    if sinks is not None:
        score = torch.cat([score, sinks[:, None, None].expand(heads, len(token), 1)], -1)
    # rows that see nothing: a finite row keeps autograd free of nan, and the weights are then set to zero.
    is_empty = (score == -torch.inf).all(-1, keepdim=True)
    weight = torch.softmax(score.masked_fill(is_empty, 0.0), -1).masked_fill(is_empty, 0.0)
    out = weight[..., :tokens] @ value_all
    lse = torch.logsumexp(score, -1)
    return out[None], lse[None]


def visible(rule: AttentionRule, segments: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Return what tree, window and chunk let the queries at packed indices `token` see: bool `[Nq, N]`."""
    tokens = position.numel()
    index = torch.arange(tokens)
    seen = (index[None, :] <= token[:, None]) & (token[:, None] < subtree_end(segments, tokens)[None, :])
    query_position, key_position = position[token][:, None], position[None, :]
    if rule.window is not None:
        seen = seen & (query_position - key_position < rule.window)
    if rule.chunk is not None:
        seen = seen & (query_position // rule.chunk == key_position // rule.chunk)
    return seen


def unpack(packed: Tensor, index: Tensor) -> Tensor:
    """Compute `branchfx::unpack`; arguments as there."""
    rows = packed[index.clamp(min=0)]
    return torch.where((index < 0).reshape(*index.shape, *[1] * (packed.dim() - 1)), torch.zeros_like(rows), rows)


def unpack_gather(packed: Tensor, index: Tensor, label: Tensor) -> Tensor:
    """Compute `branchfx::unpack_gather`; arguments as there."""
    return torch.gather(unpack(packed, index), -1, torch.where(index.unsqueeze(-1) < 0, 0, label))


def _symbols(position: Tensor, token: Tensor, atoms: Sequence[Tensor]) -> dict[str, Tensor]:
    symbols = {"q": position[token][:, None], "k": position[None, :]}
    for i, atom in enumerate(atoms):
        values = atom.expand(atom.shape[0], position.numel())
        symbols[f"a{i}_q"] = values[:, token, None]
        symbols[f"a{i}_k"] = values[:, None, :]
    return symbols


def _evaluate(text: str, symbols: dict[str, Tensor]) -> Tensor:
    """Evaluate trusted text, by sympy's own parser and printer."""
    names = {name: sympy.Symbol(name) for name in symbols}
    expression = sympy.sympify(text, locals=names)
    function = sympy.lambdify(list(names.values()), expression, modules=[_TORCH, torch])
    result = function(*(x.double() if x.is_floating_point() else x for x in symbols.values()))
    return torch.as_tensor(result)


_TORCH = {
    "Abs": torch.abs,
    "max": lambda *terms: functools.reduce(torch.maximum, map(torch.as_tensor, terms)),
    "min": lambda *terms: functools.reduce(torch.minimum, map(torch.as_tensor, terms)),
    "floor": lambda x: torch.floor(x.double()),
    "exp": lambda x: torch.exp(x.double()),
}
