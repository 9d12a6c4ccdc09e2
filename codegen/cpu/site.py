"""What every tree-attention kernel needs to know of its site, and what they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from branchfx import ops
from branchfx.attention_rule import AttentionRule
from branchfx.codegen.cpu.plan import Tree

# a finite stand-in for minus infinity: a range of keys that are all masked keeps a finite lse, and merging it
# with any other range gives it weight zero.
FLOOR = -1e30


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """The arguments of `branchfx::tree_attention` besides query, key, value and sinks.

    Attributes:
        tree: Segments and queries.
        segments: `[S, 3]`, int64, CPU.
        query_index: `[Nq]`, int64, CPU, or None when every token is a query.
        position: `[N]`, int64.
        key_bias: `[H or 1, N]` float, or None.
        atoms: `[H or 1, N or 1]` each.
        scale: Factor of the dot products.
        rule: Visibility and score besides the tree's.
    """

    tree: Tree
    segments: Tensor
    query_index: Tensor | None
    position: Tensor
    key_bias: Tensor | None
    atoms: Sequence[Tensor]
    scale: float
    rule: AttentionRule

    def query_tokens(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the packed indices of queries `[start, stop)`, int64."""
        if self.query_index is None:
            return torch.arange(start, stop, device=device)
        return self.query_index[start:stop].to(device)

    def finite_key_bias(self, like: Tensor) -> Tensor | None:
        """Return the key bias as `[1, H or 1, 1, N]` in `like`'s lse dtype, at least `FLOOR`."""
        if self.key_bias is None:
            return None
        bias = self.key_bias.to(ops.lse_dtype(like.dtype)).clamp(min=FLOOR)
        return bias[None, :, None, :].contiguous()


def heads_first(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[1, H, N, D]` in `dtype` with the memory that the operators promise, `[1, N, H, D]`."""
    return tensor.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
