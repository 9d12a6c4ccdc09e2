"""Which input holds the tokens: the ids that an embedding looks up, or hidden states that the caller names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from branchfx.passes.fake_inputs import Placeholder
from branchfx.passes.ir import InputRole

_aten = torch.ops.aten


def find_token_input(gm: fx.GraphModule, placeholders: Sequence[Placeholder]) -> Placeholder | None:
    """Return the integer input of shape [B, T] that an embedding looks up first."""
    by_name = {p.name: p for p in placeholders}
    for node in gm.graph.nodes:
        if node.target is not _aten.embedding.default:
            continue
        source = node.args[1]
        while source.op == "call_function" and source.args and isinstance(source.args[0], fx.Node):
            source = source.args[0]
        found = by_name.get(source.name)
        if found is not None and found.role is InputRole.OTHER and len(found.sizes) == 2:
            return found
    return None


def find_hidden_input(placeholders: Sequence[Placeholder], batch: tuple[int, int]) -> Placeholder | None:
    """Return the first floating-point input of shape [B, T, d], for a batch of [B, T] that the caller names."""
    for p in placeholders:
        is_float = p.dtype is not None and p.dtype.is_floating_point
        if p.role is InputRole.OTHER and is_float and len(p.sizes) == 3 and p.sizes[:2] == batch:
            return p
    return None
