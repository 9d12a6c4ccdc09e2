"""Slices, splits, concatenations and lookups."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from branchfx.diagnostics import Code
from branchfx.passes.ir import BASE, Data, Dim, Factor, Layout, Position, Row, Size, Window
from branchfx.passes.rules.contraction import is_position
from branchfx.passes.rules.registry import (
    OpRule,
    Refusal,
    RuleContext,
    Sample,
    broadcast_dims,
    join_data,
    require_constant,
)
from branchfx.passes.rules.routing import looked_up

_aten = torch.ops.aten


def _expr(value: Any) -> sympy.Expr:
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.sympify(value)


def window_of(old: Window, start: sympy.Expr, size: sympy.Expr, ctx: RuleContext) -> Window:
    """Return the columns that `x[start : start + size]` keeps of an axis over `old`; `start` >= 0."""
    origin = sympy.Integer(0) if old.start is None else old.start
    first = sympy.expand(origin + start)
    last = sympy.expand(first + size)
    return Window(None if first == 0 else first, None if sympy.expand(last - ctx.positions) == 0 else last)


def _slice(node: fx.Node, ctx: RuleContext) -> Layout:  # noqa: C901 - one case a kind of dim
    x = ctx.layout(node.args[0])
    d = (int(node.args[1]) if len(node.args) > 1 else 0) % len(x.dims)  # type: ignore[arg-type]
    before, after = ctx.shape(node.args[0])[d], ctx.shape(node)[d]  # type: ignore[arg-type]
    step = node.args[4] if len(node.args) > 4 else 1
    if sympy.expand(before - after) == 0:
        return x
    dims = list(x.dims)
    start = _expr(node.args[2]) if len(node.args) > 2 and node.args[2] is not None else sympy.Integer(0)
    if is_position(x.dims[d]):
        if step != 1:
            raise Refusal(Code.RECURRENCE, "a slice takes every n-th position")
        if x.is_pair:
            raise Refusal(Code.UNSUPPORTED_MASK, "a mask or score is cut along positions")
        if _is_tail(node):
            # whatever sign the start has, so many columns are kept at the end
            start = before - after
        elif not start.is_Integer:
            raise Refusal(Code.RECURRENCE, "a slice starts at a position that the graph computes")
        elif start < 0:
            start = before + start
        dims[d] = (Position(window_of(x.dims[d][0].window, start, after, ctx)),)  # type: ignore[union-attr]
    else:
        require_constant(x.dims[d], "a slice")
        if after.free_symbols:
            # a table by position, such as cached rotary angles: its rows follow the columns of the batch
            if x.data is not Data.NONE or step != 1:
                raise Refusal(Code.RECURRENCE, "a slice picks positions of a value that is no table")
            dims[d] = ctx.dim_from_size(after)
            if any(isinstance(f, Row) for f in dims[d]):
                # the first B entries of a table: the row's number picks one
                return Layout(tuple(dims), Data.ORDINAL)
        else:
            dims[d] = (Size(int(after)),) if after != 1 else ()
    return Layout(tuple(dims), x.data)


def _is_tail(node: fx.Node) -> bool:
    end = node.args[3] if len(node.args) > 3 else None
    return end is None or (isinstance(end, int) and end >= 2**62)


def _select(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    d = int(node.args[1]) % len(x.dims)  # type: ignore[arg-type]
    require_constant(x.dims[d], "a selection")
    return Layout((*x.dims[:d], *x.dims[d + 1 :]), x.data)


def _pieces(node: fx.Node, ctx: RuleContext) -> tuple[Layout, ...]:
    x = ctx.layout(node.args[0])
    index = 1 if node.target is _aten.unbind.int else 2
    d = (node.args[index] if len(node.args) > index else node.kwargs.get("dim", 0)) % len(x.dims)  # type: ignore[operator]
    require_constant(x.dims[d], "a split")
    out = []
    for piece in node.meta["val"]:
        dims = list(x.dims)
        if node.target is _aten.unbind.int:
            del dims[d]
        else:
            size = int(piece.shape[d])
            dims[d] = (Size(size),) if size != 1 else ()
        out.append(Layout(tuple(dims), x.data))
    return tuple(out)


def _cat(node: fx.Node, ctx: RuleContext) -> Layout:
    parts = [ctx.layout(a) for a in node.args[0]]  # type: ignore[union-attr]
    d = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(parts[0].dims)  # type: ignore[operator]
    for part in parts:
        require_constant(part.dims[d], "a concatenation")
    rest = broadcast_dims([Layout((*p.dims[:d], (), *p.dims[d + 1 :])) for p in parts])
    dims: list[Dim] = list(rest)
    size = ctx.shape(node)[d]
    dims[d] = (Size(int(size)),) if size != 1 else ()
    return Layout(tuple(dims), join_data(parts))


def _stack(node: fx.Node, ctx: RuleContext) -> Layout:
    parts = [ctx.layout(a) for a in node.args[0]]  # type: ignore[union-attr]
    rest = broadcast_dims(parts)
    d = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % (len(rest) + 1)  # type: ignore[operator]
    size = len(parts)
    return Layout((*rest[:d], (Size(size),) if size != 1 else (), *rest[d:]), join_data(parts))


def _pad(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    amounts = list(node.args[1])  # type: ignore[arg-type]
    dims = list(x.dims)
    for i in range(len(amounts) // 2):
        if amounts[2 * i] == 0 and amounts[2 * i + 1] == 0:
            continue
        d = len(dims) - 1 - i
        require_constant(dims[d], "padding")
        size = ctx.shape(node)[d]
        dims[d] = (Size(int(size)),) if size != 1 else ()
    return Layout(tuple(dims), x.data)


def _gather(node: fx.Node, ctx: RuleContext) -> Layout:
    x, index = ctx.layout(node.args[0]), ctx.layout(node.args[2])
    d = int(node.args[1]) % len(x.dims)  # type: ignore[arg-type]
    require_constant(x.dims[d], "a gather")
    if x.data is not Data.NONE:
        # of a table, each position may read its own entry
        require_constant(index.dims[d], "a gather")
    for i, (a, b) in enumerate(zip(x.dims, index.dims, strict=True)):
        if i != d and a != b:
            raise Refusal(Code.RECURRENCE, "a gather reads labels of other positions")
    return Layout(index.dims, join_data([x, index]))


def _scatter(node: fx.Node, ctx: RuleContext) -> Layout:
    x, index = ctx.layout(node.args[0]), ctx.layout(node.args[2])
    d = int(node.args[1]) % len(x.dims)  # type: ignore[arg-type]
    require_constant(x.dims[d], "a scatter")
    source = [ctx.layout(a) for a in node.args[3:] if isinstance(a, fx.Node)]
    for y in source:
        if any(i != d and p != q for i, (p, q) in enumerate(zip(y.dims, index.dims, strict=False)) if y.dims):
            raise Refusal(Code.RECURRENCE, "a scatter writes values of other positions")
    dims = list(x.dims)
    for i, (a, b) in enumerate(zip(x.dims, index.dims, strict=True)):
        if i == d:
            require_constant(b, "a scatter")
        elif a != b:
            if x.data is not Data.NONE or a != ():
                raise Refusal(Code.RECURRENCE, "a scatter writes to other positions")
            dims[i] = b
    return Layout(tuple(dims), join_data([x, index, *source]))


def _slice_scatter(node: fx.Node, ctx: RuleContext) -> Layout:
    x, source = ctx.layout(node.args[0]), ctx.layout(node.args[1])
    d = (int(node.args[2]) if len(node.args) > 2 else 0) % len(x.dims)  # type: ignore[arg-type]
    if x.dims[d] != source.dims[d]:
        require_constant(x.dims[d], "a slice assignment")
        require_constant(source.dims[d], "a slice assignment")
    rest = broadcast_dims([Layout((*y.dims[:d], (), *y.dims[d + 1 :])) for y in (x, source)])
    return Layout((*rest[:d], x.dims[d], *rest[d + 1 :]), join_data([x, source]))


def _select_scatter(node: fx.Node, ctx: RuleContext) -> Layout:
    x, source = ctx.layout(node.args[0]), ctx.layout(node.args[1])
    d = int(node.args[2]) % len(x.dims)  # type: ignore[arg-type]
    require_constant(x.dims[d], "a selection")
    return Layout(x.dims, join_data([x, source]))


def _index(node: fx.Node, ctx: RuleContext) -> Layout:
    """Lookup by index tensors: a table row, or the value's own rows and positions enumerated in order."""
    x = ctx.layout(node.args[0])
    given = list(node.args[1])  # type: ignore[arg-type]
    used = [i for i, a in enumerate(given) if a is not None]
    if not used or used != list(range(used[0], used[-1] + 1)):
        raise Refusal(Code.UNKNOWN_OPERATOR, "a lookup with separated index tensors")
    indices = [given[i] for i in used]
    if any(a.meta["val"].dtype == torch.bool for a in indices):
        raise Refusal(Code.RECURRENCE, "a boolean lookup picks positions by their values")
    layouts = [ctx.layout(a) for a in indices]
    routed = looked_up(x, layouts[0]) if used == [0] else None
    if routed is not None:
        return routed
    dims = broadcast_dims([Layout(x.dims) for x in layouts])
    rest = (x.dims[: used[0]], x.dims[used[-1] + 1 :])
    data = x.data
    for position, index, layout in zip(used, indices, layouts, strict=True):
        dim = x.dims[position]
        if all(isinstance(f, Size) for f in dim):
            data = max(data, layout.data)
            continue
        if ctx.enumerates(index) != dim:
            raise Refusal(Code.RECURRENCE, "a lookup reads other positions")
    if data is Data.NONE and any(layout.data is Data.ORDINAL for layout in layouts):
        data = Data.ORDINAL if any(isinstance(f, Row) for f in Layout(x.dims).factors) is False else data
    return Layout((*rest[0], *dims, *rest[1]), data)


def _index_select(node: fx.Node, ctx: RuleContext) -> Layout:
    x, index = ctx.layout(node.args[0]), ctx.layout(node.args[2])
    d = int(node.args[1]) % len(x.dims)  # type: ignore[arg-type]
    require_constant(x.dims[d], "a lookup")
    if not x.is_replicated and not index.is_replicated:
        raise Refusal(Code.RECURRENCE, "a lookup reads other positions")
    return Layout((*x.dims[:d], index.dims[0] if index.dims else (), *x.dims[d + 1 :]), join_data([x, index]))


def _one_hot(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    return Layout((*x.dims, (Size(int(ctx.shape(node)[-1])),)), x.data)


def _triangle(node: fx.Node, ctx: RuleContext) -> Layout:
    """The diagonal compares two indices: legal for masks over (q, k) and constants, not for a token's own dims."""
    x = ctx.layout(node.args[0])
    corner = Layout(x.dims[-2:])
    if corner.has_row or (x.data is not Data.NONE and corner.positions):
        raise Refusal(Code.RECURRENCE, "a triangle compares positions or rows with another dim")
    return x


def _diff(node: fx.Node, ctx: RuleContext) -> Layout:
    """Differences of neighbours, with one value prepended: entry t reads t and t - 1."""
    x = ctx.layout(node.args[0])
    order = node.args[1] if len(node.args) > 1 else 1
    d = int(node.args[2] if len(node.args) > 2 else -1) % len(x.dims)  # type: ignore[arg-type]
    prepend = node.args[3] if len(node.args) > 3 else node.kwargs.get("prepend")
    append = node.args[4] if len(node.args) > 4 else node.kwargs.get("append")
    same = (ctx.shape(node)[d] - ctx.shape(node.args[0])[d]).expand() == 0  # type: ignore[arg-type]
    if order != 1 or prepend is None or append is not None or not same or not is_position(x.dims[d]):
        raise Refusal(Code.RECURRENCE, "differences of neighbouring positions")
    return Layout(x.dims, join_data([x, ctx.layout(prepend)]))


RULES = (
    OpRule(
        (_aten.slice.Tensor,),
        _slice,
        samples=(
            Sample(lambda x: x[..., :4], ("token[B, T, 8]",), "token[B, T, 4]"),
            Sample(lambda x: x[:, :-1], ("token[B, T, 8]",), "token[B, T[:T - 1], 8]"),
            Sample(lambda x: x[:, -3:], ("token[B, T, 8]",), "token[B, T[T - 3:], 8]"),
            Sample(lambda x, c: c[: x.shape[1]], ("token[B, T]", "none[5000, 8]"), "none[T, 8]"),
        ),
    ),
    OpRule((_aten.select.int,), _select, samples=(Sample(lambda x: x[..., 1], ("token[B, T, 8]",), "token[B, T]"),)),
    OpRule(
        (_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default, _aten.unbind.int),
        _pieces,
        samples=(Sample(lambda x: x.chunk(2, -1)[1], ("token[B, T, 8]",), "token[B, T, 4]"),),
    ),
    OpRule(
        (_aten.cat.default,),
        _cat,
        samples=(
            Sample(lambda x: torch.cat([x, x], -1), ("token[B, T, 8]",), "token[B, T, 16]"),
            Sample(lambda x: torch.cat([x, x], 1), ("token[B, T, 8]",), "BFX011"),
        ),
    ),
    OpRule(
        (_aten.stack.default,),
        _stack,
        samples=(Sample(lambda x: torch.stack([x, x], -1), ("token[B, T]",), "token[B, T, 2]"),),
    ),
    OpRule((_aten.constant_pad_nd.default, _aten.pad.default), _pad),
    OpRule(
        (_aten.gather.default,),
        _gather,
        samples=(
            Sample(lambda x, i: x.gather(-1, i % 8), ("token[B, T, 8]", "token[B, T, 1]:int"), "token[B, T, 1]"),
            Sample(
                lambda x, i: x.expand(i.shape[0], -1).gather(1, i % 8), ("none[8]", "token[B, T]:int"), "token[B, T]"
            ),
            Sample(lambda x, i: x.gather(1, i % 2), ("token[B, T]", "token[B, T]:int"), "BFX011"),
        ),
    ),
    OpRule(
        (_aten.scatter.src, _aten.scatter.value, _aten.scatter_add.default, _aten.scatter.reduce),
        _scatter,
    ),
    OpRule((_aten.slice_scatter.default,), _slice_scatter),
    OpRule((_aten.select_scatter.default,), _select_scatter),
    OpRule(
        (_aten.index.Tensor,),
        _index,
        samples=(Sample(lambda x, w: w[x], ("token[B, T]:int", "none[16, 8]"), "token[B, T, 8]"),),
    ),
    OpRule((_aten.index_select.default,), _index_select),
    OpRule((_aten.one_hot.default,), _one_hot),
    OpRule((_aten.diff.default,), _diff, packable=False),
    OpRule((_aten.tril.default, _aten.triu.default), _triangle),
)

__all__ = ["BASE", "RULES", "Factor"]
