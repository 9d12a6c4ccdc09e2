"""Operators that only rearrange dims: the factor sequence is regrouped, permuted, or broadcast."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch import fx

from branchfx.diagnostics import Code
from branchfx.passes.ir import Dim, Factor, Layout, Row, Size
from branchfx.passes.rules.registry import OpRule, Refusal, RuleContext, Sample, require_constant

_aten = torch.ops.aten


def regroup(factors: Sequence[Factor], shape: Sequence[sympy.Expr], ctx: RuleContext) -> tuple[Dim, ...]:
    """Return the dims of `shape` as groups of the row-major factor sequence; constants may be split.

    Raises:
        Refusal: A new dim would hold a part of the rows or positions.
    """
    queue = [f for f in factors if f != Size(1)]
    out: list[Dim] = []
    for size in shape:
        dim: list[Factor] = []
        need = sympy.sympify(size)
        while need != 1:
            if not queue:
                raise Refusal(Code.RECURRENCE, "a view splits rows or positions")
            factor = queue.pop(0)
            have = ctx.size(factor)
            rest = sympy.cancel(need / have)
            if rest.is_Integer or rest.as_numer_denom()[1] == 1:
                dim.append(factor)
                need = rest
            elif isinstance(factor, Size) and need.is_Integer and factor.value % int(need) == 0:
                dim.append(Size(int(need)))
                queue.insert(0, Size(factor.value // int(need)))
                need = sympy.Integer(1)
            else:
                raise Refusal(Code.RECURRENCE, "a view splits rows or positions")
        out.append(merge_sizes(dim))
    if queue:
        raise Refusal(Code.RECURRENCE, "a view drops positions")
    return tuple(out)


def merge_sizes(dim: Sequence[Factor]) -> Dim:
    """Return the dim with neighbouring constants multiplied."""
    out: list[Factor] = []
    for factor in dim:
        if isinstance(factor, Size) and out and isinstance(out[-1], Size):
            out[-1] = Size(out[-1].value * factor.value)
        elif factor != Size(1):
            out.append(factor)
    return tuple(out)


def _view(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    return Layout(regroup(x.factors, ctx.shape(node), ctx), x.data)


def _permute(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    return Layout(tuple(x.dims[d] for d in node.args[1]), x.data)  # type: ignore[union-attr, index]


def _transpose(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    dims = list(x.dims)
    if len(node.args) < 3:
        dims.reverse()
    else:
        i, j = node.args[1], node.args[2]
        dims[i], dims[j] = dims[j], dims[i]  # type: ignore[index]
    return Layout(tuple(dims), x.data)


def _unsqueeze(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    d = int(node.args[1]) % (len(x.dims) + 1)  # type: ignore[arg-type]
    return Layout((*x.dims[:d], (), *x.dims[d:]), x.data)


def _expand(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    shape = ctx.shape(node)
    lead = len(shape) - len(x.dims)
    dims = [
        x.dims[i - lead] if i >= lead and x.dims[i - lead] != () else ctx.dim_from_size(size)
        for i, size in enumerate(shape)
    ]
    return Layout(tuple(dims), x.data)


def _repeat(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    times = node.args[1]
    lead = len(times) - len(x.dims)  # type: ignore[arg-type]
    dims: list[Dim] = []
    for i, (count, size) in enumerate(zip(times, ctx.shape(node), strict=True)):  # type: ignore[arg-type]
        old: Dim = x.dims[i - lead] if i >= lead else ()
        if old == ():
            dims.append(ctx.dim_from_size(size))
        elif count == 1:
            dims.append(old)
        else:
            require_constant(old, "repeat")
            tiles = sympy.cancel(size / ctx.dim_size(old))
            # one copy a row, the rows outermost
            dims.append((Row(), *old) if tiles == ctx.rows else (Size(int(size)),))
    return Layout(tuple(dims), x.data)


def _repeat_interleave(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    if dim is None:
        raise Refusal(Code.RECURRENCE, "repeat_interleave flattens positions")
    require_constant(x.dims[dim], "repeat_interleave")  # type: ignore[index]
    dims = list(x.dims)
    size = ctx.shape(node)[dim]  # type: ignore[index]
    dims[dim] = (Size(int(size)),)  # type: ignore[index]
    return Layout(tuple(dims), x.data)


def _flip_roll(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    place = 1 if node.target is _aten.flip.default else 2
    dims = node.args[place] if len(node.args) > place else node.kwargs.get("dims")
    if not dims:
        raise Refusal(Code.RECURRENCE, "roll without dims runs over positions")
    for d in dims:  # type: ignore[union-attr]
        require_constant(x.dims[d], "flip or roll")  # type: ignore[index]
    return x


def _complex_pair(node: fx.Node, ctx: RuleContext) -> Layout:
    """Real and imaginary part are the last dim of the real view."""
    x = ctx.layout(node.args[0])
    if node.target is _aten.view_as_real.default:
        return Layout((*x.dims, (Size(2),)), x.data)
    require_constant(x.dims[-1], "a complex view")
    return Layout(x.dims[:-1], x.data)


RULES = (
    OpRule(
        (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.unflatten.int),
        _view,
        sizes=1,
        samples=(
            Sample(lambda x: x.view(x.shape[0], x.shape[1], 2, 4), ("token[B, T, 8]",), "token[B, T, 2, 4]"),
            Sample(lambda x: x.view(-1, 8), ("token[B, T, 8]",), "token[B*T, 8]"),
            Sample(lambda x: x.view(-1), ("token[B, T]",), "token[B*T]"),
            Sample(lambda x: x.transpose(0, 1).reshape(x.shape), ("token[B, T]",), "BFX010"),
        ),
    ),
    OpRule(
        (
            _aten.flatten.using_ints,
            _aten.squeeze.dim,
            _aten.squeeze.dims,
            _aten.squeeze.default,
        ),
        _view,
        samples=(Sample(lambda x: x.unsqueeze(1).squeeze(1), ("token[B, T, 8]",), "token[B, T, 8]"),),
    ),
    OpRule(
        (_aten.permute.default,),
        _permute,
        samples=(Sample(lambda x: x.permute(0, 2, 1), ("token[B, T, 8]",), "token[B, 8, T]"),),
    ),
    OpRule(
        (_aten.transpose.int, _aten.t.default, _aten.numpy_T.default, _aten.mT.default)[:2],
        _transpose,
        samples=(Sample(lambda x: x.transpose(1, 2), ("token[B, T, 8]",), "token[B, 8, T]"),),
    ),
    OpRule(
        (_aten.unsqueeze.default,),
        _unsqueeze,
        samples=(Sample(lambda x: x.unsqueeze(-1), ("token[B, T]",), "token[B, T, 1]"),),
    ),
    OpRule(
        (_aten.expand.default,),
        _expand,
        sizes=1,
        samples=(Sample(lambda x: x[:, :, None].expand(-1, -1, 3), ("token[B, T]",), "token[B, T, 3]"),),
    ),
    OpRule(
        (_aten.repeat.default,),
        _repeat,
        samples=(
            Sample(lambda x: x.repeat(1, 1, 2), ("token[B, T, 8]",), "token[B, T, 16]"),
            Sample(
                lambda x, y: x.repeat(y.shape[0], 1).view(y.shape[0], 1, 4) + y,
                ("none[4, 1]", "token[B, T, 4]"),
                "token[B, T, 4]",
            ),
        ),
    ),
    OpRule(
        (_aten.repeat_interleave.self_int,),
        _repeat_interleave,
        samples=(Sample(lambda x: x.repeat_interleave(2, 2), ("token[B, T, 8]",), "token[B, T, 16]"),),
    ),
    OpRule(
        (_aten.view_as_complex.default, _aten.view_as_real.default),
        _complex_pair,
        samples=(
            Sample(torch.view_as_complex, ("token[B, T, 4, 2]",), "token[B, T, 4]"),
            Sample(lambda x: torch.view_as_real(torch.polar(x.abs(), x)), ("token[B, T, 8]",), "token[B, T, 8, 2]"),
        ),
    ),
    OpRule(
        (_aten.flip.default, _aten.roll.default),
        _flip_roll,
        samples=(
            Sample(lambda x: x.flip(2), ("token[B, T, 8]",), "token[B, T, 8]"),
            Sample(lambda x: x.roll(1, 1), ("token[B, T, 8]",), "BFX011"),
        ),
    ),
)
