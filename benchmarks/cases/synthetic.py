"""Cases of random tokens: prompt groups, a deeper tree, and nothing to share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from benchmarks.cases.case import Case


def group(g: int, p: int, r: int, vocabulary: int = 4096) -> Case:
    """Return `g` rollouts of `r` tokens after one prompt of `p` tokens."""
    case = tree(f"group-{g}x{p}+{r}", [(p, 1), (r, g)], vocabulary)
    return dataclasses.replace(case, branches_are_leaves=True)


def tree(name: str, levels: list[tuple[int, int]], vocabulary: int = 4096) -> Case:
    """Return the rows of a tree; each level is the length of its segments and the number of children of a node."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(1, 0, dtype=torch.long)
    for length, children in levels:
        own = torch.randint(3, vocabulary, (len(ids) * children, length), generator=generator)
        ids = torch.cat([ids.repeat_interleave(children, 0), own], 1)
    in_loss = torch.ones_like(ids, dtype=torch.bool)
    in_loss[:, : levels[0][0]] = False
    return Case(name, ids, torch.ones_like(ids), in_loss, prefix=levels[0][0])


def no_sharing(rows: int = 4, length: int = 256, vocabulary: int = 4096) -> Case:
    """Return rows that have not one token in common; the loss is on their second half."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
    ids[:, 0] = torch.arange(3, 3 + rows)
    in_loss = torch.zeros_like(ids, dtype=torch.bool)
    in_loss[:, length // 2 :] = True
    return Case("no-sharing", ids, torch.ones_like(ids), in_loss)


CASES: dict[str, Callable[[], Case]] = {
    "group-8x512+64": lambda: group(8, 512, 64),
    "group-16x1024+64": lambda: group(16, 1024, 64),
    "group-8x2048+128": lambda: group(8, 2048, 128),
    "tree-depth-3": lambda: tree("tree-depth-3", [(512, 1), (128, 4), (64, 4)]),
    "no-sharing": no_sharing,
    "tiny": lambda: tree("tiny", [(48, 1), (8, 4)]),
}
