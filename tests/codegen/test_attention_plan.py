"""Which calls a token tree becomes, and which trees are refused."""

from __future__ import annotations

import pytest
import torch

from branchfx.codegen.cpu import plan


def test_equal_leaves_are_one_call() -> None:
    segments = torch.tensor([[0, 40, 112], *([s, s + 9, s + 9] for s in range(40, 112, 9))])
    assert len(plan.plan_calls(segments, None, 112).calls) == 2
    heads = torch.tensor([i for i in range(40, 112) if (i - 40) % 9 < 8])
    made = plan.plan_calls(segments, heads, 112)
    assert [(c.parts, c.queries, c.keys) for c in made.calls] == [(1, 64, 40), (8, 8, 8)]


@pytest.mark.parametrize(
    "segments", [[[0, 4, 9], [5, 9, 9]], [[0, 4, 4]], [[0, 9, 8]], [[0, 4, 6], [4, 9, 9]]], ids=str
)
def test_segments_must_partition(segments: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="segment"):
        plan.read_tree(torch.tensor(segments), None, 9)


@pytest.mark.parametrize("index", [[3, 3], [2, 1], [-1, 2], [9]], ids=str)
def test_queries_must_increase(index: list[int]) -> None:
    with pytest.raises(ValueError, match="increase"):
        plan.read_tree(torch.tensor([[0, 9, 9]]), torch.tensor(index), 9)
