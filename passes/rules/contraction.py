"""Matrix products, embeddings and attention: which dims are contracted, and over what."""

from __future__ import annotations

import torch
from torch import fx

from branchfx.diagnostics import Code
from branchfx.passes.ir import Data, Dim, Layout, Position, Row, Size
from branchfx.passes.rules.registry import (
    OpRule,
    Refusal,
    RuleContext,
    Sample,
    broadcast_dims,
    join_data,
    require_constant,
)

_aten = torch.ops.aten


def _linear(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    others = [ctx.layout(a) for a in node.args[1:] if isinstance(a, fx.Node)]
    if not all(w.is_replicated for w in others):
        raise Refusal(Code.UNKNOWN_OPERATOR, "a linear layer has a weight that is not a parameter")
    require_constant(x.dims[-1], "a linear layer")
    return Layout((*x.dims[:-1], others[0].dims[0]), join_data([x, *others]))


def _addmm(node: fx.Node, ctx: RuleContext) -> Layout:
    product = matmul_layout(ctx.layout(node.args[1]), ctx.layout(node.args[2]))
    bias = ctx.layout(node.args[0])
    return Layout(broadcast_dims([bias, product]), join_data([bias, product]))


def _matmul(node: fx.Node, ctx: RuleContext) -> Layout:
    return matmul_layout(ctx.layout(node.args[0]), ctx.layout(node.args[1]))


def is_position(dim: Dim) -> bool:
    """Whether a dim is one axis of positions."""
    return len(dim) == 1 and isinstance(dim[0], Position)


def matmul_layout(a: Layout, b: Layout) -> Layout:
    """Return the layout of `a @ b`.

    A contraction over keys is legal here only as the value product of an attention; whether its weights are
    causal is for the attention pass to prove.

    Raises:
        Refusal: Rows are contracted or paired, or positions are contracted without weights.
    """
    left, right = a.dims, b.dims
    if len(left) == 1 or len(right) == 1:
        for dim in (left[-1], right[max(len(right) - 2, 0)]):
            require_constant(dim, "a matrix product")
        batch = left[:-1] if len(right) == 1 else right[:-2]
        return Layout((*batch, *(right[-1:] if len(left) == 1 else ())), join_data([a, b]))
    inner_left, inner_right = left[-1], right[-2]
    batch = broadcast_dims([Layout(left[:-2]), Layout(right[:-2])])
    data = join_data([a, b])
    if is_position(inner_left) or is_position(inner_right):
        if not (a.is_pair and inner_left == inner_right):
            raise Refusal(Code.RECURRENCE, "a matrix product sums over positions and is no attention")
    else:
        require_constant(inner_left, "a matrix product")
        require_constant(inner_right, "a matrix product")
    out = (*batch, left[-2], right[-1])
    if sum(isinstance(f, Row) for dim in out for f in dim) > 1:
        raise Refusal(Code.ROW_REDUCTION, "a matrix product pairs rows with rows")
    return Layout(out, data)


def _baddbmm(node: fx.Node, ctx: RuleContext) -> Layout:
    product = matmul_layout(ctx.layout(node.args[1]), ctx.layout(node.args[2]))
    bias = ctx.layout(node.args[0])
    return Layout(broadcast_dims([bias, product]), join_data([bias, product]))


def _embedding(node: fx.Node, ctx: RuleContext) -> Layout:
    weight, index = ctx.layout(node.args[0]), ctx.layout(node.args[1])
    if not weight.is_replicated:
        raise Refusal(Code.UNKNOWN_OPERATOR, "an embedding has a table that is not a parameter")
    return Layout((*index.dims, weight.dims[-1]), index.data)


def _sdpa(node: fx.Node, ctx: RuleContext) -> Layout:
    q, k, v = (ctx.layout(a) for a in node.args[:3])
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    if dropout:
        raise Refusal(
            Code.RANDOM_OP, f"attention dropout with p={dropout} is active: G rollouts draw G masks, a shared token one"
        )
    if not (is_position(k.dims[-2]) and k.dims[-2] == v.dims[-2] and is_position(q.dims[-2])):
        raise Refusal(Code.RECURRENCE, "an attention does not run over positions")
    return Layout((*q.dims[:-1], v.dims[-1]), join_data([q, k, v]))


def _conv(node: fx.Node, ctx: RuleContext) -> Layout:
    raise Refusal(Code.RECURRENCE, "a convolution over positions needs a carry, which is not supported yet")


def _einsum(node: fx.Node, ctx: RuleContext) -> Layout:
    """Labels of constant dims may be contracted; a label of rows or positions must stay in the output."""
    equation = str(node.args[0]).replace(" ", "")
    operands = [ctx.layout(a) for a in node.args[1]]  # type: ignore[union-attr]
    if "->" not in equation or "." in equation:
        raise Refusal(Code.UNKNOWN_OPERATOR, "an einsum without an explicit output")
    left, out = equation.split("->")
    dims: dict[str, Dim] = {}
    for term, x in zip(left.split(","), operands, strict=True):
        for label, dim in zip(term, x.dims, strict=True):
            if dims.setdefault(label, dim) != dim and dim != ():
                if dims[label] != ():
                    raise Refusal(Code.RECURRENCE, "an einsum combines values of different positions")
                dims[label] = dim
    for label, dim in dims.items():
        if label not in out:
            require_constant(dim, "an einsum")
    result = tuple(dims[label] for label in out)
    if sum(isinstance(f, Row) for dim in result for f in dim) > 1:
        raise Refusal(Code.ROW_REDUCTION, "an einsum pairs rows with rows")
    return Layout(result, join_data(operands))


RULES = (
    OpRule(
        (_aten.linear.default,),
        _linear,
        samples=(Sample(_aten.linear.default, ("token[B, T, 8]", "none[4, 8]"), "token[B, T, 4]"),),
    ),
    OpRule(
        (_aten.addmm.default,),
        _addmm,
        samples=(Sample(_aten.addmm.default, ("none[4]", "token[B*T, 8]", "none[8, 4]"), "token[B*T, 4]"),),
    ),
    OpRule(
        (_aten.matmul.default, _aten.mm.default, _aten.bmm.default),
        _matmul,
        samples=(
            Sample(_aten.matmul.default, ("token[B, T, 8]", "none[8, 4]"), "token[B, T, 4]"),
            Sample(lambda q, k: q @ k.transpose(1, 2), ("token[B, T, 8]", "token[B, T, 8]"), "token[B, T, T]"),
            Sample(lambda k, v: k.transpose(1, 2) @ v, ("token[B, T, 8]", "token[B, T, 8]"), "BFX010"),
        ),
    ),
    OpRule((_aten.baddbmm.default,), _baddbmm),
    OpRule(
        (_aten.embedding.default,),
        _embedding,
        samples=(Sample(_aten.embedding.default, ("none[16, 8]", "token[B, T]:int"), "token[B, T, 8]"),),
    ),
    OpRule((_aten.scaled_dot_product_attention.default,), _sdpa, packable=False),
    OpRule(
        (_aten.conv1d.default, _aten.conv2d.default, _aten.convolution.default, _aten.conv1d.padding),
        _conv,
    ),
    OpRule((_aten.einsum.default,), _einsum),
)

__all__ = ["RULES", "Data", "Size", "is_position", "matmul_layout"]
