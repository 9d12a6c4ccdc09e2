"""The text of a rule's predicate or bias, as a function on tensors.

The text is what sympy prints, in Python's grammar. It is read with `ast` and evaluated node by node: nothing is
executed, so a text can only do what this file lists.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Symbols = Mapping[str, Tensor]
Compiled = Callable[[Symbols], Tensor]


def _divide(left: Tensor, right: Tensor) -> Tensor:
    # quotients of positions feed floor(): float64 keeps them exact.
    return left.double() / right.double()


def _floor(x: Tensor) -> Tensor:
    return x.floor().long() if x.is_floating_point() else x


def _ceiling(x: Tensor) -> Tensor:
    return x.ceil().long() if x.is_floating_point() else x


def _fold(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda *terms: functools.reduce(function, terms)


def _select(condition: Tensor, then: Tensor, otherwise: Tensor) -> Tensor:
    return torch.where(condition.bool(), then, otherwise)


def _real(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x if x.is_floating_point() else x.double())


_BINARY: dict[type[ast.operator], Callable[[Tensor, Tensor], Tensor]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: torch.remainder,
    ast.BitAnd: torch.logical_and,
    ast.BitOr: torch.logical_or,
    ast.BitXor: torch.logical_xor,
}

_UNARY: dict[type[ast.unaryop], Callable[[Tensor], Tensor]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: torch.logical_not,
    ast.Not: torch.logical_not,
}

_COMPARE: dict[type[ast.cmpop], Callable[[Tensor, Tensor], Tensor]] = {
    ast.Eq: torch.eq,
    ast.NotEq: torch.ne,
    ast.Lt: torch.lt,
    ast.LtE: torch.le,
    ast.Gt: torch.gt,
    ast.GtE: torch.ge,
}

_CALLS: dict[str, Callable[..., Tensor]] = {
    "And": _fold(torch.logical_and),
    "Or": _fold(torch.logical_or),
    "Xor": _fold(torch.logical_xor),
    "Not": torch.logical_not,
    "Eq": torch.eq,
    "Ne": torch.ne,
    "Lt": torch.lt,
    "Le": torch.le,
    "Gt": torch.gt,
    "Ge": torch.ge,
    "Max": _fold(torch.maximum),
    "Min": _fold(torch.minimum),
    "ITE": _select,
    "Mod": torch.remainder,
    "FloorDiv": operator.floordiv,
    "Abs": torch.abs,
    "sign": torch.sign,
    "floor": _floor,
    "ceiling": _ceiling,
    "exp": _real(torch.exp),
    "log": _real(torch.log),
    "sqrt": _real(torch.sqrt),
    "tanh": _real(torch.tanh),
}

_CONSTANTS: dict[str, bool | float] = {"true": True, "false": False, "pi": math.pi, "E": math.e, "oo": math.inf}


@functools.lru_cache(maxsize=256)
def compile_expression(text: str, symbols: frozenset[str]) -> Compiled:
    """Turn an expression into a function on tensors that broadcast against each other.

    Args:
        text: The expression, as sympy prints it.
        symbols: The names it may use.

    Returns:
        A function from the values of the symbols to the value of the expression.

    Raises:
        ValueError: The text is no expression, or uses a name, an operator or a function that is not allowed.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"not an expression: {text!r}") from error
    return _compile(tree.body, symbols)


def _compile(node: ast.expr, symbols: frozenset[str]) -> Compiled:
    match node:
        case ast.Name() | ast.Constant():
            return _compile_leaf(node, symbols)
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            return _power(base, exponent, symbols)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _apply(_BINARY[type(op)], [left, right], symbols)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _apply(_UNARY[type(sign)], [operand], symbols)
        case ast.BoolOp(op=op, values=terms):
            return _apply(_CALLS["And" if isinstance(op, ast.And) else "Or"], terms, symbols)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return _apply(_COMPARE[type(op)], [left, right], symbols)
        case ast.Call(func=ast.Name(id="Piecewise"), args=branches, keywords=[]):
            return _piecewise(branches, symbols)
        case ast.Call(func=ast.Name(id=name), args=terms, keywords=[]) if name in _CALLS:
            return _apply(_CALLS[name], terms, symbols)
    raise ValueError(f"not allowed in an attention rule: {ast.unparse(node)!r}")


def _compile_leaf(node: ast.Name | ast.Constant, symbols: frozenset[str]) -> Compiled:
    match node:
        case ast.Name(id=name) if name in symbols:
            return lambda values: values[name]
        case ast.Name(id=name) if name in _CONSTANTS:
            return _constant(_CONSTANTS[name])
        case ast.Constant(value=bool() | int() | float() as value):
            return _constant(value)
    raise ValueError(f"not allowed in an attention rule: {ast.unparse(node)!r}")


def _constant(value: bool | float) -> Compiled:
    # dimensionless and wide: it promotes integers to float64 and leaves the dtype of floats alone.
    tensor = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    return lambda values: tensor


def _power(base: ast.expr, exponent: ast.expr, symbols: frozenset[str]) -> Compiled:
    raised, power = _compile(base, symbols), _compile(exponent, symbols)
    # integers have no negative powers in torch.
    return lambda values: torch.pow(raised(values).double(), power(values).double())


def _apply(function: Callable[..., Tensor], terms: list[ast.expr], symbols: frozenset[str]) -> Compiled:
    compiled = [_compile(term, symbols) for term in terms]
    return lambda values: function(*(term(values) for term in compiled))


def _piecewise(branches: list[ast.expr], symbols: frozenset[str]) -> Compiled:
    pairs: list[tuple[Compiled, Compiled]] = []
    for branch in branches:
        match branch:
            case ast.Tuple(elts=[value, condition]):
                pairs.append((_compile(value, symbols), _compile(condition, symbols)))
            case _:
                raise ValueError(f"not a branch of Piecewise: {ast.unparse(branch)!r}")

    def evaluate(values: Symbols) -> Tensor:
        # where no branch holds: not a number, as in sympy.
        result = torch.tensor(math.nan, dtype=torch.float64) if otherwise is None else otherwise(values)
        for value, condition in reversed(pairs):
            result = _select(condition(values), value(values), result)
        return result

    # the branch that always holds keeps its dtype: an integer stays one.
    has_otherwise = ast.unparse(branches[-1]).endswith((", True)", ", true)")) if branches else False
    otherwise = pairs.pop()[0] if has_otherwise else None
    return evaluate
