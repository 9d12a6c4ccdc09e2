"""Tree attention by ATen's flash attention on CPU: a call a segment, merged by log-sum-exp.

One causal call of the queries `[start, subtree_stop)` on the keys `[start, stop)` does a segment and all its
descendants: query i sees keys up to i, and a query past the last key sees all. The derivative of each call is exact
when ATen's backward is given the merged output and the merged log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from branchfx import ops
from branchfx.codegen.cpu.plan import Call, Mode, plan_calls
from branchfx.codegen.cpu.site import Site

flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(site: Site, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attend over the tree.

    Args:
        site: A site whose rule is fused.
        query: `[1, H, Nq, D]`.
        key: `[1, HK, N, D]`.
        value: `[1, HK, N, D]`.

    Returns:
        The output `[1, H, Nq, D]`, in the query's dtype or, merged, in that of the lse; and the lse `[1, H, Nq]`.
    """
    plan = plan_calls(site.segments, site.query_index, site.tree.tokens)
    _, heads, queries, width = query.shape
    bias = site.finite_key_bias(query)
    out: Tensor | None = None
    lse: Tensor | None = None
    dtype = ops.lse_dtype(query.dtype) if plan.has_merges else query.dtype
    for call in plan.calls:
        part_out, part_lse = flash_forward(
            _queries(query, call),
            _keys(key, call),
            _keys(value, call),
            0.0,
            call.mode is Mode.CAUSAL,
            attn_mask=_mask(site, bias, call, query),
            scale=site.scale,
        )
        if call.is_first and call.parts == 1 and call.queries == queries and dtype == query.dtype:
            out, lse = part_out, part_lse
            continue
        if out is None or lse is None:
            out = ops.empty_heads_first(query, heads, queries, width, dtype=dtype)
            lse = ops.empty_lse(query, heads, queries)
        out_view, lse_view = _queries(out, call), _queries(lse, call)
        if call.is_first:
            out_view.copy_(part_out)
            lse_view.copy_(part_lse)
        else:
            merge(out_view, lse_view, part_out, part_lse)
    if out is None or lse is None:
        return ops.empty_heads_first(query, heads, queries, width), ops.empty_lse(query, heads, queries)
    return out, lse


def backward(
    site: Site, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `forward`.

    Args:
        site: As in `forward`.
        grad_out: `[1, H, Nq, D]`.
        query: `[1, H, Nq, D]`.
        key: `[1, HK, N, D]`.
        value: `[1, HK, N, D]`.
        out: `[1, H, Nq, D]`, in the query's dtype.
        lse: `[1, H, Nq]`, finite.

    Returns:
        The gradients of query, key and value, in their dtypes or wider.
    """
    plan = plan_calls(site.segments, site.query_index, site.tree.tokens)
    wide = ops.lse_dtype(query.dtype)
    bias = site.finite_key_bias(query)
    grad_query: Tensor | None = None
    query_dtype = wide if plan.has_merges else query.dtype
    key_dtype = query.dtype if plan.keys_once else wide
    grad_key, grad_value = (ops.empty_heads_first(x, *x.shape[1:], dtype=key_dtype) for x in (key, value))
    if not plan.covers_keys:
        grad_key.zero_()
        grad_value.zero_()
    for call in plan.calls:
        part_query, part_key, part_value = flash_backward(
            _queries(grad_out, call),
            _queries(query, call),
            _keys(key, call),
            _keys(value, call),
            _queries(out, call),
            _queries(lse, call),
            0.0,
            call.mode is Mode.CAUSAL,
            attn_mask=_mask(site, bias, call, query),
            scale=site.scale,
        )
        for total, part in ((_keys(grad_key, call), part_key), (_keys(grad_value, call), part_value)):
            if plan.keys_once:
                total.copy_(part)
            else:
                total.add_(part)
        if call.is_first and call.parts == 1 and call.queries == query.shape[2] and query_dtype == query.dtype:
            grad_query = part_query
            continue
        if grad_query is None:
            grad_query = ops.empty_heads_first(query, *query.shape[1:], dtype=query_dtype)
        view = _queries(grad_query, call)
        if call.is_first:
            view.copy_(part_query)
        else:
            view.add_(part_query)
    if grad_query is None:
        grad_query = ops.empty_heads_first(query, *query.shape[1:])
    return grad_query, grad_key, grad_value


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge attention over more keys into `out` and `lse`, in place.

    Args:
        out: `[B, H, L, D]`.
        lse: `[B, H, L]`, finite.
        part_out: `[B, H, L, D]`, of the same queries over other keys.
        part_lse: `[B, H, L]`, finite.
    """
    out.lerp_(part_out.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def _ranges(tensor: Tensor, start: int, length: int, parts: int, step: int) -> Tensor:
    """View `[1, H, N, ...]` as `[parts, H, length, ...]`: part p is `[start + p * step, ... + length)` of dim 2."""
    stride = tensor.stride()
    return tensor.as_strided(
        (parts, tensor.shape[1], length, *tensor.shape[3:]),
        (step * stride[2], *stride[1:]),
        tensor.storage_offset() + start * stride[2],
    )


def _queries(tensor: Tensor, call: Call) -> Tensor:
    return _ranges(tensor, call.query_start, call.queries, call.parts, call.queries)


def _keys(tensor: Tensor, call: Call) -> Tensor:
    return _ranges(tensor, call.key_start, call.keys, call.parts, call.key_step)


def _mask(site: Site, bias: Tensor | None, call: Call, query: Tensor) -> Tensor | None:
    """Return what is added to the scores of a call: the key bias, and minus infinity where a key is not seen."""
    if bias is not None:
        bias = bias.as_strided(
            (call.parts, bias.shape[1], 1, call.keys),
            (call.key_step, bias.stride(1), 1, 1),
            bias.storage_offset() + call.key_start,
        )
    if call.mode is not Mode.MASKED:
        return bias
    token = site.query_tokens(call.query_start, call.query_start + call.queries, query.device)
    seen = torch.arange(call.key_start, call.key_start + call.keys)[None, :] <= token[:, None]
    mask = torch.zeros(seen.shape, dtype=ops.lse_dtype(query.dtype)).masked_fill_(~seen, float("-inf"))
    return mask[None, None] if bias is None else bias + mask
