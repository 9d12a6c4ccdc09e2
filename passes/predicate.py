"""Sort a lifted predicate and score into the parts that an attention kernel takes.

`(k <= q) & (q - k < W) & pad(k)` becomes: causal, a window of W, and a validity at the key. What fits no part is
kept as a general predicate. Legality: a site is causal only if `k <= q` is one of the conjuncts, or follows from
one; otherwise the caller declines and shows the predicate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import sympy
from sympy.logic.boolalg import to_nnf

from branchfx.passes.lifted import KEY, QUERY, Unliftable

DISTANCE = sympy.Symbol("distance", integer=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Visibility:
    """A predicate, sorted.

    Attributes:
        causal: Whether it implies `k <= q`.
        window: Upper bound W of `q - k < W`, or None.
        chunk: C of `q // C == k // C`, or None.
        key_valid: Conjuncts in atoms at the key alone.
        rest: The conjunction of everything else.
    """

    causal: bool
    window: int | None
    chunk: int | None
    key_valid: tuple[Any, ...]
    rest: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """A score in the dot product, sorted: `softcap(scale * dot) + bias`."""

    scale: float
    softcap: float | None
    bias: Any


def sort_predicate(predicate: Any, sides: Mapping[sympy.Symbol, str], causal: bool = False) -> Visibility:
    """Sort the conjuncts of a predicate.

    Args:
        predicate: A sympy truth value in q, k and atoms.
        sides: For each atom: "q", "k", or "c" for a value without position.
        causal: Whether `k <= q` holds anyway.
    """
    window: int | None = None
    chunk: int | None = None
    key_valid: list[Any] = []
    rest: list[Any] = []
    for part in sympy.And.make_args(to_nnf(sympy.sympify(predicate), simplify=False)):
        if part == sympy.true:
            continue
        bounds = _distance_bounds(part)
        if bounds is not None:
            low, high = bounds
            causal = causal or (low is not None and low >= 0)
            if low is not None and low > 0:
                rest.append(part)
            if high is not None:
                window = high + 1 if window is None else min(window, high + 1)
            continue
        size = _chunk_size(part)
        if size is not None and chunk in (None, size):
            chunk = size
        elif {sides.get(s, "") for s in part.free_symbols} == {"k"}:
            key_valid.append(part)
        else:
            rest.append(part)
    causal = causal or any(_implies_causal(part) for part in rest)
    return Visibility(causal, window, chunk, tuple(key_valid), sympy.And(*rest))


def _distance_bounds(part: Any) -> tuple[int | None, int | None] | None:
    """Return the bounds that a relation sets on q - k: (at least, at most)."""
    if not isinstance(part, (sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)):
        return None
    difference = sympy.expand((part.gts - part.lts).subs(QUERY, KEY + DISTANCE))
    if difference.free_symbols != {DISTANCE} or not difference.is_polynomial(DISTANCE):
        return None
    slope = difference.coeff(DISTANCE, 1)
    offset = difference.coeff(DISTANCE, 0)
    if sympy.expand(difference - slope * DISTANCE - offset) != 0 or slope not in (1, -1) or not offset.is_integer:
        return None
    strict = 1 if isinstance(part, (sympy.Lt, sympy.Gt)) else 0
    # slope * distance + offset >= strict
    return (int(strict - offset), None) if slope == 1 else (None, int(offset - strict))


def _chunk_size(part: Any) -> int | None:
    if not isinstance(part, sympy.Eq) or part.free_symbols != {QUERY, KEY}:
        return None
    size = sympy.Wild("size", properties=[lambda x: x.is_Integer and x > 0])
    for a, b in ((part.lhs, part.rhs), (part.rhs, part.lhs)):
        found = a.match(sympy.floor(QUERY / size))
        if found and sympy.floor(KEY / found[size]) == b:
            return int(found[size])
    return None


def _implies_causal(part: Any) -> bool:
    """Whether every disjunct implies `k <= q`."""
    if isinstance(part, sympy.Or):
        return all(_implies_causal(p) for p in part.args)
    if isinstance(part, sympy.And):
        return any(_implies_causal(p) for p in part.args)
    if isinstance(part, sympy.Eq):
        return sympy.expand(part.lhs - part.rhs) in (QUERY - KEY, KEY - QUERY)
    bounds = _distance_bounds(part)
    return bounds is not None and bounds[0] is not None and bounds[0] >= 0


def sort_score(expr: Any, dot: sympy.Symbol) -> Score:
    """Take a score apart.

    Raises:
        Unliftable: It is neither linear in the dot product nor a softcap of it.
    """
    bias = expr.subs(dot, 0)
    core = sympy.expand(expr - bias) if not expr.has(sympy.tanh) else expr - bias
    slope = sympy.diff(core, dot)
    if slope.is_number and slope > 0:
        return Score(float(slope), None, bias)
    capped = [t for t in core.atoms(sympy.tanh) if t.has(dot)]
    if len(capped) == 1:
        cap = sympy.cancel(core / capped[0])
        inner = sympy.diff(capped[0].args[0], dot)
        if cap.is_number and inner.is_number and sympy.expand(capped[0].args[0] - inner * dot) == 0:
            return Score(float(cap * inner), float(cap), bias)
    raise Unliftable(f"the score {expr}")
