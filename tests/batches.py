"""Padded batches of rows that share prefixes: by hand, from a specification of a tree, or at random."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, Literal

import torch
from hypothesis import strategies as st

Spec = int | tuple[int, Sequence["Spec"]]
"""A leaf is the length of its own tokens; a node is a length and its children. A leaf of 0 ends at its parent."""

Padding = Literal["right", "left", "mixed", "none"]
Positions = Literal["absent", "columns", "tokens"]
PAD = 0


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a caller passes to a causal language model.

    Attributes:
        ids: Token ids `[B, T]`.
        attention_mask: Ones at real tokens `[B, T]`, or None: then every position counts as a token.
        position_ids: `[B, T]`, or None: then the model makes its own.
    """

    ids: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments of a call to a transformers model, without a cache."""
        named = {"input_ids": self.ids, "attention_mask": self.attention_mask, "position_ids": self.position_ids}
        return {name: value for name, value in named.items() if value is not None} | {"use_cache": False}

    @property
    def valid(self) -> torch.Tensor:
        """Whether a position holds a token whose output counts, `[B, T]` bool."""
        return torch.ones_like(self.ids, dtype=torch.bool) if self.attention_mask is None else self.attention_mask == 1

    @property
    def unique_tokens(self) -> int:
        """How many tokens are left when rows that agree up to a column share it, counted the slow way."""
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for key, valid in zip(self._keys(), self.valid.tolist(), strict=True):
            seen.update(tuple(key[: t + 1]) for t, counts in enumerate(valid) if counts)
        return len(seen)

    @property
    def shares(self) -> bool:
        """Whether two rows have a token in common."""
        return self.unique_tokens < int(self.valid.sum())

    def __repr__(self) -> str:
        """Show what is needed to build the batch again."""
        fields = {name: value.tolist() for name, value in vars(self).items() if value is not None}
        return f"Batch({', '.join(f'{name}=torch.tensor({value})' for name, value in fields.items())})"

    def _keys(self) -> list[list[tuple[int, ...]]]:
        """Return what tells tokens apart in each column of each row."""
        inputs = [x for x in (self.ids, self.attention_mask, self.position_ids) if x is not None]
        stacked = torch.stack(inputs, dim=-1).tolist()  # [B, T, inputs]
        return [[tuple(token) for token in row] for row in stacked]


def group(g: int, p: int, r: int, vocab: int = 97, seed: int = 0) -> Batch:
    """Return `g` rows with `p` tokens in common and `r` tokens of their own, all of one length."""
    return tree((p, [r] * g), vocab=vocab, seed=seed)


def tree(
    spec: Spec | Sequence[Spec],
    *,
    vocab: int = 97,
    seed: int = 0,
    padding: Padding = "right",
    positions: Positions = "absent",
    shuffle: bool = False,
) -> Batch:
    """Return the batch whose rows are the root-to-leaf paths of a tree, or of several (a list).

    Children of a node start with tokens that differ, as long as the vocabulary has enough of them.

    Args:
        spec: The tree; `(5, [2, (1, [3, 0])])` has rows of 7, 9 and 6 tokens.
        vocab: Ids are in `[1, vocab)`.
        seed: Of the ids, of the order of rows and of mixed padding.
        padding: Where short rows are filled. "none" passes no mask, so that the filling is read as tokens.
        positions: "columns" counts columns, "tokens" counts real tokens, "absent" passes none.
        shuffle: Whether rows are in random order, so that rows of a prompt are not neighbours.
    """
    rng = random.Random(seed)
    roots = [spec] if isinstance(spec, int | tuple) else list(spec)
    rows = _grow(roots, [], vocab, rng)
    if shuffle:
        rng.shuffle(rows)
    return pad(rows, padding=padding, positions=positions, rng=rng)


def pad(
    rows: Sequence[Sequence[int]],
    *,
    padding: Padding = "right",
    positions: Positions = "absent",
    rng: random.Random | None = None,
) -> Batch:
    """Fill rows of token ids up to one length; the arguments are those of `tree`."""
    rng = rng or random.Random(0)
    length = max(1, *(len(row) for row in rows)) + (2 if padding == "mixed" else 0)
    ids = torch.full((len(rows), length), PAD)
    mask = torch.zeros_like(ids)
    offsets: dict[tuple[int, ...], int] = {}
    for b, row in enumerate(rows):
        # rows that start alike are shifted alike, or nothing would be left to share
        shift = offsets.setdefault(tuple(row[:1]), rng.randint(0, 2)) if padding == "mixed" else 0
        start = length - len(row) if padding == "left" else shift
        ids[b, start : start + len(row)] = torch.tensor(list(row), dtype=torch.long)
        mask[b, start : start + len(row)] = 1
    position_ids = {
        "absent": None,
        "columns": torch.arange(length).expand_as(ids).contiguous(),
        "tokens": (mask.cumsum(1) - 1).clamp(min=0),
    }[positions]
    return Batch(ids, None if padding == "none" else mask, None if padding == "none" else position_ids)


def _grow(siblings: Sequence[Spec], path: list[int], vocab: int, rng: random.Random) -> list[list[int]]:
    """Return the rows below a node, in order."""
    firsts = rng.sample(range(1, vocab), min(len(siblings), vocab - 1))
    rows = []
    for i, node in enumerate(siblings):
        length, children = (node, []) if isinstance(node, int) else node
        own = [rng.randrange(1, vocab) for _ in range(length)]
        own[:1] = [firsts[i % len(firsts)]] if own else []
        rows += _grow(children, path + own, vocab, rng) if children else [path + own]
    return rows


def specs(max_rows: int = 9, max_run: int = 6, max_depth: int = 6) -> st.SearchStrategy[list[Spec]]:
    """Draw forests of at most `max_rows` leaves, with runs of 0 (forks again, or ends) to `max_run` tokens."""
    run = st.integers(0, max_run)
    node: st.SearchStrategy[Spec] = run
    for _ in range(max_depth - 1):
        node = st.one_of(run, st.tuples(run, st.lists(node, min_size=1, max_size=3)))
    return st.lists(node, min_size=1, max_size=3).map(lambda forest: _trim(forest, max_rows))


def batches(
    max_rows: int = 9,
    max_run: int = 6,
    vocab: int = 97,
    paddings: Sequence[Padding] = ("right", "right", "left", "mixed", "none"),
    positions: Sequence[Positions] = ("absent", "absent", "columns", "tokens"),
) -> st.SearchStrategy[Batch]:
    """Draw batches: trees of `specs`, sometimes over three ids only, so that rows also agree by accident."""
    return st.builds(
        tree,
        specs(max_rows, max_run),
        vocab=st.sampled_from([vocab, vocab, 4]),
        seed=st.integers(0, 2**16),
        padding=st.sampled_from(paddings),
        positions=st.sampled_from(positions),
        shuffle=st.booleans(),
    ).filter(lambda batch: bool(batch.valid.any()))


def _trim(forest: Sequence[Spec], max_rows: int) -> list[Spec]:
    """Keep the first `max_rows` leaves."""
    kept: list[Spec] = []
    for node in forest:
        if max_rows <= 0:
            break
        if isinstance(node, tuple):
            node = (node[0], _trim(node[1], max_rows))
        kept.append(node)
        max_rows -= _leaves(node)
    return kept


def _leaves(node: Spec) -> int:
    return 1 if isinstance(node, int) else sum(_leaves(child) for child in node[1])
