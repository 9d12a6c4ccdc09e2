"""What a rule is, what it sees, and the table of all rules, keyed by operator overload.

A rule is one small pure function from the layouts of a node's arguments to the layout of its value. A node whose
operator has no rule is opaque: nothing is guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx

from branchfx.diagnostics import Code
from branchfx.passes.ir import BASE, Data, Dim, Factor, Layout, Position, Row, Size, Slots


class Refusal(Exception):
    """A rule cannot call its value a function of the token's own past.

    Attributes:
        code: A BFX code of `branchfx.diagnostics`.
        reason: One sentence for the user.
    """

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """What a rule may look at: the layouts of earlier nodes, symbolic shapes, and B and T.

    Attributes:
        rows: The symbol B.
        positions: The symbol T.
        layouts: Layout of every earlier node, by name.
        indices: `index_of(node)`: the axis that an index tensor enumerates from 0, or None.
    """

    rows: sympy.Symbol
    positions: sympy.Symbol
    layouts: Mapping[str, Layout | tuple[Layout, ...]]
    enumerates: Callable[[fx.Node], Factor | tuple[Factor, ...] | None]

    def layout(self, arg: Any) -> Layout:
        """Return the layout of an argument; a Python number is a replicated scalar."""
        if isinstance(arg, fx.Node):
            found = self.layouts.get(arg.name)
            if isinstance(found, Layout):
                return found
            if found is None:
                return Layout(())
            raise Refusal(Code.UNKNOWN_OPERATOR, f"{arg.name} has several values")
        return Layout(())

    def shape(self, node: fx.Node) -> tuple[sympy.Expr, ...]:
        """Return the symbolic shape of a node's value."""
        return shape_of(node.meta["val"])

    def size(self, factor: Factor) -> sympy.Expr:
        """Return the size of a factor in row space."""
        if isinstance(factor, Row):
            return self.rows
        if isinstance(factor, Position):
            start = sympy.Integer(0) if factor.window.start is None else factor.window.start
            stop = self.positions if factor.window.stop is None else factor.window.stop
            return sympy.expand(stop - start)
        if isinstance(factor, Slots):
            return sympy.prod([self.size(f) for f in factor.factors])
        return sympy.Integer(factor.value)

    def dim_size(self, dim: Dim) -> sympy.Expr:
        """Return the size of a dim in row space."""
        return sympy.expand(sympy.prod([self.size(f) for f in dim]))

    def dim_from_size(self, size: sympy.Expr) -> Dim:
        """Return the factors of a size that is a product of B, T and a constant.

        Raises:
            Refusal: The size is something else, such as T - 1.
        """
        size = sympy.sympify(size)
        out: list[Factor] = []
        for symbol, factor in ((self.rows, Row()), (self.positions, Position(BASE))):
            quotient = sympy.cancel(size / symbol)
            if symbol in size.free_symbols and symbol not in quotient.free_symbols and quotient.is_polynomial():
                out.append(factor)
                size = quotient
        if not size.is_Integer:
            raise Refusal(Code.RECURRENCE, f"a dim of size {size} is no product of rows, positions and a constant")
        return (*out, *((Size(int(size)),) if size != 1 else ()))


def shape_of(value: Any) -> tuple[sympy.Expr, ...]:
    """Return a tensor's shape as sympy expressions."""
    return tuple(s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s) for s in value.shape)


LayoutRule = Callable[[fx.Node, RuleContext], "Layout | tuple[Layout, ...]"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A small use of an operator with the layout that its rule must find; tests execute it.

    Attributes:
        run: Called with one tensor an entry of `inputs`.
        inputs: Layout texts such as `token[B, T, 8]`, `none[4, 8]`, `none[T]`; a suffix `:int` or `:bool` sets
            the dtype.
        expect: Layout text of the (first) result, or a BFX code when the rule must refuse.
    """

    run: Callable[..., Any]
    inputs: tuple[str, ...]
    expect: str


@dataclasses.dataclass(frozen=True, slots=True)
class OpRule:
    """One family's rule.

    Attributes:
        targets: The operator overloads it serves.
        layout: The transfer function.
        packable: Whether the same operator may run on packed arguments. False for ops that mix tokens in row
            space only, such as a cumulative sum over positions.
        sizes: Index of the positional argument that holds sizes; the rewrite recomputes it from the layout.
        samples: Executed by the tests.
    """

    targets: tuple[Any, ...]
    layout: LayoutRule
    packable: bool = True
    sizes: int | None = None
    samples: tuple[Sample, ...] = ()


RuleTable = Mapping[Any, OpRule]


def table_of(rules: Sequence[OpRule]) -> RuleTable:
    """Return the immutable table of `rules`.

    Raises:
        ValueError: Two rules name the same overload, or a rule names a packet instead of an overload.
    """
    table: dict[Any, OpRule] = {}
    for rule in rules:
        for target in rule.targets:
            if isinstance(target, torch._ops.OpOverloadPacket):
                raise ValueError(f"{target} is a packet; name an overload")
            if target in table:
                raise ValueError(f"{target} has two rules")
            table[target] = rule
    return MappingProxyType(table)


def join_data(layouts: Sequence[Layout]) -> Data:
    """Return what a value computed from these depends on."""
    return max((x.data for x in layouts), default=Data.NONE)


def broadcast_dims(layouts: Sequence[Layout]) -> tuple[Dim, ...]:
    """Return the dims of a broadcast of these values.

    Raises:
        Refusal: Two values hold different axes in one dim, such as columns t and t + 1.
    """
    rank = max((len(x.dims) for x in layouts), default=0)
    out: list[Dim] = []
    for i in range(rank):
        seen = {x.dims[i - rank + len(x.dims)] for x in layouts if i - rank + len(x.dims) >= 0} - {()}
        if len(seen) > 1:
            raise Refusal(Code.RECURRENCE, "an operation combines values of different positions")
        out.append(seen.pop() if seen else ())
    if sum(isinstance(f, Row) for dim in out for f in dim) > 1:
        raise Refusal(Code.ROW_REDUCTION, "an operation combines values of different rows")
    return tuple(out)


def require_constant(dim: Dim, what: str) -> None:
    """Refuse when `dim` holds rows or positions.

    Raises:
        Refusal: `what` runs over rows or positions.
    """
    if any(not isinstance(f, Size) for f in dim):
        axis = "rows" if any(isinstance(f, Row) for f in dim) else "positions"
        raise Refusal(Code.ROW_REDUCTION, f"{what} runs over {axis}")
