"""Spellings of attention that look like others and are not: each is exact, or declined, and never ends in an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exactness import compare_function, compile_for_test

HEADS, WIDTH, VOCABULARY = 4, 8, 31
IDS = torch.tensor([[3, 4, 5, 9, 6, 7, 8], [3, 4, 5, 9, 10, 11, 12], [3, 4, 13, 14, 15, 16, 17]])
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal(q: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).masked_fill(~causal(q), float("-inf"))


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.clamp(-0.05, 0.05)


def no_grad_weights(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        weights = scores(q, k).softmax(-1)
    return weights @ v


def decayed(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    t = torch.arange(q.shape[-2])
    return (scores(q, k) + (t[:, None] - t[None]) / 64.0 * -5e4 * 1e-3).softmax(-1) @ v


def slow_factor(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    t = torch.arange(q.shape[-2])
    return (scores(q, k) + (t[:, None] - t[None]) * 1e-5 * -5e4).softmax(-1) @ v


def shifted(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q[:, :, 1:], k[:, :, :-1], v[:, :, :-1], is_causal=True)
    return F.pad(out, (0, 0, 1, 0))


EDGES: dict[str, Attention] = {
    "plain": lambda q, k, v, ids: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "k of two heads, v of one": lambda q, k, v, ids: F.scaled_dot_product_attention(
        q, k[:, :2].repeat_interleave(2, 1), v[:, :1].expand(-1, HEADS, -1, -1), is_causal=True
    ),
    "k of one head": lambda q, k, v, ids: scores(q, k[:, :1]).softmax(-1) @ v,
    "v of one head": lambda q, k, v, ids: scores(q, k).softmax(-1) @ v[:, :1],
    "q of one head": lambda q, k, v, ids: scores(q[:, :1], k).softmax(-1) @ v,
    "detached weights": lambda q, k, v, ids: scores(q, k).softmax(-1).detach() @ v,
    "detached scores": lambda q, k, v, ids: scores(q, k).detach().softmax(-1) @ v,
    "weights without gradients": no_grad_weights,
    "shift over heads": lambda q, k, v, ids: (
        ((w := (q @ k.transpose(-1, -2))) - w.amax(1, keepdim=True)).masked_fill(~causal(q), float("-inf")).softmax(-1)
        @ v
    ),
    "a key that is hidden": lambda q, k, v, ids: F.scaled_dot_product_attention(
        q, k, v, causal(q) & (ids != 9)[:, None, None]
    ),
    "half scores": lambda q, k, v, ids: scores(q, k).half().float().softmax(-1) @ v,
    "bfloat16 weights": lambda q, k, v, ids: scores(q, k).softmax(-1).bfloat16().float() @ v,
    "a decay": decayed,
    "a decay by a large factor": slow_factor,
    "queries and keys of other columns": shifted,
    "clipped gradients": lambda q, k, v, ids: F.scaled_dot_product_attention(_Clip.apply(q), k, v, is_causal=True),
}


class Model(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        width = HEADS * WIDTH
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            q, k, v = (
                part.view(*ids.shape, HEADS, WIDTH).transpose(1, 2)
                for part in layer(F.layer_norm(x, x.shape[-1:])).chunk(3, -1)
            )
            y = self.attention(q, k, v, ids)
            x = x + y.transpose(1, 2).reshape(x.shape)
        return self.head(x)


@pytest.mark.parametrize("name", EDGES)
def test_exact_or_declined(name: str) -> None:
    torch._dynamo.reset()
    model = Model(EDGES[name])
    compiled = compile_for_test(model, fallback="silent")
    report = compare_function(model, lambda m: m(IDS), ours=lambda: compiled(IDS))
    if name == "plain":
        report.check_shared()
