"""Pass 1: make a statically captured graph polymorphic in B and T by unifying its literals.

A plain `torch.compile` bakes B and T into `view`, `expand` and `arange`. First guess: the graph runs once on fake
tensors whose B and T are backed by primes that equal nothing else in the model, and every literal is read off
the symbolic shapes around it (a `view` keeps its factor sequence; an `arange` of the caller's length counts
positions). A run that succeeds is the proof: no shape in it fits by coincidence, and the guards that the ShapeEnv
collected must hold for the caller's real sizes too. If it fails, literal unification decides: every literal gets a
fresh symbol backed by its value, and the guards unify it with B, T, a product of them, or with nothing. That tells
T = 32 from head_dim = 32 without guessing, at many times the cost.

Before: `view(x, [4, 24, -1, 16])`           After: `view(x, [B, T, -1, 16])`

Legality: the graph after the pass computes the same as before for the captured sizes, since a literal is only
replaced by an expression of equal value.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import tracing
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from branchfx.passes.extremes import assumed_relations, settle_extremes
from branchfx.passes.fake_inputs import DimKey, FakeInputs, Placeholder
from branchfx.passes.ir import CapturedGraph, InputRole, InputSpec
from branchfx.passes.literals import READINGS, LiteralReader, Reading
from branchfx.passes.token_input import find_hidden_input, find_token_input

logger = logging.getLogger("branchfx.symbolize")

_aten = torch.ops.aten

SHAPE_TAKING: Mapping[Any, tuple[int, ...]] = {
    _aten.view.default: (1,),
    _aten.reshape.default: (1,),
    _aten._unsafe_view.default: (1,),
    _aten.expand.default: (1,),
    _aten.repeat.default: (1,),
    _aten.unflatten.int: (2,),
    _aten.arange.default: (0,),
    _aten.arange.start: (0, 1),
    _aten.arange.start_step: (0, 1),
    _aten.linspace.default: (2,),
    _aten.ones.default: (0,),
    _aten.zeros.default: (0,),
    _aten.full.default: (0,),
    _aten.empty.memory_format: (0,),
    _aten.new_ones.default: (1,),
    _aten.new_zeros.default: (1,),
    _aten.new_full.default: (1,),
    _aten.new_empty.default: (1,),
    _aten.slice.Tensor: (2, 3),
    _aten.narrow.default: (2, 3),
    _aten.split.Tensor: (1,),
    _aten.split_with_sizes.default: (1,),
}
"""Operators that take sizes, and which of their positional arguments do."""

_LARGEST_LITERAL = 2**40


Classes = dict[str, DimKey]
Literals = dict[tuple[str, int, int], sympy.Expr]


class NotSymbolicError(Exception):
    """The graph could not be made polymorphic; the argument says why."""


class OneRowError(NotSymbolicError):
    """The batch has one row or one column; the argument says which."""


class _Unify(fx.Interpreter):
    """Runs the graph with a fresh symbol for every literal of a shape-taking call."""

    def __init__(self, gm: fx.GraphModule, env: ShapeEnv, interesting: Callable[[int], bool]) -> None:
        super().__init__(gm)
        self.shape_env = env
        self.interesting = interesting
        self.literals: dict[tuple[str, int, int], sympy.Symbol] = {}

    def fresh(self, value: int, key: tuple[str, int, int]) -> Any:
        source = ConstantSource(f"literal_{len(self.literals)}")
        symbol = self.shape_env.create_unspecified_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
        self.literals[key] = symbol
        return self.shape_env.create_symintnode(symbol, hint=value, source=source)

    def run_node(self, n: fx.Node) -> Any:
        spots = SHAPE_TAKING.get(n.target) if n.op == "call_function" else None
        if spots is None:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        replaced = list(args)
        before = len(self.literals)
        for spot in spots:
            if spot >= len(args):
                continue
            if isinstance(args[spot], (list, tuple)):
                replaced[spot] = [
                    self.fresh(v, (n.name, spot, j)) if type(v) is int and self.interesting(v) else v
                    for j, v in enumerate(args[spot])
                ]
            elif type(args[spot]) is int and self.interesting(args[spot]):
                replaced[spot] = self.fresh(args[spot], (n.name, spot, -1))
        if len(self.literals) == before:
            return super().run_node(n)
        return n.target(*replaced, **kwargs)


def _interesting(sizes: set[int]) -> Callable[[int], bool]:
    """A literal can only be made of B or T if it is near or a multiple of one of the free sizes."""

    def test(value: int) -> bool:
        if not 1 < value < _LARGEST_LITERAL:
            return False
        return any(value % s == 0 or abs(value - s) <= 1 for s in sizes if s > 1)

    return test


def _emit_expr(graph: fx.Graph, expr: sympy.Expr, leaves: Mapping[sympy.Symbol, fx.Node]) -> Any:
    """Build the nodes of a size expression; raises KeyError for a form that is not +, *, //, or a leaf."""
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Symbol):
        return leaves[expr]
    functions = {sympy.Add: operator.add, sympy.Mul: operator.mul}
    parts = [_emit_expr(graph, a, leaves) for a in expr.args]
    if type(expr).__name__ == "FloorDiv":
        return graph.call_function(operator.floordiv, (parts[0], parts[1]))
    combine = functions[type(expr)]
    total = parts[0]
    for part in parts[1:]:
        total = graph.call_function(combine, (total, part))
    return total


class _Record(fx.Interpreter):
    """Runs the graph and keeps every value in `meta["val"]`."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            n.meta["val"] = value
        return value


def unify_literals(gm: fx.GraphModule, placeholders: Sequence[Placeholder]) -> tuple[Classes, Literals]:
    """Unify every literal by the guards that the graph's own shape arithmetic sets.

    Returns:
        The class of every dim key (its representative, or an int if it is static), and for each literal the
        expression in the representatives' keys that it equals.
    """
    inputs = FakeInputs(lambda _key, real: real)
    values = inputs.make(placeholders, lambda key: key)
    unify = _Unify(gm, inputs.env, _interesting(set(inputs.real.values())))
    with enable_python_dispatcher(), inputs.mode:
        unify.run(*values)
    env = inputs.env
    # a class may be represented by a literal's symbol: let its first input dim stand for it
    chosen: dict[sympy.Expr, str] = {}
    classes: Classes = {}
    for key, symbol in inputs.symbol.items():
        expr = env.replace(symbol)
        if expr.is_number:
            classes[key] = int(expr)
        else:
            classes[key] = chosen.setdefault(expr, key) if isinstance(expr, sympy.Symbol) else key
    names = {expr: sympy.Symbol(key) for expr, key in chosen.items()}
    literals: Literals = {}
    for place, literal in unify.literals.items():
        expr = env.replace(literal).xreplace(names)
        if not expr.is_number and expr.free_symbols <= set(names.values()):
            literals[place] = expr
    return classes, literals


def replace_literals(
    gm: fx.GraphModule, placeholders: Sequence[Placeholder], classes: Classes, literals: Literals
) -> None:
    """Replace literals in place by the size expressions that they equal."""
    nodes = {n.name: n for n in gm.graph.nodes}
    order = [n for n in gm.graph.nodes if n.op == "placeholder"]
    needed = {str(s) for expr in literals.values() for s in expr.free_symbols}
    leaves: dict[sympy.Symbol, fx.Node] = {}
    built: dict[sympy.Expr, Any] = {}
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op != "placeholder")):
        for node, p in zip(order, placeholders, strict=True):
            for d, own in enumerate(p.dims):
                key = classes.get(own, own) if isinstance(own, str) else own
                if key in needed and sympy.Symbol(str(key)) not in leaves:
                    leaves[sympy.Symbol(str(key))] = (
                        node if p.role is InputRole.SYMBOL else gm.graph.call_function(_aten.sym_size.int, (node, d))
                    )
        for (name, spot, item), expr in literals.items():
            if expr not in built:
                try:
                    built[expr] = _emit_expr(gm.graph, expr, leaves)
                except KeyError:
                    continue
            node = nodes[name]
            args = list(node.args)
            if item < 0:
                args[spot] = built[expr]
            else:
                sizes = list(args[spot])  # type: ignore[arg-type]
                sizes[item] = built[expr]
                args[spot] = sizes
            node.args = tuple(args)
    gm.graph.lint()
    gm.recompile()


_RUN_ERRORS = (RuntimeError, ValueError, IndexError, AssertionError, TypeError, NotSymbolicError)


def taken_sizes(placeholders: Sequence[Placeholder]) -> frozenset[int]:
    """Return every size that the model or the batch already has."""
    return frozenset(size for p in placeholders for size in p.sizes)


def _prime(real: int, taken: set[int]) -> int:
    """Return a prime above twice the real size that divides no size in use; small, so that tables still cover it."""
    found = int(sympy.nextprime(2 * real + 2))
    while any(size % found == 0 for size in taken if size):
        found = int(sympy.nextprime(found))
    taken.add(found)
    return found


def guess_literals(
    gm: fx.GraphModule,
    placeholders: Sequence[Placeholder],
    classes: Classes,
    token_input: Placeholder,
    reading: Reading = READINGS[0],
) -> Literals:
    """Read each literal off the symbolic shapes around it, in a run with sizes that equal nothing else.

    Raises:
        NotSymbolicError: The graph does not run with the literals so read.
    """
    inputs = prime_inputs(placeholders)
    values = inputs.make(placeholders, lambda key: classes.get(key, key) if isinstance(key, str) else key)
    keys = [classes.get(str(d), d) for d in token_input.dims[:2]]
    if not all(isinstance(k, str) and k in inputs.symbol for k in keys):
        raise NotSymbolicError(f"the batch size or length of {token_input.name} is fixed")
    reader = LiteralReader(gm, inputs.real, [inputs.symint[str(k)] for k in keys], SHAPE_TAKING, reading)
    try:
        with enable_python_dispatcher(), inputs.mode:
            reader.run(*values)
    except _RUN_ERRORS as error:
        raise NotSymbolicError(_first_line(error)) from error
    names = {symbol: sympy.Symbol(key) for key, symbol in inputs.symbol.items()}
    return {place: expr.xreplace(names) for place, expr in reader.literals.items()}


def prime_inputs(placeholders: Sequence[Placeholder]) -> FakeInputs:
    """Return a maker of inputs whose free sizes are backed by distinct primes that equal nothing else."""
    taken = set(taken_sizes(placeholders))
    return FakeInputs(lambda _key, real: _prime(real, taken))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def prove_polymorphic(gm: fx.GraphModule, placeholders: Sequence[Placeholder], classes: Classes) -> FakeInputs:
    """Run the graph with sizes that equal nothing else and keep its symbolic values in `meta["val"]`.

    Raises:
        NotSymbolicError: No choice of sizes runs, or a guard found there does not hold for the real sizes.
    """
    failure = ""
    for inputs in (prime_inputs(placeholders), FakeInputs(lambda _key, real: real)):
        try:
            values = inputs.make(placeholders, lambda key: classes.get(key, key) if isinstance(key, str) else key)
            with enable_python_dispatcher(), inputs.mode:
                _Record(gm).run(*values)
        except _RUN_ERRORS as error:
            failure = failure or _first_line(error)
            continue
        fixed = [s for s in inputs.real if inputs.env.replace(s) != s]
        broken = [str(g.expr) for g in inputs.env.guards if g.expr.subs(inputs.real) == sympy.false]
        if not fixed and not broken:
            return inputs
        failure = (
            failure or f"sizes {fixed} are not free" if fixed else f"guard {broken[0]} does not hold for these sizes"
        )
    raise NotSymbolicError(failure)


def join_batch_dims(
    classes: Classes, placeholders: Sequence[Placeholder], token_input: Placeholder, any_distance: bool = False
) -> None:
    """Give inputs of the token input's static sizes its dims: this capture is only called with equal sizes.

    Args:
        classes: Edited in place.
        placeholders: Of the graph.
        token_input: The ids.
        any_distance: Whether a second dim of any size is taken for T less a constant, such as the columns of the
            response; else only T and T - 1 are.
    """
    rows, positions = (classes.get(str(d), d) for d in token_input.dims[:2])
    for p in placeholders:
        if p.role is not InputRole.OTHER or p is token_input or not p.sizes or p.sizes[0] != token_input.sizes[0]:
            continue
        # a static dim holds for every call of this capture; of a dynamic one, each call is checked
        free = [isinstance(d, str) and classes.get(d) == d and d not in token_input.dims for d in p.dims]
        if free[0]:
            classes[str(p.dims[0])] = rows
        if len(p.sizes) > 1 and free[1] and isinstance(positions, str):
            distance = p.sizes[1] - token_input.sizes[1]
            # labels and old log-probabilities often start one token later
            if distance in (-1, 0) or any_distance:
                classes[str(p.dims[1])] = (positions, distance) if distance else positions


def _symbol(size: Any) -> sympy.Symbol | None:
    if not isinstance(size, torch.SymInt):
        return None
    expr = size.node.expr
    return expr if isinstance(expr, sympy.Symbol) else None


def _guess(
    gm: fx.GraphModule, placeholders: Sequence[Placeholder], token_input: Placeholder, reading: Reading
) -> FakeInputs:
    """Read the literals off the shapes around them, and prove it."""
    classes = _own_classes(placeholders)
    join_batch_dims(classes, placeholders, token_input, reading.any_distance)
    replace_literals(gm, placeholders, classes, guess_literals(gm, placeholders, classes, token_input, reading))
    return prove_polymorphic(gm, placeholders, classes)


def _unified(gm: fx.GraphModule, placeholders: Sequence[Placeholder], token_input: Placeholder) -> FakeInputs:
    """Unify the literals by the guards of the graph, and prove it."""
    try:
        classes, literals = unify_literals(gm, placeholders)
    except _RUN_ERRORS as error:
        raise NotSymbolicError(_first_line(error)) from error
    join_batch_dims(classes, placeholders, token_input)
    replace_literals(gm, placeholders, classes, literals)
    return prove_polymorphic(gm, placeholders, classes)


def _own_classes(placeholders: Sequence[Placeholder]) -> Classes:
    return {d: d for p in placeholders for d in p.dims if isinstance(d, str)}


def symbolize(
    gm: fx.GraphModule, placeholders: Sequence[Placeholder], named: tuple[int, int] | None = None
) -> CapturedGraph | None:
    """Make a lowered graph polymorphic.

    Args:
        gm: Functional ATen graph; it is edited in place.
        placeholders: What the capture says of its placeholders, in order.
        named: Shape [B, T] of the rollouts that the caller names.

    Returns:
        The captured graph, or None when no input looks like token ids, or like their hidden states.

    Raises:
        NotSymbolicError: The graph does not run for other sizes.
    """
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    placeholders = [dataclasses.replace(p, name=name) for p, name in zip(placeholders, names, strict=True)]
    token_input = find_token_input(gm, placeholders)
    hidden = None if token_input is not None or named is None else find_hidden_input(placeholders, named)
    token_input = token_input or hidden
    if token_input is None:
        return None
    for size, what in zip(token_input.sizes, ("row", "column"), strict=False):
        if size == 1:
            raise OneRowError(f"the batch has one {what}")
    with tracing(None), _disable_current_modes():
        extremes = settle_extremes(gm)
        captured, failures = copy.deepcopy(gm.graph), []
        for attempt in (*(functools.partial(_guess, reading=r) for r in READINGS), _unified):
            try:
                inputs = attempt(gm, placeholders, token_input)
                break
            except NotSymbolicError as error:
                logger.debug("an attempt failed: %s", error)
                failures.append(str(error))
                gm.graph = copy.deepcopy(captured)
        else:
            raise NotSymbolicError("; then ".join(dict.fromkeys(failures)))
    value = next(n for n in gm.graph.nodes if n.name == token_input.name).meta["val"]
    rows, positions = axes = tuple(_symbol(s) for s in value.shape[:2])
    if rows is None or positions is None:
        raise NotSymbolicError(f"the batch size or length of {token_input.name} is fixed to {list(value.shape)}")
    specs = []
    for p, node in zip(placeholders, (n for n in gm.graph.nodes if n.op == "placeholder"), strict=True):
        role = p.role
        value = node.meta["val"]
        if role is InputRole.OTHER and isinstance(value, torch.Tensor) and value.dim() >= 2:
            token = _symbol(value.shape[0]) == rows and _symbol(value.shape[1]) == positions
            rest_fixed = all(not isinstance(s, torch.SymInt) or _symbol(s) not in axes for s in value.shape[2:])
            if token and rest_fixed:
                role = InputRole.TOKEN
        specs.append(InputSpec(node.name, role, p.requires_grad))
    assumed = assumed_relations(gm, extremes)
    return CapturedGraph(
        gm,
        tuple(specs),
        rows,
        positions,
        dict(inputs.binding),
        assumed,
        named=hidden.name if hidden else "",
        tokens="" if hidden else token_input.name,
    )
