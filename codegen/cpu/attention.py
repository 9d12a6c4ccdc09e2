"""The kernels of `branchfx::tree_attention` and its backward: choice of path, and what all paths share."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from branchfx.attention_rule import AttentionRule
from branchfx.codegen.cpu import blockwise, fused, windowed
from branchfx.codegen.cpu.plan import read_tree
from branchfx.codegen.cpu.site import FLOOR, Site, heads_first


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    position: Tensor,
    query_index: Tensor | None,
    key_bias: Tensor | None,
    sinks: Tensor | None,
    atoms: list[Tensor],
    scale: float,
    rule: str,
) -> tuple[Tensor, Tensor]:
    """Attend over a token tree.

    Args:
        query: `[1, H, Nq, D]`.
        key: `[1, HK, N, D]`, H a multiple of HK.
        value: `[1, HK, N, DV]`.
        segments: `[S, 3]`, int64, CPU: start, stop and subtree_stop of each segment in depth-first pre-order.
        position: `[N]`, int64: the column of each token in the caller's batch.
        query_index: `[Nq]`, int64, CPU, strictly increasing packed indices of the queries; None for all tokens.
        key_bias: `[H or 1, N]`, added to the scores of each key.
        sinks: `[H]`, the logit of a key without value that every query sees.
        atoms: `[H or 1, N or 1]` each, for the rule's expressions.
        scale: Factor of the dot products.
        rule: An `AttentionRule` as JSON.

    Returns:
        The output `[1, H, Nq, DV]` and the log-sum-exp of the scores with the sink `[1, H, Nq]`. A query that sees
        nothing has output zero and an lse of minus infinity.
    """
    site = _site(query, key, segments, position, query_index, key_bias, atoms, scale, rule)
    path = _path(site, query)
    width = value.shape[-1]
    operands = (query, key, value) if path is blockwise else _same_width(query, key, value)
    out, lse = path.forward(site, *operands)
    out = out[..., :width]
    if path is not blockwise and key_bias is not None:
        sees_nothing = lse < FLOOR / 10
        out = out.masked_fill(sees_nothing.unsqueeze(-1), 0.0)
        lse.masked_fill_(sees_nothing, -torch.inf)
    if sinks is not None:
        sink = sinks.to(lse.dtype)[None, :, None]
        out = out * torch.sigmoid(lse - sink).unsqueeze(-1)
        lse = torch.logaddexp(lse, sink)
    return heads_first(out, query.dtype), lse.transpose(1, 2).contiguous().transpose(1, 2)


def tree_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    position: Tensor,
    query_index: Tensor | None,
    key_bias: Tensor | None,
    sinks: Tensor | None,
    atoms: list[Tensor],
    scale: float,
    rule: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Differentiate `tree_attention`.

    Args:
        grad_out: `[1, H, Nq, DV]`.
        query: As in `tree_attention`, like all arguments below that it takes.
        key: As in `tree_attention`.
        value: As in `tree_attention`.
        out: The output of `tree_attention`.
        lse: The log-sum-exp of `tree_attention`.
        segments: As in `tree_attention`.
        position: As in `tree_attention`.
        query_index: As in `tree_attention`.
        key_bias: As in `tree_attention`.
        sinks: As in `tree_attention`.
        atoms: As in `tree_attention`.
        scale: As in `tree_attention`.
        rule: As in `tree_attention`.

    Returns:
        The gradients of query, key, value and sinks; that of the sinks is `[0]` without sinks.
    """
    site = _site(query, key, segments, position, query_index, key_bias, atoms, scale, rule)
    path = _path(site, query)
    # a query that sees nothing: every weight exp(score - lse) is then zero instead of not a number.
    finite_lse = lse.masked_fill(lse == -torch.inf, -FLOOR)
    if path is blockwise:
        grads = path.backward(site, grad_out, query, key, value, out, finite_lse)
    else:
        wide_query, wide_key, wide_value = _same_width(query, key, value)
        width = wide_query.shape[-1]
        wide_grad, wide_out = _pad(grad_out, width), _pad(out, width)
        grads = path.backward(site, wide_grad, wide_query, wide_key, wide_value, wide_out, finite_lse)
    grad_query, grad_key, grad_value = (
        heads_first(grad[..., : x.shape[-1]], x.dtype) for grad, x in zip(grads, (query, key, value), strict=True)
    )
    if sinks is None:
        return grad_query, grad_key, grad_value, query.new_empty((0,))
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    # a sink has weight exp(sink - lse) and no value: its score's gradient is weight * (0 - delta).
    weight = torch.exp(sinks.to(lse.dtype)[None, :, None] - finite_lse)
    return grad_query, grad_key, grad_value, -(weight * delta).sum((0, 2)).to(sinks.dtype)


def _site(
    query: Tensor,
    key: Tensor,
    segments: Tensor,
    position: Tensor,
    query_index: Tensor | None,
    key_bias: Tensor | None,
    atoms: list[Tensor],
    scale: float,
    rule: str,
) -> Site:
    tree = read_tree(segments, query_index, key.shape[2])
    if query.shape[2] != tree.queries or query.shape[1] % key.shape[1]:
        raise ValueError(f"query {tuple(query.shape)} does not fit key {tuple(key.shape)} and {tree.queries} queries")
    site = Site(tree, segments, query_index, position, key_bias, atoms, scale, AttentionRule.from_json(rule))
    return site if position.is_cuda else _without_idle_limits(site)


def _without_idle_limits(site: Site) -> Site:
    """Drop a window or chunk that every path of the tree fits into: the plain rule has the faster path."""
    rule, position = site.rule, site.position
    if (rule.window is None and rule.chunk is None) or position.numel() == 0:
        return site
    low, high = (int(bound) for bound in position.aminmax())
    if rule.window is not None and high - low < rule.window:
        rule = dataclasses.replace(rule, window=None)
    if rule.chunk is not None and low // rule.chunk == high // rule.chunk:
        rule = dataclasses.replace(rule, chunk=None)
    return dataclasses.replace(site, rule=rule)


def _path(site: Site, query: Tensor) -> ModuleType:
    """Return the module whose `forward` and `backward` serve the site."""
    if query.is_cuda:
        return blockwise
    if site.rule.is_fused:
        return fused
    limits = AttentionRule(window=site.rule.window, chunk=site.rule.chunk)
    return windowed if site.rule == limits and windowed.has_increasing_positions(site) else blockwise


def _same_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad with zeros until all have the larger head dimension, which ATen's flash attention wants equal.

    Zeros add nothing to a dot product, and the columns of the output that they give are cut off.
    """
    width = max(query.shape[-1], value.shape[-1])
    return _pad(query, width), _pad(key, width), _pad(value, width)


def _pad(tensor: Tensor, width: int) -> Tensor:
    """Pad the last dim to `width`; the result has it contiguous, as ATen's flash attention wants."""
    if tensor.shape[-1] < width:
        return F.pad(tensor, (0, width - tensor.shape[-1]))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
