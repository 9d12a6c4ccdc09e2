"""Tree attention in plain torch operators, for any rule and any device: blocks of queries on blocks of keys.

The scores of one block are the largest temporary. The softmax is online, and the backward computes the scores again
from the saved log-sum-exp.

Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from branchfx import ops
from branchfx.attention_rule import AttentionRule
from branchfx.codegen.cpu.expression import Symbols, compile_expression
from branchfx.codegen.cpu.plan import Int64Array
from branchfx.codegen.cpu.site import Site

QUERY_TOKENS = 256
KEY_TOKENS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Queries `[query_start, query_stop)` against the packed tokens `[key_start, key_stop)` of one segment."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int


def forward(site: Site, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attend over the tree.

    Args:
        site: A site with any rule.
        query: `[1, H, Nq, D]`.
        key: `[1, HK, N, D]`.
        value: `[1, HK, N, DV]`.

    Returns:
        The output `[1, H, Nq, DV]` and the lse `[1, H, Nq]`, both in the lse's dtype. A query that sees no key has
        output zero and an lse of minus infinity.
    """
    _, heads, queries, _ = query.shape
    out = ops.empty_heads_first(query, heads, queries, value.shape[-1], dtype=ops.lse_dtype(query.dtype)).zero_()
    top = ops.empty_lse(query, heads, queries).fill_(-torch.inf)
    total = torch.zeros_like(top)
    for block in _blocks(site):
        score, _ = _scores(site, block, query, key)
        rows = slice(block.query_start, block.query_stop)
        new_top = torch.maximum(top[0, :, rows], score.amax(-1))
        # minus infinity less itself is not a number.
        shift = torch.where(new_top == -torch.inf, 0.0, new_top)
        weight = score.sub_(shift.unsqueeze(-1)).exp_()
        rescale = (top[0, :, rows] - shift).exp_()
        total[0, :, rows] = total[0, :, rows] * rescale + weight.sum(-1)
        part = _per_head(weight, _wide(value, block))
        out[0, :, rows] = out[0, :, rows] * rescale.unsqueeze(-1) + part
        top[0, :, rows] = new_top
    out /= torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return out, top + total.log()


def backward(
    site: Site, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `forward`.

    Args:
        site: As in `forward`.
        grad_out: `[1, H, Nq, DV]`.
        query: `[1, H, Nq, D]`.
        key: `[1, HK, N, D]`.
        value: `[1, HK, N, DV]`.
        out: `[1, H, Nq, DV]`.
        lse: `[1, H, Nq]`, finite: large and positive for a query that sees no key.

    Returns:
        The gradients of query, key and value, in the lse's dtype.
    """
    dtype = lse.dtype
    grad_query, grad_key, grad_value = (
        ops.empty_heads_first(x, *x.shape[1:], dtype=dtype).zero_() for x in (query, key, value)
    )
    kv_heads = key.shape[1]
    for block in _blocks(site):
        rows, columns = slice(block.query_start, block.query_stop), slice(block.key_start, block.key_stop)
        grad = grad_out[0, :, rows].to(dtype)
        # the same delta for every block of a row; computed per block, it is small beside the scores.
        delta = (grad * out[0, :, rows].to(dtype)).sum(-1, keepdim=True)
        score, slope = _scores(site, block, query, key, with_slope=True)
        weight = score.sub_(lse[0, :, rows].unsqueeze(-1)).exp_()
        grad_value[0, :, columns] += _per_key(weight, grad, kv_heads)
        grad_score = _per_head(grad, _wide(value, block).mT).sub_(delta).mul_(weight).mul_(site.scale)
        if slope is not None:
            grad_score.mul_(slope)
        grad_query[0, :, rows] += _per_head(grad_score, _wide(key, block))
        grad_key[0, :, columns] += _per_key(grad_score, query[0, :, rows].to(dtype), kv_heads)
    return grad_query, grad_key, grad_value


def _blocks(site: Site) -> Iterator[Block]:
    """Yield the blocks in which the tree, and the rule's window and chunk, let some query see some key."""
    tree, rule = site.tree, site.rule
    is_trimmed = rule.window is not None or rule.chunk is not None
    position = site.position.cpu().numpy() if is_trimmed else None
    bounds = None
    if position is not None and tree.queries:
        taken = position if tree.query_index is None else position[tree.query_index]
        starts = np.arange(0, tree.queries, QUERY_TOKENS)
        bounds = np.minimum.reduceat(taken, starts), np.maximum.reduceat(taken, starts)
    for segment in tree.segments:
        for key_start in range(segment.start, segment.stop, KEY_TOKENS):
            key_stop = min(key_start + KEY_TOKENS, segment.stop)
            first, end = tree.first_query_at(key_start), segment.query_subtree_stop
            # blocks of queries lie on one grid, so that their extreme positions are known beforehand.
            slots = np.arange(first // QUERY_TOKENS, -(-end // QUERY_TOKENS))
            if position is not None and bounds is not None:
                keys = position[key_start:key_stop]
                slots = slots[_can_reach(rule, bounds[0][slots], bounds[1][slots], keys)]
            for slot in slots.tolist():
                start, stop = max(first, slot * QUERY_TOKENS), min(end, (slot + 1) * QUERY_TOKENS)
                if start < stop:
                    yield Block(start, stop, key_start, key_stop)


def _can_reach(rule: AttentionRule, low: Int64Array, high: Int64Array, keys: Int64Array) -> npt.NDArray[np.bool_]:
    """Return whether window and chunk may let queries at positions `low` to `high` `[blocks]` see one of the keys."""
    key_low, key_high = int(keys.min()), int(keys.max())
    reached = np.ones(len(low), dtype=np.bool_)
    if rule.window is not None:
        reached &= low - key_high < rule.window
    if rule.chunk is not None:
        reached &= (low // rule.chunk <= key_high // rule.chunk) & (key_low // rule.chunk <= high // rule.chunk)
    return reached


def _scores(
    site: Site, block: Block, query: Tensor, key: Tensor, *, with_slope: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the scores of a block `[H, queries, keys]`, minus infinity where unseen, and the slope of the softcap."""
    rule = site.rule
    dtype = ops.lse_dtype(query.dtype)
    queries = query[0, :, block.query_start : block.query_stop].to(dtype)
    score = _per_head(queries, _wide(key, block).mT)
    slope = None
    if rule.softcap is None:
        score *= site.scale
    else:
        ratio = score.mul_(site.scale / rule.softcap).tanh_()
        slope = 1 - ratio.square() if with_slope else None
        score = ratio.mul_(rule.softcap)
    if site.key_bias is not None:
        score += site.key_bias[:, None, block.key_start : block.key_stop]
    symbols = _symbols(site, block, query.device)
    names = frozenset(symbols)
    if rule.bias is not None:
        score += compile_expression(rule.bias, names)(symbols).to(query.device)
    seen = _visible(site, block, query.device, symbols)
    if rule.predicate is not None:
        allowed = compile_expression(rule.predicate, names)(symbols).to(query.device, torch.bool)
        seen = allowed if seen is None else seen & allowed
    return (score if seen is None else score.masked_fill_(~seen, -torch.inf)), slope


def _symbols(site: Site, block: Block, device: torch.device) -> Symbols:
    """Return the values of a rule's symbols on a block: `[queries, 1]`, `[1, keys]`, or with heads in front."""
    query_token = site.query_tokens(block.query_start, block.query_stop, device)
    key_token = torch.arange(block.key_start, block.key_stop, device=device)
    symbols = {"q": site.position[query_token][:, None], "k": site.position[key_token][None, :]}
    for i, atom in enumerate(site.atoms):
        values = atom.expand(atom.shape[0], site.tree.tokens)
        symbols[f"a{i}_q"] = values[:, query_token, None]
        symbols[f"a{i}_k"] = values[:, None, key_token]
    return symbols


def _visible(site: Site, block: Block, device: torch.device, symbols: Symbols) -> Tensor | None:
    """Return which keys the tree, the window and the chunk show, bool `[queries, keys]`; None for all."""
    rule, query, key = site.rule, symbols["q"], symbols["k"]
    seen: Tensor | None = None
    if site.tree.index_of_query(block.query_start) < block.key_stop - 1:
        token = site.query_tokens(block.query_start, block.query_stop, device)
        seen = torch.arange(block.key_start, block.key_stop, device=device)[None, :] <= token[:, None]
    if rule.window is not None:
        within = query - key < rule.window
        seen = within if seen is None else seen & within
    if rule.chunk is not None:
        within = query // rule.chunk == key // rule.chunk
        seen = within if seen is None else seen & within
    return seen


def _wide(tensor: Tensor, block: Block) -> Tensor:
    """Return the block's keys or values `[HK, keys, D]` in the lse's dtype."""
    return tensor[0, :, block.key_start : block.key_stop].to(ops.lse_dtype(tensor.dtype))


def _per_head(left: Tensor, right: Tensor) -> Tensor:
    """Multiply `[H, L, A]` by `[HK, A, B]`, each query head with its key head, without repeating the latter."""
    heads, rows, inner = left.shape
    kv_heads = right.shape[0]
    grouped = left.reshape(kv_heads, heads // kv_heads * rows, inner)
    return (grouped @ right).view(heads, rows, right.shape[-1])


def _per_key(left: Tensor, right: Tensor, kv_heads: int) -> Tensor:
    """Multiply the transpose of `[H, L, A]` by `[H, L, B]` and sum over the query heads of a key head: `[HK, A, B]`."""
    heads, rows, _ = left.shape
    shape = (kv_heads, heads // kv_heads * rows, -1)
    return left.reshape(shape).mT @ right.reshape(shape)
