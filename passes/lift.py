"""Evaluate a mask or score subgraph symbolically at one index: a sympy expression comes out.

The value of a node at index (b, h, q, k) is computed by walking back over the graph. What cannot be taken apart and
has at most one axis of positions becomes an *atom*: a symbol that stands for a token value at the query or the key.
Rows are `b`, columns `q` and `k` (always columns of the caller's batch, whatever slices lie between).

A score is kept as `Lifted(expr, visible)`: `expr` where `visible` holds, a number of large magnitude and negative
sign elsewhere, so that masks by `where`, by `masked_fill` and by adding `finfo.min` become one thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from branchfx.passes.ir import BASE, Data, Dim, Layout, Position, Row, Size
from branchfx.passes.lift_rules import HANDLERS, STRUCTURAL
from branchfx.passes.lifted import HEAD, KEY, QUERY, ROW, Index, Lifted, Unliftable, as_number

_aten = torch.ops.aten

_CONTRACTIONS = frozenset((_aten.matmul.default, _aten.bmm.default, _aten.baddbmm.default, _aten.mm.default))


class Lifter:
    """Lifts nodes; remembers which symbol stands for which node, and which contraction is the dot product."""

    def __init__(
        self, layouts: Mapping[str, Layout | tuple[Layout, ...]], tables: Mapping[str, int] | None = None
    ) -> None:
        self.layouts = layouts
        self.tables = tables or {}
        self.atoms: dict[sympy.Symbol, tuple[fx.Node, str]] = {}
        self.dots: dict[sympy.Symbol, fx.Node] = {}
        self.finite_masking = False
        # bytes of the narrowest float that a value was rounded to on the way
        self.narrowest = 8

    def layout(self, node: fx.Node) -> Layout:
        """Return a node's layout.

        Raises:
            Unliftable: It has none.
        """
        found = self.layouts.get(node.name)
        if not isinstance(found, Layout):
            raise Unliftable(node.name)
        return found

    def lift(self, node: Any, index: Index) -> Lifted:  # noqa: C901 - one case a kind of value
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
        if node.name in self.tables:
            (row,), (column,) = index[-2:]
            return Lifted(sympy.And(row >= column, row - column < self.tables[node.name]))
        constant = _scalar_constant(node)
        if constant is not None:
            return Lifted(constant)
        structural = STRUCTURAL.get(node.target)
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
        handler = HANDLERS.get(node.target)
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
                if isinstance(factor, Size) and (not expr.is_Symbol or expr in (ROW, QUERY, KEY)):
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


def _scalar_constant(node: fx.Node) -> sympy.Expr | None:
    """Return the value of a 0-dim tensor that the graph holds, such as the number that masks."""
    if node.op != "get_attr" or not isinstance(node.target, str):
        return None
    held = getattr(node.graph.owning_module, node.target, None)
    if not isinstance(held, torch.Tensor) or isinstance(held, (torch.nn.Parameter, FakeTensor)) or held.dim() != 0:
        return None
    return sympy.sympify(held.item())


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
