"""What a lifted value is: an expression of (b, h, q, k) and where it holds; and what a handler may ask a lifter."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import sympy
from sympy.logic.boolalg import Boolean
from torch import fx

from branchfx.passes.ir import Layout

ROW = sympy.Symbol("b", integer=True, nonnegative=True)
HEAD = sympy.Symbol("h", integer=True, nonnegative=True)
QUERY = sympy.Symbol("q", integer=True, nonnegative=True)
KEY = sympy.Symbol("k", integer=True, nonnegative=True)

VERY_NEGATIVE = -3.0e4
"""At or below this an additive number means "masked": its weight underflows to zero in every float dtype."""

Index = tuple[tuple[sympy.Expr, ...], ...]


class Unliftable(Exception):
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


class LifterLike(Protocol):
    """What a handler may ask."""

    finite_masking: bool
    narrowest: int
    atoms: dict[sympy.Symbol, tuple[fx.Node, str]]

    def layout(self, node: fx.Node) -> Layout:
        """Return a node's layout, or raise Unliftable."""

    def lift(self, node: Any, index: Index) -> Lifted:
        """Return the value of a node at an index, or raise Unliftable."""

    def broadcast(self, arg: Any, index: Index) -> Index:
        """Return the index of an argument that is broadcast to the index's rank."""

    def of(self, node: fx.Node, argument: int, index: Index) -> Lifted:
        """Lift a broadcast argument."""
