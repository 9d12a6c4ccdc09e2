"""Values made from sizes: `arange`, `full`, `new_ones`. Only their own index matters, unless it numbers rows."""

from __future__ import annotations

import torch
from torch import fx

from branchfx.passes.ir import Data, Layout, Row, SlotIndex
from branchfx.passes.rules.registry import OpRule, RuleContext, Sample

_aten = torch.ops.aten


def _filled(node: fx.Node, ctx: RuleContext) -> Layout:
    return Layout(tuple(ctx.dim_from_size(s) for s in ctx.shape(node)))


def _arange(node: fx.Node, ctx: RuleContext) -> Layout:
    dim = ctx.dim_from_size(ctx.shape(node)[0])
    if not any(isinstance(f, Row) for f in dim):
        return Layout((dim,))
    counts = len(dim) > 1 and (node.target is _aten.arange.default or node.args[0] == 0)
    return Layout((dim,), Data.ORDINAL, SlotIndex("iota", "") if counts else None)


RULES = (
    OpRule(
        (
            _aten.new_ones.default,
            _aten.new_zeros.default,
            _aten.new_full.default,
            _aten.new_empty.default,
            _aten.ones.default,
            _aten.zeros.default,
            _aten.full.default,
            _aten.empty.memory_format,
            _aten.scalar_tensor.default,
        ),
        _filled,
        samples=(Sample(lambda x: x.new_ones(x.shape[1], 4), ("token[B, T]",), "none[T, 4]"),),
    ),
    OpRule(
        (_aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.linspace.default),
        _arange,
        samples=(
            Sample(lambda x: torch.arange(x.shape[1]), ("token[B, T]",), "none[T]"),
            Sample(lambda x: torch.arange(x.shape[0]), ("token[B, T]",), "ordinal[B]"),
        ),
    ),
)
