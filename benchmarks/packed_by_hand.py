"""Attention of one prompt and its branches, written by hand: what the backend has to keep up with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class GroupAttention(torch.autograd.Function):
    """Three calls of ATen's flash attention: prompt on itself, branches on the prompt, branches on themselves.

    The last two are merged by their log-sum-exp; the backward of each call takes the merged output and log-sum-exp.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, prompt: int, rows: int, scale: float) -> Tensor:
        """Return the output `[1, H, N, D]` for packed inputs of that shape."""
        top = [x[:, :, :prompt] for x in (query, key, value)]
        own = [_unpack(x[:, :, prompt:], rows) for x in (query, key, value)]
        out_top, lse_top = _forward(*top, 0.0, True, scale=scale)
        out_past, lse_past = _forward(query[:, :, prompt:], *top[1:], 0.0, False, scale=scale)
        out_own, lse_own = _forward(*own, 0.0, True, scale=scale)
        lse_own = _pack(lse_own[..., None])[..., 0]
        lse = torch.logaddexp(lse_past, lse_own)
        share_past, share_own = (lse_past - lse).exp()[..., None], (lse_own - lse).exp()[..., None]
        out = torch.cat([out_top, share_past * out_past + share_own * _pack(out_own)], 2)
        ctx.save_for_backward(query, key, value, out, torch.cat([lse_top, lse], 2))
        ctx.shape = (prompt, rows, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value."""
        query, key, value, out, lse = ctx.saved_tensors
        prompt, rows, scale = ctx.shape
        packed = (grads[0], query, key, value, out)
        g, q, k, v, o = (x[:, :, :prompt] for x in packed)
        gs, qs, _, _, os = (x[:, :, prompt:] for x in packed)
        top = _backward(g, q, k, v, o, lse[:, :, :prompt], 0.0, True, scale=scale)
        past = _backward(gs, qs, k, v, os, lse[:, :, prompt:], 0.0, False, scale=scale)
        own_inputs = [_unpack(x[:, :, prompt:], rows) for x in packed]
        own_lse = _unpack(lse[:, :, prompt:, None], rows)[..., 0]
        own = [_pack(x) for x in _backward(*own_inputs, own_lse, 0.0, True, scale=scale)]
        return (
            torch.cat([top[0], past[0] + own[0]], 2),
            torch.cat([top[1] + past[1], own[1]], 2),
            torch.cat([top[2] + past[2], own[2]], 2),
            None,
            None,
            None,
        )


def _unpack(x: Tensor, rows: int) -> Tensor:
    """Return `[1, H, G * R, D]` as `[G, H, R, D]`."""
    _, heads, tokens, dim = x.shape
    return x.reshape(heads, rows, tokens // rows, dim).transpose(0, 1).contiguous()


def _pack(x: Tensor) -> Tensor:
    """Return `[G, H, R, D]` as `[1, H, G * R, D]`."""
    rows, heads, length, dim = x.shape
    return x.transpose(0, 1).reshape(1, heads, rows * length, dim)
