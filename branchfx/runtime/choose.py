"""Whether sharing pays for a batch."""

from __future__ import annotations

from branchfx.passes.pipeline import SharingPlan
from branchfx.token_tree import TokenTree

_BREAK_EVEN = 1.1
"""Token ratio below which the caller's graph runs: the tree and its gathers cost a few percent."""


def worth_sharing(plan: SharingPlan, tree: TokenTree) -> bool:
    """Whether the packed schedule is expected to be faster than the caller's graph."""
    return tree.rows * tree.columns >= _BREAK_EVEN * tree.tokens
