"""How each operator's value at an index follows from its arguments': one handler an operator, in two tables.

`STRUCTURAL` operators only rearrange, so they are followed down to token values; `HANDLERS` compute, and are followed
for masks, scores and values that depend on positions alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from branchfx.passes.ir import Position
from branchfx.passes.lifted import (
    Index,
    Lifted,
    LifterLike,
    Unliftable,
    as_boolean,
    as_number,
    is_boolean,
    is_very_negative,
)

_aten = torch.ops.aten

Handler = Callable[[LifterLike, fx.Node, Index], Lifted]


def _pointwise(function: Callable[..., Any]) -> Handler:
    def run(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
        parts = [lifter.of(node, i, index) for i in range(len(node.args))]
        if any(p.visible != sympy.true for p in parts):
            raise Unliftable(f"{node.name} of a masked value")
        return Lifted(function(*(p.expr for p in parts)))

    return run


def _number(function: Callable[..., Any]) -> Handler:
    return _pointwise(lambda *xs: function(*(as_number(x) for x in xs)))


def _comparison(function: Callable[..., Any], masked: bool) -> Handler:
    """A comparison; `masked` is what it says of a very negative number and an ordinary one."""

    def run(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
        a, b = (lifter.of(node, i, index) for i in (0, 1))
        if b.visible != sympy.true:
            raise Unliftable(f"{node.name} with a masked value")
        bound = as_number(b.expr)
        holds = function(as_number(a.expr), bound)
        if a.visible == sympy.true:
            return Lifted(holds)
        if not getattr(bound, "is_number", False) or is_very_negative(bound):
            raise Unliftable(f"{node.name} of a masked value")
        return Lifted(sympy.Or(sympy.Not(a.visible), holds) if masked else sympy.And(a.visible, holds))

    return run


def _logic(function: Callable[..., Any]) -> Handler:
    return _pointwise(lambda *xs: function(*(as_boolean(x) for x in xs)))


def _add(sign: int) -> Handler:
    def run(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
        a, b = (lifter.of(node, i, index) for i in (0, 1))
        alpha = sympy.sympify(node.kwargs.get("alpha", 1)) * sign
        if b.visible != sympy.true and not (alpha > 0) == True:  # noqa: E712 - a sympy relation
            raise Unliftable(f"{node.name} subtracts a masked value")
        x, y = as_number(a.expr), as_number(b.expr)
        if is_very_negative(y):
            return Lifted(x, sympy.false)
        return Lifted(x + alpha * y, sympy.And(a.visible, b.visible))

    return run


def _is_indicator(lifter: LifterLike, expr: Any) -> bool:
    """Whether an expression is 0 or 1: a truth value, an atom of ints (a mask), or one minus such."""
    if is_boolean(expr) or expr in (0, 1):
        return True
    if isinstance(expr, sympy.Symbol):
        return expr in lifter.atoms and not lifter.atoms[expr][0].meta["val"].dtype.is_floating_point
    if isinstance(expr, sympy.Piecewise):
        return all(_is_indicator(lifter, value) for value, _ in expr.args)
    if isinstance(expr, sympy.Mul):
        return all(_is_indicator(lifter, part) for part in expr.args)
    return isinstance(expr, sympy.Add) and _is_one_minus(lifter, expr)


def _is_one_minus(lifter: LifterLike, expr: Any) -> bool:
    rest = sympy.expand(1 - expr)
    return not isinstance(rest, sympy.Add) and _is_indicator(lifter, rest)


def _rsub(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    a, b = (lifter.of(node, i, index) for i in (0, 1))
    if a.visible != sympy.true:
        raise Unliftable(node.name)
    return Lifted(as_number(b.expr) - as_number(a.expr))


def _mul(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    a, b = (lifter.of(node, i, index) for i in (0, 1))
    x, y = as_number(a.expr), as_number(b.expr)
    for number, other in ((y, a), (x, b)):
        if is_very_negative(number):
            # `(1 - mask) * finfo.min`: masked where the factor is one
            if not _is_indicator(lifter, other.expr):
                raise Unliftable(f"{node.name}, a large factor of what is no mask,")
            lifter.finite_masking = True
            return Lifted(sympy.Integer(0), sympy.Not(as_boolean(other.expr)))
    for scale, other in ((y, a), (x, b)):
        if other.visible != sympy.true and not (scale > 0) == True:  # noqa: E712
            raise Unliftable(f"{node.name} scales a masked value")
    return Lifted(x * y, sympy.And(a.visible, b.visible))


def _div(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    a, b = (lifter.of(node, i, index) for i in (0, 1))
    if b.visible != sympy.true or (a.visible != sympy.true and not (b.expr > 0) == True):  # noqa: E712
        raise Unliftable(node.name)
    return Lifted(as_number(a.expr) / as_number(b.expr), a.visible)


def _choose(lifter: LifterLike, condition: Any, yes: Lifted, no: Lifted) -> Lifted:
    condition = as_boolean(condition)
    if is_very_negative(no.expr) or no.visible == sympy.false:
        lifter.finite_masking |= no.expr != -sympy.oo
        return Lifted(yes.expr, sympy.And(yes.visible, condition))
    if is_very_negative(yes.expr) or yes.visible == sympy.false:
        lifter.finite_masking |= yes.expr != -sympy.oo
        return Lifted(no.expr, sympy.And(no.visible, sympy.Not(condition)))
    if yes.visible != sympy.true or no.visible != sympy.true:
        raise Unliftable("a choice between masked values")
    if is_boolean(yes.expr) and is_boolean(no.expr):
        return Lifted(sympy.Or(sympy.And(condition, yes.expr), sympy.And(sympy.Not(condition), no.expr)))
    return Lifted(sympy.Piecewise((as_number(yes.expr), condition), (as_number(no.expr), True)))


def _where(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    condition, yes, no = (lifter.of(node, i, index) for i in (0, 1, 2))
    return _choose(lifter, condition.expr, yes, no)


def _masked_fill(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    x, condition, fill = (lifter.of(node, i, index) for i in (0, 1, 2))
    return _choose(lifter, condition.expr, fill, x)


def _floor(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    """`maximum(x, finfo.min)` and `clamp(min=finfo.min)` change nothing that counts."""
    x = lifter.of(node, 0, index)
    if len(node.args) > 2 and node.args[2] is not None:
        raise Unliftable(node.name)
    bound = lifter.of(node, 1, index)
    if not is_very_negative(bound.expr):
        if x.visible != sympy.true:
            raise Unliftable(node.name)
        return Lifted(sympy.Max(as_number(x.expr), as_number(bound.expr)))
    return x


def _arange(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    if len(index[0]) != 1:
        raise Unliftable(node.name)
    start = lifter.lift(node.args[0], ()).expr if node.target is not _aten.arange.default else sympy.Integer(0)
    step = lifter.lift(node.args[2], ()).expr if node.target is _aten.arange.start_step else sympy.Integer(1)
    return Lifted(start + step * index[0][0])


def _full(argument: int) -> Handler:
    def run(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
        value = lifter.lift(node.args[argument], ()).expr
        return Lifted(as_boolean(value) if node.meta["val"].dtype == torch.bool else value)

    return run


def _constant(number: int) -> Handler:
    def run(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
        return Lifted(as_boolean(number) if node.meta["val"].dtype == torch.bool else sympy.Integer(number))

    return run


def _triangle(keep_lower: bool) -> Handler:
    def run(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
        x = lifter.of(node, 0, index)
        if len(index[-1]) != 1 or len(index[-2]) != 1:
            raise Unliftable(node.name)
        offset = lifter.lift(node.args[1], ()).expr if len(node.args) > 1 else sympy.Integer(0)
        i, j = index[-2][0], index[-1][0]
        inside = sympy.Le(j - i, offset) if keep_lower else sympy.Ge(j - i, offset)
        zero = sympy.false if is_boolean(x.expr) else sympy.Integer(0)
        if x.expr == -sympy.oo or is_very_negative(x.expr):
            lifter.finite_masking |= x.expr != -sympy.oo
            return Lifted(sympy.Integer(0), sympy.Not(inside))
        return _choose(lifter, inside, x, Lifted(zero))

    return run


def _cast(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    x = lifter.lift(node.args[0], index)
    source, target = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    if target == torch.bool and source != torch.bool:
        # a masked value is a number other than zero
        return Lifted(sympy.Or(sympy.Not(x.visible), as_boolean(x.expr)))
    if source == torch.bool and target != torch.bool:
        return Lifted(as_number(x.expr), x.visible)
    if source.is_floating_point and not target.is_floating_point:
        raise Unliftable(node.name)
    if not target.is_floating_point and target.itemsize < min(source.itemsize, 4):
        raise Unliftable(f"{node.name}, which may wrap around,")
    if source.is_floating_point and target.itemsize < source.itemsize:
        lifter.narrowest = min(lifter.narrowest, target.itemsize)
    return x


def _detach(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    if lifter.layout(node).is_pair and node.meta["val"].is_floating_point():
        raise Unliftable(f"{node.name}, which stops gradients,")
    return _same(lifter, node, index)


def _diff(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    """`x[t] - x[t - 1]`, where the prepended value continues x to t = -1."""
    d = int(node.args[2] if len(node.args) > 2 else -1) % len(index)  # type: ignore[arg-type]
    prepend = node.args[3] if len(node.args) > 3 else node.kwargs.get("prepend")
    (here,) = index[d]
    x = lifter.lift(node.args[0], index)
    if not isinstance(prepend, fx.Node):
        raise Unliftable(node.name)
    first = (sympy.Integer(0),) if lifter.layout(prepend).dims[d] else ()
    before = lifter.lift(prepend, (*index[:d], first, *index[d + 1 :]))
    if x.visible != sympy.true or sympy.expand(x.expr.subs(here, -1) - before.expr) != 0:
        raise Unliftable(node.name)
    return Lifted(sympy.expand(x.expr - x.expr.subs(here, here - 1)))


def _sum_of_nothing(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    """A running sum of zeros."""
    if as_number(lifter.lift(node.args[0], index).expr) != 0:
        raise Unliftable(node.name)
    return Lifted(sympy.Integer(0))


def _same(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    return lifter.lift(node.args[0], index)


def _no_dropout(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    return lifter.lift(node.args[0], index)


def _expand(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    return lifter.of(node, 0, index)


def _transpose(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    inner = list(index)
    i, j = node.args[1], node.args[2]
    inner[i], inner[j] = inner[j], inner[i]  # type: ignore[index]
    return lifter.lift(node.args[0], tuple(inner))


def _permute(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    inner: list[tuple[sympy.Expr, ...]] = [()] * len(index)
    for out, source in enumerate(node.args[1]):  # type: ignore[arg-type]
        inner[int(source)] = index[out]  # type: ignore[arg-type]
    return lifter.lift(node.args[0], tuple(inner))


def _regroup(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    """A view keeps the factor sequence; a constant that is split or joined is not followed."""
    source, here = lifter.layout(node.args[0]), lifter.layout(node)  # type: ignore[arg-type]
    if source.factors != here.factors:
        raise Unliftable(node.name)
    flat = [expr for ix in index for expr in ix]
    inner, at = [], 0
    for dim in source.dims:
        inner.append(tuple(flat[at : at + len(dim)]))
        at += len(dim)
    return lifter.lift(node.args[0], tuple(inner))


def _slice(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    d = (int(node.args[1]) if len(node.args) > 1 else 0) % len(index)  # type: ignore[arg-type]
    source, here = lifter.layout(node.args[0]), lifter.layout(node)  # type: ignore[arg-type]
    if source.dims[d] == here.dims[d]:
        return lifter.lift(node.args[0], index)
    if any(isinstance(f, Position) for f in source.dims[d]):
        return lifter.lift(node.args[0], index)  # columns are absolute
    if any(isinstance(f, Position) for f in here.dims[d]) and len(node.args) > 2 and node.args[2] in (None, 0):
        return lifter.lift(node.args[0], index)  # row i of a table is column i
    raise Unliftable(node.name)


def _index(lifter: LifterLike, node: fx.Node, index: Index) -> Lifted:
    given = node.args[1]
    if any(a is None for a in given) or len(given) != len(lifter.layout(node.args[0]).dims):  # type: ignore[union-attr, arg-type]
        raise Unliftable(node.name)
    parts = [lifter.lift(a, lifter.broadcast(a, index)).expr for a in given]  # type: ignore[union-attr]
    dims = lifter.layout(node.args[0]).dims  # type: ignore[arg-type]
    return lifter.lift(node.args[0], tuple((p,) if dim != () else () for p, dim in zip(parts, dims, strict=True)))


def _table(names: str, handler: Handler) -> dict[Any, Handler]:
    out: dict[Any, Handler] = {}
    for name in names.split():
        packet, _, overload = name.partition(".")
        found = getattr(getattr(_aten, packet, None), overload or "default", None)
        if found is not None:
            out[found] = handler
    return out


STRUCTURAL: dict[Any, Handler] = {
    **_table("expand.default", _expand),
    **_table(
        "unsqueeze.default squeeze.dim squeeze.dims squeeze.default view.default reshape.default _unsafe_view.default",
        _regroup,
    ),
    **_table("transpose.int", _transpose),
    **_table("permute.default", _permute),
    **_table("slice.Tensor", _slice),
    **_table("index.Tensor", _index),
    **_table("_to_copy.default to.dtype to.device to.dtype_layout", _cast),
    **_table("clone contiguous alias lift_fresh lift_fresh_copy", _same),
    **_table("detach", _detach),
}

HANDLERS: dict[Any, Handler] = {
    **_table("arange.default arange.start arange.start_step", _arange),
    **_table("full.default", _full(1)),
    **_table("new_full.default", _full(2)),
    **_table("full_like.default", _full(1)),
    **_table("scalar_tensor.default", _full(0)),
    **_table("ones.default new_ones.default ones_like.default", _constant(1)),
    **_table("zeros.default new_zeros.default zeros_like.default", _constant(0)),
    **_table("add.Tensor add.Scalar", _add(1)),
    **_table("sub.Tensor sub.Scalar", _add(-1)),
    **_table("rsub.Scalar rsub.Tensor", _rsub),
    **_table("mul.Tensor mul.Scalar", _mul),
    **_table("div.Tensor div.Scalar true_divide.Tensor", _div),
    **_table("floor_divide.default floor_divide.Scalar", _number(lambda x, y: sympy.floor(x / y))),
    **_table("remainder.Tensor remainder.Scalar", _number(sympy.Mod)),
    **_table("neg", _number(operator.neg)),
    **_table("abs", _number(sympy.Abs)),
    **_table("tanh", _number(sympy.tanh)),
    **_table("pow.Tensor_Scalar", _number(operator.pow)),
    **_table("minimum", _number(sympy.Min)),
    **_table("maximum max.other clamp_min clamp", _floor),
    **_table("le.Tensor le.Scalar", _comparison(sympy.Le, True)),
    **_table("lt.Tensor lt.Scalar", _comparison(sympy.Lt, True)),
    **_table("ge.Tensor ge.Scalar", _comparison(sympy.Ge, False)),
    **_table("gt.Tensor gt.Scalar", _comparison(sympy.Gt, False)),
    **_table("eq.Tensor eq.Scalar", _comparison(sympy.Eq, False)),
    **_table("ne.Tensor ne.Scalar", _comparison(sympy.Ne, True)),
    **_table("__and__.Tensor bitwise_and.Tensor logical_and __and__.Scalar bitwise_and.Scalar", _logic(sympy.And)),
    **_table("__or__.Tensor bitwise_or.Tensor logical_or __or__.Scalar bitwise_or.Scalar", _logic(sympy.Or)),
    **_table("bitwise_xor.Tensor logical_xor __xor__.Tensor", _logic(sympy.Xor)),
    **_table("logical_not bitwise_not", _logic(sympy.Not)),
    **_table("where.self where.ScalarSelf where.ScalarOther where.Scalar", _where),
    **_table("masked_fill.Scalar masked_fill.Tensor", _masked_fill),
    **_table("diff.default", _diff),
    **_table("cumsum.default", _sum_of_nothing),
    **_table("tril.default", _triangle(True)),
    **_table("triu.default", _triangle(False)),
    **_table("dropout.default native_dropout.default", _no_dropout),
}
