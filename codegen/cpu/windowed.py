"""Tree attention under a window or chunks: blocks of queries, each against the keys of its path within reach.

The keys of a block are its segment's and its ancestors', trimmed to what the window can see and laid side by side,
so the work is that of the window and not of the path. A block is one call of ATen's flash attention with a mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from branchfx import ops
from branchfx.codegen.cpu.fused import flash_backward, flash_forward
from branchfx.codegen.cpu.plan import Int64Array
from branchfx.codegen.cpu.site import Site

QUERY_TOKENS = 256

# [start, stop) of packed tokens.
Range = tuple[int, int]


def forward(site: Site, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attend over the tree; arguments and results as `fused.forward`, for rules of window and chunk only."""
    _, heads, queries, width = query.shape
    out = ops.empty_heads_first(query, heads, queries, width)
    lse = ops.empty_lse(query, heads, queries)
    bias = site.finite_key_bias(query)
    for start, stop, ranges in _blocks(site):
        part_out, part_lse = flash_forward(
            query[:, :, start:stop],
            _take(key, ranges),
            _take(value, ranges),
            0.0,
            False,
            attn_mask=_mask(site, bias, start, stop, ranges, lse.dtype),
            scale=site.scale,
        )
        out[:, :, start:stop] = part_out
        lse[:, :, start:stop] = part_lse
    return out, lse


def backward(
    site: Site, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `forward`; arguments and results as `fused.backward`."""
    grad_query = ops.empty_heads_first(query, *query.shape[1:])
    grad_key, grad_value = (ops.empty_heads_first(x, *x.shape[1:], dtype=lse.dtype).zero_() for x in (key, value))
    bias = site.finite_key_bias(query)
    for start, stop, ranges in _blocks(site):
        part_query, part_key, part_value = flash_backward(
            grad_out[:, :, start:stop],
            query[:, :, start:stop],
            _take(key, ranges),
            _take(value, ranges),
            out[:, :, start:stop],
            lse[:, :, start:stop],
            0.0,
            False,
            attn_mask=_mask(site, bias, start, stop, ranges, lse.dtype),
            scale=site.scale,
        )
        grad_query[:, :, start:stop] = part_query
        offset = 0
        for first, last in ranges:
            length = last - first
            grad_key[:, :, first:last] += part_key[:, :, offset : offset + length]
            grad_value[:, :, first:last] += part_value[:, :, offset : offset + length]
            offset += length
    return grad_query, grad_key, grad_value


def has_increasing_positions(site: Site) -> bool:
    """Whether positions increase strictly along every path, which is what lets a window trim it."""
    position = site.position.numpy()
    is_step = np.diff(position) > 0
    for segment in site.tree.segments:
        if segment.start:
            is_step[segment.start - 1] = True
        if segment.parent >= 0:
            last = site.tree.segments[segment.parent].stop - 1
            if position[segment.start] <= position[last]:
                return False
    return bool(is_step.all())


def _blocks(site: Site) -> Iterator[tuple[int, int, list[Range]]]:
    """Yield each block of queries `[start, stop)` and the ranges of packed tokens that it can reach, in order."""
    position = site.position.numpy()
    for segment in site.tree.segments:
        for start in range(segment.query_start, segment.query_stop, QUERY_TOKENS):
            stop = min(start + QUERY_TOKENS, segment.query_stop)
            lowest = _lowest_position(site, int(position[site.tree.index_of_query(start)]))
            own = (segment.start, site.tree.index_of_query(stop - 1) + 1)
            yield start, stop, _reach(site, position, segment.parent, own, lowest)


def _lowest_position(site: Site, position: int) -> int:
    """Return the lowest position that a query at `position`, or a later one, can see."""
    lowest = 0
    if site.rule.window is not None:
        lowest = position - site.rule.window + 1
    if site.rule.chunk is not None:
        lowest = max(lowest, position // site.rule.chunk * site.rule.chunk)
    return lowest


def _reach(site: Site, position: Int64Array, parent: int, own: Range, lowest: int) -> list[Range]:
    ranges: list[Range] = []
    start, stop = own
    while True:
        first = start + int(np.searchsorted(position[start:stop], lowest))
        if first < stop:
            ranges.append((first, stop))
        if first > start or parent < 0:
            return ranges[::-1]
        segment = site.tree.segments[parent]
        start, stop, parent = segment.start, segment.stop, segment.parent


def _take(tensor: Tensor, ranges: list[Range], dim: int = 2) -> Tensor:
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _mask(site: Site, bias: Tensor | None, start: int, stop: int, ranges: list[Range], dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores of a block, `[1, H or 1, stop - start, keys]`."""
    query_token = site.query_tokens(start, stop, site.position.device)[:, None]
    key_token = torch.cat([torch.arange(first, last) for first, last in ranges])[None, :]
    query_position, key_position = site.position[query_token], site.position[key_token]
    seen = key_token <= query_token
    if site.rule.window is not None:
        seen &= query_position - key_position < site.rule.window
    if site.rule.chunk is not None:
        seen &= query_position // site.rule.chunk == key_position // site.rule.chunk
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[None, None]
    return mask if bias is None else mask + _take(bias, ranges, 3)
