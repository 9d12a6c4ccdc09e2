"""What a node costs a token: symbolic FLOPs and bytes in B, T and N, and the seconds that a machine needs for them."""

from __future__ import annotations

import dataclasses

import sympy
import torch
from torch import fx

from branchfx.passes.ir import Layout, Position, Row, Size

_aten = torch.ops.aten

TOKENS = sympy.Symbol("N", integer=True, positive=True)
"""Tokens that a value is held for: B*T in row space, N in packed space."""


@dataclasses.dataclass(frozen=True, slots=True)
class CostEstimate:
    """Work of one node or of a region; both expressions are in `TOKENS`. Unit: FLOPs (a multiply-add is 2), bytes."""

    flops: sympy.Expr
    bytes_moved: sympy.Expr

    def __add__(self, other: CostEstimate) -> CostEstimate:
        return CostEstimate(self.flops + other.flops, self.bytes_moved + other.bytes_moved)


NOTHING = CostEstimate(sympy.Integer(0), sympy.Integer(0))


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Fitted constants of a machine. Units: FLOP/s of a large float32 product, bytes/s of a copy."""

    flops_per_second: float = 1.0e11
    bytes_per_second: float = 1.0e10

    def seconds(self, cost: CostEstimate, tokens: float) -> float:
        """Return the time of a cost at a number of tokens."""
        flops = float(cost.flops.subs(TOKENS, tokens))
        moved = float(cost.bytes_moved.subs(TOKENS, tokens))
        return flops / self.flops_per_second + moved / self.bytes_per_second


def width(layout: Layout) -> int:
    """Return the entries that a value holds for one token."""
    out = 1
    for factor in layout.factors:
        if isinstance(factor, Size):
            out *= factor.value
        elif not isinstance(factor, (Row, Position)):
            out *= width(Layout((factor.factors,)))
    return out


def value_bytes(node: fx.Node, layout: Layout) -> CostEstimate:
    """Return the cost of writing a value once."""
    return CostEstimate(sympy.Integer(0), TOKENS * width(layout) * node.meta["val"].dtype.itemsize)


def node_cost(node: fx.Node, layout: Layout, inner: int) -> CostEstimate:
    """Return the cost of computing a value.

    Args:
        node: The node; products and linear layers are counted, the rest moves its result.
        layout: Its layout.
        inner: Length of the contraction of a product, 0 for other operators.
    """
    return value_bytes(node, layout) + CostEstimate(2 * TOKENS * width(layout) * inner, sympy.Integer(0))


def contraction_length(node: fx.Node) -> int:
    """Return the constant length of a node's contraction, or 0."""
    if node.target in (_aten.linear.default, _aten.matmul.default, _aten.mm.default, _aten.bmm.default):
        operand: fx.Node = node.args[0]  # type: ignore[assignment]
    elif node.target in (_aten.addmm.default, _aten.baddbmm.default):
        operand = node.args[1]  # type: ignore[assignment]
    else:
        return 0
    size = operand.meta["val"].shape[-1]
    return int(size) if not isinstance(size, torch.SymInt) else 0
