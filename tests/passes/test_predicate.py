"""Predicates and scores are sorted into what an attention kernel takes, and only causal ones are called causal."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sympy

from branchfx.passes.lifted import KEY as K
from branchfx.passes.lifted import QUERY as Q
from branchfx.passes.lifted import Unliftable
from branchfx.passes.predicate import Score, Visibility, sort_predicate, sort_score

PAD = sympy.Symbol("a0_k", integer=True)
SEGMENT_Q, SEGMENT_K = sympy.Symbol("a1_q", integer=True), sympy.Symbol("a1_k", integer=True)
SIDES = {PAD: "k", SEGMENT_Q: "q", SEGMENT_K: "k"}
DOT = sympy.Symbol("dot", real=True)
CAUSAL = sympy.Le(K, Q)


def sort(predicate: Any, causal: bool = False) -> Visibility:
    return sort_predicate(predicate, SIDES, causal)


@pytest.mark.parametrize(
    "predicate",
    [
        CAUSAL,
        sympy.Ge(Q, K),
        sympy.Ge(Q - K, 0),
        sympy.Le(K - Q, 0),
        sympy.Lt(K, Q + 1),
        sympy.Gt(Q + 1, K),
        sympy.Not(sympy.Gt(K, Q)),
        sympy.Not(sympy.Lt(Q, K)),
        sympy.Le(K + 5, Q + 5),
    ],
    ids=str,
)
def test_spellings_of_causal(predicate: Any) -> None:
    assert sort(predicate) == Visibility(True, None, None, (), sympy.true)


@pytest.mark.parametrize(
    "predicate",
    [
        sympy.true,
        sympy.Ge(K, Q),
        sympy.Le(K, Q + 1),
        sympy.Le(K, 2 * Q),
        sympy.Lt(K, 5),
        sympy.Or(CAUSAL, sympy.Lt(K, 5)),
        sympy.Or(CAUSAL, sympy.Eq(SEGMENT_Q, SEGMENT_K)),
        sympy.Eq(sympy.floor(Q / 4), sympy.floor(K / 4)),
        sympy.And(sympy.Lt(Q - K, 4), sympy.Lt(K - Q, 4)),
        sympy.Ne(PAD, 0),
    ],
    ids=str,
)
def test_not_causal(predicate: Any) -> None:
    assert not sort(predicate).causal


def test_causal_may_be_known_before() -> None:
    assert sort(sympy.true, causal=True) == Visibility(True, None, None, (), sympy.true)


def test_window() -> None:
    assert sort(CAUSAL & sympy.Lt(Q - K, 4)) == Visibility(True, 4, None, (), sympy.true)
    assert sort(CAUSAL & sympy.Le(Q - K, 4)).window == 5
    assert sort(CAUSAL & sympy.Gt(K, Q - 4)).window == 4
    assert sort(CAUSAL & sympy.Lt(Q - K, 4) & sympy.Lt(Q, K + 3)).window == 3


def test_chunk() -> None:
    chunk = sympy.Eq(sympy.floor(Q / 8), sympy.floor(K / 8))
    assert sort(CAUSAL & chunk) == Visibility(True, None, 8, (), sympy.true)
    other = sympy.Eq(sympy.floor(Q / 6), sympy.floor(K / 6))
    found = sort(CAUSAL & chunk & other)
    assert (found.chunk, found.rest) in ((8, other), (6, chunk))
    assert sort(CAUSAL & sympy.Eq(sympy.floor(Q / 8), sympy.floor(K / 4))).chunk is None


def test_key_validity() -> None:
    valid = sympy.Ne(PAD, 0)
    assert sort(CAUSAL & valid) == Visibility(True, None, None, (valid,), sympy.true)


def test_rest_keeps_what_fits_nothing() -> None:
    same = sympy.Eq(SEGMENT_Q, SEGMENT_K)
    assert sort(CAUSAL & same) == Visibility(True, None, None, (), same)
    # a validity that also reads the column is none of the key alone
    mixed = sympy.Or(sympy.Ne(PAD, 0), sympy.Lt(K, 3))
    assert sort(CAUSAL & mixed) == Visibility(True, None, None, (), mixed)
    # a key at least two columns back is causal and more
    assert sort(sympy.Ge(Q - K, 2)) == Visibility(True, None, None, (), sympy.Ge(Q - K, 2))


def test_disjunction_of_causal_parts_is_causal() -> None:
    found = sort(sympy.Or(CAUSAL & sympy.Lt(K, 5), CAUSAL & sympy.Eq(SEGMENT_Q, SEGMENT_K)))
    assert found.causal
    assert sort(sympy.Or(sympy.Eq(Q, K), CAUSAL & sympy.Ne(PAD, 0))).causal


def _rebuilt(found: Visibility, q: int, k: int, values: dict[Any, int]) -> bool:
    parts = [*found.key_valid, found.rest]
    return (
        (not found.causal or k <= q)
        and (found.window is None or q - k < found.window)
        and (found.chunk is None or q // found.chunk == k // found.chunk)
        and all(bool(sympy.sympify(p).subs({Q: q, K: k, **values})) for p in parts)
    )


@pytest.mark.parametrize(
    "predicate",
    [
        CAUSAL & sympy.Lt(Q - K, 3) & sympy.Ne(PAD, 0),
        CAUSAL & sympy.Eq(sympy.floor(Q / 3), sympy.floor(K / 3)),
        sympy.Ge(Q - K, 2) & sympy.Lt(Q - K, 5),
        sympy.Or(sympy.Eq(Q, K), CAUSAL & sympy.Lt(K, 2)),
        CAUSAL & sympy.Eq(sympy.floor(Q / 2), sympy.floor(K / 2)) & sympy.Eq(sympy.floor(Q / 3), sympy.floor(K / 3)),
        sympy.Not(sympy.Or(sympy.Gt(K, Q), sympy.Eq(PAD, 0))),
        CAUSAL & sympy.Not(sympy.Ge(Q - K, 3) & sympy.Ge(K, 2)),
        CAUSAL & sympy.Lt(Q - K, 0),
    ],
    ids=str,
)
def test_parts_mean_the_predicate(predicate: Any) -> None:
    found = sort(predicate)
    assert found.causal
    for q, k, pad in itertools.product(range(8), range(8), (0, 1)):
        values = {PAD: pad, SEGMENT_Q: 0, SEGMENT_K: 0}
        assert _rebuilt(found, q, k, values) == bool(predicate.subs({Q: q, K: k, **values})), (q, k, pad)


def test_scores() -> None:
    assert sort_score(DOT * 0.125, DOT) == Score(0.125, None, 0)
    assert sort_score(DOT * 0.5 - 0.25 * (Q - K), DOT) == Score(0.5, None, -0.25 * (Q - K))
    capped = sort_score(30.0 * sympy.tanh(DOT * 0.5 / 30.0), DOT)
    assert capped.softcap == pytest.approx(30.0)
    assert capped.scale == pytest.approx(0.5)


@pytest.mark.parametrize("score", [DOT**2, -DOT, sympy.exp(DOT), DOT * Q, sympy.Integer(3)], ids=str)
def test_other_scores_are_refused(score: Any) -> None:
    with pytest.raises(Unliftable):
        sort_score(score, DOT)
