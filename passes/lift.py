"""Evaluate a mask or score subgraph symbolically at one index: a sympy expression comes out.

The value of a node at index (b, h, q, k) is computed by walking back over the graph. What cannot be taken apart and
has at most one axis of positions becomes an *atom*: a symbol that stands for a token value at the query or the key.
Rows are `b`, columns `q` and `k` (always columns of the caller's batch, whatever slices lie between).

A score is kept as `Lifted(expr, visible)`: `expr` where `visible` holds, a number of large magnitude and negative
sign elsewhere, so that masks by `where`, by `masked_fill` and by adding `finfo.min` become one thing.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx

from branchfx.passes.ir import BASE, Data, Dim, Layout, Position, Row, Size

_aten = torch.ops.aten

ROW = sympy.Symbol("b", integer=True, nonnegative=True)
HEAD = sympy.Symbol("h", integer=True, nonnegative=True)
QUERY = sympy.Symbol("q", integer=True, nonnegative=True)
KEY = sympy.Symbol("k", integer=True, nonnegative=True)

VERY_NEGATIVE = -3.0e4
"""At or below this an additive number means "masked": its weight underflows to zero in every float dtype."""

Index = tuple[tuple[sympy.Expr, ...], ...]


class Unliftable(Exception):  # noqa: N818 - a refusal, not an error
    """The subgraph is no expression of b, h, q, k and token values; the argument names the node."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lifted:
    """The value of a node at one index."""

    expr: Any
    visible: Any = sympy.true


def is_boolean(expr: Any) -> bool:
    """Whether an expression is a truth value."""
    return isinstance(expr, (bool, Boolean)) and not isinstance(expr, sympy.Symbol)


def as_number(expr: Any) -> Any:
    """Return a truth value as 0 or 1."""
    if expr is sympy.true or expr is True:
        return sympy.Integer(1)
    if expr is sympy.false or expr is False:
        return sympy.Integer(0)
    return sympy.Piecewise((1, expr), (0, True)) if is_boolean(expr) else expr


def as_boolean(expr: Any) -> Any:
    """Return a number as a truth value, or a truth value as it is."""
    if isinstance(expr, (bool, int, float)):
        return sympy.true if expr else sympy.false
    if is_boolean(expr):
        return expr
    if isinstance(expr, sympy.Piecewise):
        folded = [(sympy.Ne(value, 0), condition) for value, condition in expr.args]
        if all(v is sympy.true or v is sympy.false for v, _ in folded) and len(folded) == 2:
            condition = folded[0][1]
            return condition if folded[0][0] is sympy.true else sympy.Not(condition)
    return sympy.Ne(expr, 0)


def is_very_negative(value: Any) -> bool:
    """Whether a value is a number that masks."""
    return bool(getattr(value, "is_number", False)) and not is_boolean(value) and bool(value <= VERY_NEGATIVE)


class Lifter:
    """Lifts nodes; remembers which symbol stands for which node, and which contraction is the dot product."""

    def __init__(self, layouts: Mapping[str, Layout | tuple[Layout, ...]]) -> None:
        self.layouts = layouts
        self.atoms: dict[sympy.Symbol, tuple[fx.Node, str]] = {}
        self.dots: dict[sympy.Symbol, fx.Node] = {}
        self.finite_masking = False

    def layout(self, node: fx.Node) -> Layout:
        """Return a node's layout.

        Raises:
            Unliftable: It has none.
        """
        found = self.layouts.get(node.name)
        if not isinstance(found, Layout):
            raise Unliftable(node.name)
        return found

    def lift(self, node: Any, index: Index) -> Lifted:
        """Return the value of `node` at `index`.

        Raises:
            Unliftable: It is no expression of indices and token values.
        """
        if not isinstance(node, fx.Node):
            if isinstance(node, (bool, int, float)):
                return Lifted(sympy.sympify(node))
            raise Unliftable(str(node))
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int, float)) and not isinstance(value, bool):
            return Lifted(value.node.expr if isinstance(value, torch.SymInt) else sympy.sympify(value))
        layout = self.layout(node)
        if layout.data is Data.ROW:
            raise Unliftable(node.name)
        structural = _STRUCTURAL.get(node.target)
        if structural is not None:
            try:
                return structural(self, node, index)
            except Unliftable:
                if layout.is_pair:
                    raise
                return self.atom(node, index)
        if layout.data is Data.TOKEN and not layout.is_pair:
            return self.atom(node, index)
        if layout.is_pair and node.target in _CONTRACTIONS:
            return self.dot(node, index)
        handler = _HANDLERS.get(node.target)
        if handler is None:
            if layout.is_pair:
                raise Unliftable(f"{node.name} ({node.target})")
            return self.atom(node, index)
        try:
            return handler(self, node, index)
        except Unliftable:
            if layout.is_pair:
                raise
            return self.atom(node, index)

    def atom(self, node: fx.Node, index: Index) -> Lifted:
        """Return the symbol of a token value at the query or at the key."""
        layout = self.layout(node)
        side = ""
        for dim, ix in zip(layout.dims, index, strict=True):
            for factor, expr in zip(dim, ix, strict=True):
                if isinstance(factor, Row) and expr != ROW:
                    raise Unliftable(f"{node.name} at another row")
                if isinstance(factor, Position):
                    if expr not in (QUERY, KEY):
                        raise Unliftable(f"{node.name} at position {expr}")
                    side = "q" if expr == QUERY else "k"
                if isinstance(factor, Size) and not expr.is_Symbol:
                    raise Unliftable(f"{node.name} at index {expr}")
        if layout.is_replicated and layout.factors == () and not side:
            side = "c"
        symbol = sympy.Symbol(f"{node.name}_at_{side or 'k'}", real=True)
        self.atoms[symbol] = (node, side or "k")
        return Lifted(symbol)

    def dot(self, node: fx.Node, index: Index) -> Lifted:
        """Return the symbol of a dot product of queries and keys; `baddbmm` adds a bias to it."""
        if len(index[-2]) != 1 or len(index[-1]) != 1 or (index[-2][0], index[-1][0]) != (QUERY, KEY):
            raise Unliftable(f"{node.name} at transposed positions")
        symbol = sympy.Symbol(f"dot_{node.name}", real=True)
        self.dots[symbol] = node
        if node.target is not _aten.baddbmm.default:
            return Lifted(symbol)
        bias = self.lift(node.args[0], self.broadcast(node.args[0], index))
        beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        return Lifted(sympy.sympify(alpha) * symbol + sympy.sympify(beta) * as_number(bias.expr), bias.visible)

    def broadcast(self, arg: Any, index: Index) -> Index:
        """Return the index of an argument that is broadcast to the index's rank."""
        if not isinstance(arg, fx.Node) or not isinstance(arg.meta.get("val"), torch.Tensor):
            return ()
        dims = self.layout(arg).dims
        tail = index[len(index) - len(dims) :] if dims else ()
        return tuple(() if dim == () else ix for dim, ix in zip(dims, tail, strict=True))

    def of(self, node: fx.Node, argument: int, index: Index) -> Lifted:
        """Lift a broadcast argument."""
        arg = node.args[argument]
        return self.lift(arg, self.broadcast(arg, index))


Handler = Callable[[Lifter, fx.Node, Index], Lifted]


def _pointwise(function: Callable[..., Any]) -> Handler:
    def run(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
        parts = [lifter.of(node, i, index) for i in range(len(node.args))]
        if any(p.visible != sympy.true for p in parts):
            raise Unliftable(f"{node.name} of a masked value")
        return Lifted(function(*(p.expr for p in parts)))

    return run


def _number(function: Callable[..., Any]) -> Handler:
    return _pointwise(lambda *xs: function(*(as_number(x) for x in xs)))


def _logic(function: Callable[..., Any]) -> Handler:
    return _pointwise(lambda *xs: function(*(as_boolean(x) for x in xs)))


def _add(sign: int) -> Handler:
    def run(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
        a, b = (lifter.of(node, i, index) for i in (0, 1))
        alpha = sympy.sympify(node.kwargs.get("alpha", 1)) * sign
        if b.visible != sympy.true and not (alpha > 0) == True:  # noqa: E712 - a sympy relation
            raise Unliftable(f"{node.name} subtracts a masked value")
        x, y = as_number(a.expr), as_number(b.expr)
        if is_very_negative(y):
            return Lifted(x, sympy.false)
        return Lifted(x + alpha * y, sympy.And(a.visible, b.visible))

    return run


def _rsub(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
    a, b = (lifter.of(node, i, index) for i in (0, 1))
    if a.visible != sympy.true:
        raise Unliftable(node.name)
    return Lifted(as_number(b.expr) - as_number(a.expr))


def _mul(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
    a, b = (lifter.of(node, i, index) for i in (0, 1))
    x, y = as_number(a.expr), as_number(b.expr)
    for number, other in ((y, a), (x, b)):
        if is_very_negative(number):
            # `(1 - mask) * finfo.min`: masked where the factor is not zero
            lifter.finite_masking = True
            return Lifted(sympy.Integer(0), sympy.Not(as_boolean(other.expr)))
    for scale, other in ((y, a), (x, b)):
        if other.visible != sympy.true and not (scale > 0) == True:  # noqa: E712
            raise Unliftable(f"{node.name} scales a masked value")
    return Lifted(x * y, sympy.And(a.visible, b.visible))


def _div(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
    a, b = (lifter.of(node, i, index) for i in (0, 1))
    if b.visible != sympy.true or (a.visible != sympy.true and not (b.expr > 0) == True):  # noqa: E712
        raise Unliftable(node.name)
    return Lifted(as_number(a.expr) / as_number(b.expr), a.visible)


def _choose(lifter: Lifter, condition: Any, yes: Lifted, no: Lifted) -> Lifted:
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


def _where(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
    condition, yes, no = (lifter.of(node, i, index) for i in (0, 1, 2))
    return _choose(lifter, condition.expr, yes, no)


def _masked_fill(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
    x, condition, fill = (lifter.of(node, i, index) for i in (0, 1, 2))
    return _choose(lifter, condition.expr, fill, x)


def _floor(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
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


def _arange(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
    if len(index[0]) != 1:
        raise Unliftable(node.name)
    start = lifter.lift(node.args[0], ()).expr if node.target is not _aten.arange.default else sympy.Integer(0)
    step = lifter.lift(node.args[2], ()).expr if node.target is _aten.arange.start_step else sympy.Integer(1)
    return Lifted(start + step * index[0][0])


def _full(argument: int) -> Handler:
    def run(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
        value = lifter.lift(node.args[argument], ()).expr
        return Lifted(as_boolean(value) if node.meta["val"].dtype == torch.bool else value)

    return run


def _constant(number: int) -> Handler:
    def run(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
        return Lifted(as_boolean(number) if node.meta["val"].dtype == torch.bool else sympy.Integer(number))

    return run


def _triangle(keep_lower: bool) -> Handler:
    def run(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
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


def _cast(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
    x = lifter.lift(node.args[0], index)
    source, target = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    if target == torch.bool and source != torch.bool:
        return Lifted(as_boolean(x.expr), x.visible)
    if source == torch.bool and target != torch.bool:
        return Lifted(as_number(x.expr), x.visible)
    if source.is_floating_point and not target.is_floating_point:
        raise Unliftable(node.name)
    return x


def _same(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
    return lifter.lift(node.args[0], index)


def _no_dropout(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
    return lifter.lift(node.args[0], index)


def _expand(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
    return lifter.of(node, 0, index)


def _transpose(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
    inner = list(index)
    i, j = node.args[1], node.args[2]
    inner[i], inner[j] = inner[j], inner[i]  # type: ignore[index]
    return lifter.lift(node.args[0], tuple(inner))


def _permute(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
    inner: list[tuple[sympy.Expr, ...]] = [()] * len(index)
    for out, source in enumerate(node.args[1]):  # type: ignore[arg-type]
        inner[int(source)] = index[out]  # type: ignore[arg-type]
    return lifter.lift(node.args[0], tuple(inner))


def _regroup(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
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


def _slice(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
    d = (int(node.args[1]) if len(node.args) > 1 else 0) % len(index)  # type: ignore[arg-type]
    source, here = lifter.layout(node.args[0]), lifter.layout(node)  # type: ignore[arg-type]
    if source.dims[d] == here.dims[d]:
        return lifter.lift(node.args[0], index)
    if any(isinstance(f, Position) for f in source.dims[d]):
        return lifter.lift(node.args[0], index)  # columns are absolute
    if any(isinstance(f, Position) for f in here.dims[d]) and len(node.args) > 2 and node.args[2] in (None, 0):
        return lifter.lift(node.args[0], index)  # row i of a table is column i
    raise Unliftable(node.name)


def _index(lifter: Lifter, node: fx.Node, index: Index) -> Lifted:
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


_CONTRACTIONS = frozenset((_aten.matmul.default, _aten.bmm.default, _aten.baddbmm.default, _aten.mm.default))

_STRUCTURAL: dict[Any, Handler] = {
    **_table("expand.default", _expand),
    **_table("unsqueeze.default squeeze.dim squeeze.dims squeeze.default view.default reshape.default _unsafe_view.default", _regroup),
    **_table("transpose.int", _transpose),
    **_table("permute.default", _permute),
    **_table("slice.Tensor", _slice),
    **_table("index.Tensor", _index),
    **_table("_to_copy.default to.dtype to.device to.dtype_layout", _cast),
    **_table("clone contiguous detach alias lift_fresh lift_fresh_copy", _same),
}

_HANDLERS: dict[Any, Handler] = {
    **_table("arange.default arange.start arange.start_step", _arange),
    **_table("full.default", _full(1)),
    **_table("new_full.default", _full(2)),
    **_table("full_like.default scalar_tensor.default", _full(1)),
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
    **_table("maximum clamp_min clamp", _floor),
    **_table("le.Tensor le.Scalar", _number(sympy.Le)),
    **_table("lt.Tensor lt.Scalar", _number(sympy.Lt)),
    **_table("ge.Tensor ge.Scalar", _number(sympy.Ge)),
    **_table("gt.Tensor gt.Scalar", _number(sympy.Gt)),
    **_table("eq.Tensor eq.Scalar", _number(sympy.Eq)),
    **_table("ne.Tensor ne.Scalar", _number(sympy.Ne)),
    **_table(
        "__and__.Tensor bitwise_and.Tensor logical_and __and__.Scalar bitwise_and.Scalar", _logic(sympy.And)
    ),
    **_table("__or__.Tensor bitwise_or.Tensor logical_or __or__.Scalar bitwise_or.Scalar", _logic(sympy.Or)),
    **_table("bitwise_xor.Tensor logical_xor __xor__.Tensor", _logic(sympy.Xor)),
    **_table("logical_not bitwise_not", _logic(sympy.Not)),
    **_table("where.self where.ScalarSelf where.ScalarOther where.Scalar", _where),
    **_table("masked_fill.Scalar masked_fill.Tensor", _masked_fill),
    **_table("tril.default", _triangle(True)),
    **_table("triu.default", _triangle(False)),
    **_table("dropout.default native_dropout.default", _no_dropout),
}


def index_of(layout: Layout, heads: bool = True) -> Index:
    """Return the index (b, h, q, k) of a layout: the first position axis is the query, the second the key."""
    positions = iter((QUERY, KEY) if layout.is_pair else (KEY,))
    sizes = 0
    out = []
    for dim in layout.dims:
        ix = []
        for factor in dim:
            if isinstance(factor, Row):
                ix.append(ROW)
            elif isinstance(factor, Position):
                ix.append(next(positions))
            else:
                sizes += 1
                ix.append(HEAD if sizes == 1 else sympy.Symbol(f"h{sizes}", integer=True, nonnegative=True))
        out.append(tuple(ix))
    return tuple(out)


def enumerated_axis(lifter: Lifter, node: fx.Node) -> Dim | None:
    """Return the axis that an index tensor enumerates (entry i is i), or None."""
    layout = lifter.layout(node)
    if layout.data not in (Data.NONE, Data.ORDINAL) or layout.is_pair:
        return None
    expr = lifter.lift(node, index_of(layout)).expr
    if expr == ROW:
        return (Row(),)
    if expr == KEY:
        return (Position(BASE),)
    return None
