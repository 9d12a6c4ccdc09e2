"""What a benchmark runs: a padded batch of token ids and where its loss is."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A batch of rollouts, right padded.

    Attributes:
        name: How it is asked for and reported.
        ids: Token ids `[B, T]`.
        mask: Ones at tokens `[B, T]`.
        in_loss: Whether the log-probability of the token counts `[B, T]` bool.
        prefix: The length of one prompt that all rows have in common where all rows are of one length, else None:
            what PrefixGrouper is given.
        branches_are_leaves: Whether nothing but the prompt is shared: what the step by hand is written for.
    """

    name: str
    ids: Tensor
    mask: Tensor
    in_loss: Tensor
    prefix: int | None = None
    branches_are_leaves: bool = False

    @property
    def keep(self) -> int:
        """How many logits at the end of each row the loss needs: those before the first token in the loss, on."""
        first = int(self.in_loss.any(0).nonzero()[0])
        return int(self.ids.shape[1]) - first + 1

    @property
    def tokens(self) -> int:
        """Tokens that are no padding."""
        return int(self.mask.sum())

    @functools.cached_property
    def first_of_its_kind(self) -> Tensor:
        """Whether no row above agrees with this one up to the column `[B, T]` bool: the unique tokens."""
        unique = self.mask.bool().clone()
        for b in range(1, len(self.ids)):
            agrees = (self.ids[:b] == self.ids[b]) & (self.mask[:b] == self.mask[b])
            unique[b] &= ~agrees.long().cumprod(1).bool().any(0)
        return unique


def from_rows(name: str, rows: list[list[int]], in_loss: list[list[bool]]) -> Case:
    """Pad rows on the right."""
    length = max(map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask, loss = torch.zeros_like(ids), torch.zeros(len(rows), length, dtype=torch.bool)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = torch.tensor(row)
        mask[b, : len(row)] = 1
        loss[b, : len(row)] = torch.tensor(in_loss[b])
    return Case(name, ids, mask, loss)
