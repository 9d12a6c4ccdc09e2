"""The language of a rule's predicate and bias: what it refuses, and where it must be exact."""

from __future__ import annotations

import pytest
import torch

from branchfx.codegen.cpu import expression


@pytest.mark.parametrize(
    "text", ["q.__class__", "__import__('os')", "z > k", "(lambda: q)()", "q if k else q", "[q]", "q >", "exp(q, x=1)"]
)
def test_expressions_are_a_closed_language(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        expression.compile_expression(text, frozenset({"q", "k"}))


def test_floors_are_exact_far_out() -> None:
    q = torch.tensor([3 * 2**40 - 1, 3 * 2**40])
    value = expression.compile_expression("floor(q/3)", frozenset({"q"}))({"q": q})
    assert value.tolist() == [2**40 - 1, 2**40]
