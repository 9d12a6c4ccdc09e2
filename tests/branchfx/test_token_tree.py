"""The token tree against a trie of dicts that is too simple to be wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from branchfx.token_tree import TokenTree, build_token_tree

_NAN_A, _NAN_B = 0x7FC00000, 0x7FC00001


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one call of `build_token_tree`."""

    keys: tuple[Tensor, ...]
    valid: Tensor | None
    relative: bool = False

    def build(self, min_shared: int = 1) -> TokenTree:
        """Return the tree of the batch."""
        return build_token_tree(self.keys, self.valid, min_shared_tokens=min_shared, relative_columns=self.relative)

    def sequences(self) -> list[list[tuple[Any, ...]]]:
        """Return per row the tokens (compared column, bytes of each key) and, last, the true column."""
        rows, columns = (self.keys[0] if self.valid is None else self.valid).shape[:2]
        result = []
        for row in range(rows):
            chosen = [t for t in range(columns) if self.valid is None or bool(self.valid[row, t])]
            origin = chosen[0] if chosen and self.relative else 0
            result.append([(t - origin, *(_raw(key[row, t]) for key in self.keys), t) for t in chosen])
        return result


def _raw(value: Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _prefixes(batch: Batch) -> list[list[tuple[Any, ...]]]:
    """Return per row and rank the whole prefix, without true columns: the identity of a unique token."""
    return [[tuple(t[:-1] for t in row[: i + 1]) for i in range(len(row))] for row in batch.sequences()]


def _brute_force_tokens(batch: Batch) -> int:
    root: dict[Any, Any] = {}
    count = 0
    for row in batch.sequences():
        node = root
        for token in row:
            if token[:-1] not in node:
                node[token[:-1]] = {}
                count += 1
            node = node[token[:-1]]
    return count


def _paths(tree: TokenTree) -> list[list[int]]:
    return [[u for u in row if u >= 0] for row in tree.unpack_index.tolist()]


def check_tree(tree: TokenTree, batch: Batch) -> None:
    """Assert all that holds for any threshold."""
    sequences, prefixes, paths = batch.sequences(), _prefixes(batch), _paths(tree)
    assert all(tensor.dtype == torch.int64 for tensor in _tensors(tree))
    # each valid position, and nothing else, is in the tree
    if batch.valid is not None:
        assert torch.equal(tree.unpack_index >= 0, batch.valid)
    assert tree.unpack_index.shape == (tree.rows, tree.columns) == (len(sequences), tree.columns)
    assert tree.valid_tokens == sum(map(len, sequences))
    owner, column, end = tree.row_of_token.tolist(), tree.column_of_token.tolist(), tree.subtree_end.tolist()
    rows_of = [[r for r, path in enumerate(paths) if u in path] for u in range(tree.tokens)]
    for row, path in enumerate(paths):
        for rank, token in enumerate(path):
            # the representative has the token at the same rank after the same prefix, so every key agrees
            assert tree.unpack_index[owner[token], column[token]] == token
            assert paths[owner[token]][rank] == token
            assert prefixes[owner[token]][rank] == prefixes[row][rank]
            # the ancestors by interval are exactly the row's earlier tokens
            assert [k for k in range(tree.tokens) if k <= token < end[k]] == path[: rank + 1]
    assert all(owner[u] == min(rows_of[u]) for u in range(tree.tokens))
    _check_segments(tree, paths, rows_of)


def _check_segments(tree: TokenTree, paths: list[list[int]], rows_of: list[list[int]]) -> None:
    cursor = 0
    levels: list[int] = []
    for index, (segment, (start, stop, subtree_stop)) in enumerate(
        zip(tree.segments, tree.segment_table.tolist(), strict=True)
    ):
        assert (segment.id, segment.start, segment.start + segment.length) == (index, start, stop)
        assert segment.start == cursor
        assert segment.length > 0
        cursor = stop
        assert all(rows_of[u] == rows_of[start] for u in range(start, stop))
        assert (segment.rows, segment.first_row) == (len(rows_of[start]), rows_of[start][0])
        assert tree.subtree_end[start:stop].tolist() == [subtree_stop] * segment.length
        below = [s for s in tree.segments if set(rows_of[s.start]) <= set(rows_of[start]) and s.start >= start]
        assert subtree_stop == max(s.start + s.length for s in below)
        before = [path[path.index(start) - 1] for path in paths if start in path and path[0] != start]
        if segment.parent < 0:
            assert not before
        else:
            parent = tree.segments[segment.parent]
            assert set(before) == {parent.start + parent.length - 1}
        levels.append(levels[segment.parent] + 1 if segment.parent >= 0 else 1)
    assert cursor == tree.tokens
    assert tree.depth == max(levels, default=0)
    for parent_id in range(-1, len(tree.segments)):
        children = [s.first_row for s in tree.segments if s.parent == parent_id]
        assert children == sorted(children)
        # maximal: an only child with the same rows would belong to its parent
        if parent_id >= 0:
            assert all(s.rows < tree.segments[parent_id].rows for s in tree.segments if s.parent == parent_id)
    starts = {u: s.id for s in tree.segments for u in range(s.start, s.start + s.length)}
    assert tree.leaf_of_row.tolist() == [starts[path[-1]] if path else -1 for path in paths]


def _tensors(tree: TokenTree) -> list[Tensor]:
    return [tree.segment_table, tree.row_of_token, tree.column_of_token, tree.subtree_end, tree.unpack_index]


def _key(draw: st.DrawFn, rows: int, columns: int) -> Tensor:
    kind = draw(st.sampled_from(["int64", "wide_int64", "bool", "int8", "float32", "bfloat16", "float64", "rest"]))
    size = rows * columns * (3 if kind == "rest" else 1)
    # zeros most of the time, so that deep sharing is common
    bits = draw(st.lists(st.sampled_from([0, 0, 0, 0, 1, 2]), min_size=size, max_size=size))
    palette: dict[str, Tensor] = {
        "int64": torch.tensor([0, 151643, 7]),
        "wide_int64": torch.tensor([-(2**63), 2**63 - 1, 0]),
        "bool": torch.tensor([True, False, False]),
        "int8": torch.tensor([-128, 127, 0], dtype=torch.int8),
        "float32": torch.tensor([_NAN_A, _NAN_B, 0], dtype=torch.int32).view(torch.float32),
        "bfloat16": torch.tensor([0.0, -0.0, 1.0], dtype=torch.bfloat16),
        "float64": torch.tensor([0.0, -0.0, float("nan")], dtype=torch.float64),
        "rest": torch.tensor([0.0, -0.0, 2.0], dtype=torch.float16),
    }
    values = palette[kind][torch.tensor(bits, dtype=torch.int64)]
    return values.reshape(rows, columns, 3) if kind == "rest" else values.reshape(rows, columns)


@st.composite
def batches(draw: st.DrawFn, max_rows: int = 6, max_columns: int = 8) -> Batch:
    """Draw small batches with much sharing and any padding."""
    rows, columns = draw(st.integers(1, max_rows)), draw(st.integers(1, max_columns))
    keys = tuple(_key(draw, rows, columns) for _ in range(draw(st.integers(1, 3))))
    copies = draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows))
    if draw(st.booleans()):
        keys = tuple(key[torch.tensor(copies)] for key in keys)
    padding = draw(st.sampled_from(["none", "right", "left", "any"]))
    if padding == "none":
        return Batch(keys, None, draw(st.booleans()))
    lengths = torch.tensor(draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows)))
    valid = torch.arange(columns) < lengths[:, None]
    if padding == "left":
        valid = valid.flip(1)
    if padding == "any":
        flags = draw(
            st.lists(st.sampled_from([True, True, True, False]), min_size=rows * columns, max_size=rows * columns)
        )
        valid = torch.tensor(flags).reshape(rows, columns)
    return Batch(keys, valid, draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(batches())
def test_tree_is_the_trie(batch: Batch) -> None:
    tree = batch.build()
    assert tree.tokens == _brute_force_tokens(batch)
    check_tree(tree, batch)
    for token in range(tree.tokens):
        row, column = int(tree.row_of_token[token]), int(tree.column_of_token[token])
        for b, t in (tree.unpack_index == token).nonzero().tolist():
            assert all(_raw(key[b, t]) == _raw(key[row, column]) for key in batch.keys)


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(2, 6))
def test_threshold_keeps_long_runs_only(batch: Batch, min_shared: int) -> None:
    tree = batch.build(min_shared)
    check_tree(tree, batch)
    assert all(segment.length >= min_shared for segment in tree.segments if segment.rows > 1)
    # and no more is given up than the threshold asks for: siblings agree on fewer tokens than that
    paths, prefixes = _paths(tree), _prefixes(batch)
    for i, left in enumerate(paths):
        for j in range(i):
            shared = sum(a == b for a, b in zip(left, paths[j], strict=False))
            agreed = sum(a == b for a, b in zip(prefixes[i], prefixes[j], strict=False))
            assert agreed - shared < min_shared


@settings(max_examples=100, deadline=None)
@given(batches(), st.data())
def test_subset_is_what_the_columns_need(batch: Batch, data: st.DataObject) -> None:
    tree = batch.build()
    start = data.draw(st.integers(0, tree.columns))
    stop = data.draw(st.integers(start, tree.columns))
    part = tree.unpack_index[:, start:stop]
    subset = tree.subset(start, stop)
    assert subset.token_index.dtype == subset.unpack_index.dtype == torch.int64
    assert subset.token_index.tolist() == sorted({u for u in part.flatten().tolist() if u >= 0})
    assert subset.unpack_index.shape == part.shape
    assert torch.equal(subset.unpack_index >= 0, part >= 0)
    used = part >= 0
    assert torch.equal(subset.token_index[subset.unpack_index[used]], part[used])


def _ids(*rows: str) -> Tensor:
    return torch.tensor([[ord(c) for c in row] for row in rows])


def _right_padded(*rows: str) -> Batch:
    columns = max(map(len, rows))
    valid = torch.tensor([[t < len(row) for t in range(columns)] for row in rows])
    return Batch((_ids(*(row.ljust(columns) for row in rows)),), valid)


def _outline(tree: TokenTree) -> list[tuple[int, int, int, int]]:
    return [(s.parent, s.length, s.rows, s.first_row) for s in tree.segments]


def test_two_prompts_with_three_levels() -> None:
    tree = _right_padded("abXcd", "zy", "abXe", "abQ", "zyw").build()
    assert _outline(tree) == [
        (-1, 2, 3, 0), (0, 1, 2, 0), (1, 2, 1, 0), (1, 1, 1, 2), (0, 1, 1, 3), (-1, 2, 2, 1), (5, 1, 1, 4)
    ]  # fmt: skip
    assert tree.subtree_end.tolist() == [7, 7, 6, 5, 5, 6, 7, 10, 10, 10]
    assert tree.leaf_of_row.tolist() == [2, 5, 3, 4, 6]
    assert tree.depth == 3
    assert tree.unpack_index.tolist()[3:] == [[0, 1, 6, -1, -1], [7, 8, 9, -1, -1]]


def test_without_sharing_rows_keep_their_order() -> None:
    tree = build_token_tree([_ids("zz", "yy", "xx")], None)
    assert tree.unpack_index.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert tree.token_ratio == 1.0


def test_duplicate_rows_share_every_token() -> None:
    tree = build_token_tree([_ids("abc", "xyz", "abc")], None)
    assert tree.unpack_index.tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert tree.token_ratio == 1.5


def test_threshold_separates_prompts_that_share_a_first_token() -> None:
    batch = _right_padded("^" + "a" * 9 + "1", "^" + "b" * 9 + "2", "^" + "a" * 9 + "3")
    assert _outline(batch.build()) == [(-1, 1, 3, 0), (0, 9, 2, 0), (1, 1, 1, 0), (1, 1, 1, 2), (0, 10, 1, 1)]
    # the dropped first token counts for the run below it
    assert _outline(batch.build(10)) == [(-1, 10, 2, 0), (0, 1, 1, 0), (0, 1, 1, 2), (-1, 11, 1, 1)]
    assert _outline(batch.build(11)) == [(-1, 11, 1, 0), (-1, 11, 1, 1), (-1, 11, 1, 2)]


def test_threshold_splits_duplicates_and_rows_that_end_early() -> None:
    assert _outline(_right_padded("ab", "ab", "abc").build(3)) == [(-1, 2, 1, 0), (-1, 2, 1, 1), (-1, 3, 1, 2)]


def test_relative_columns_ignore_left_padding_but_not_holes() -> None:
    ids = _ids("  ab", " ab ", "a b ")
    valid = ids != ord(" ")
    assert build_token_tree([ids], valid).tokens == 6
    tree = build_token_tree([ids], valid, relative_columns=True)
    assert tree.unpack_index.tolist() == [[-1, -1, 0, 1], [-1, 0, 1, -1], [0, -1, 2, -1]]
    assert tree.column_of_token.tolist() == [2, 3, 2]


def test_values_under_padding_do_not_matter() -> None:
    valid = torch.tensor([[True, True, False]] * 2)
    tree = build_token_tree([_ids("ab1", "ab2"), torch.tensor([[0, 0, 2**63 - 1], [0, 0, -(2**63)]])], valid)
    assert tree.unpack_index.tolist() == [[0, 1, -1], [0, 1, -1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats_are_compared_by_their_bits(dtype: torch.dtype) -> None:
    nan, zero = float("nan"), 0.0
    tree = build_token_tree([torch.tensor([[nan, zero], [nan, zero], [nan, -zero]], dtype=dtype)], None)
    assert tree.unpack_index.tolist() == [[0, 1], [0, 1], [0, 2]]


def test_nan_payloads_are_told_apart() -> None:
    bits = torch.tensor([[_NAN_A], [_NAN_B], [_NAN_A]], dtype=torch.int32)
    assert build_token_tree([bits.view(torch.float32)], None).unpack_index.tolist() == [[0], [1], [0]]


@pytest.mark.parametrize("extent", [2**8, 2**16, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_ranges_at_the_edge_of_a_word(extent: int) -> None:
    low = -(2**63)
    key = torch.tensor([[low, low], [low + extent - 1, low], [low, low + extent], [low + extent, low]])[:, :2]
    other = torch.tensor([[0, 5], [0, 5], [0, 5], [0, 6]])
    batch = Batch((key, other, key.flip(1)), None)
    check_tree(batch.build(), batch)
    assert batch.build().tokens == _brute_force_tokens(batch)


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("extent", [-1, 0, 1, 2])
def test_lone_key_around_the_edge_of_a_word(bits: int, extent: int) -> None:
    highest = 2**bits - 1 + extent
    key = torch.tensor([[0], [highest], [1], [highest - 1], [0]]) - 5
    assert build_token_tree([key], None).unpack_index.tolist() == [[0], [1], [2], [3], [0]]


def test_fused_keys_are_told_apart() -> None:
    grid = torch.cartesian_prod(torch.arange(3), torch.arange(-4, 1), torch.arange(2))
    tree = build_token_tree([grid[:, i : i + 1] for i in range(3)], None)
    assert tree.unpack_index.flatten().tolist() == list(range(30))


def test_keys_that_do_not_fit_one_word_are_told_apart() -> None:
    edges = torch.tensor([0, 1, 2**39, 2**40 - 1])
    grid = torch.cartesian_prod(edges, edges, edges)
    tree = build_token_tree([grid[:, i : i + 1] for i in range(3)], None)
    assert tree.unpack_index.flatten().tolist() == list(range(64))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)], ids=str)
def test_empty_batch(shape: tuple[int, int]) -> None:
    for valid in (None, torch.ones(shape, dtype=torch.bool)):
        tree = build_token_tree([torch.zeros(shape, dtype=torch.int64)], valid)
        assert (tree.tokens, tree.depth, tree.segments, tree.unpack_index.shape) == (0, 0, (), shape)
        assert tree.segment_table.shape == (0, 3)
        assert tree.leaf_of_row.tolist() == [-1] * shape[0]
        assert tree.subset(0, shape[1]).token_index.tolist() == []


def test_batch_of_padding_only_and_rows_without_a_token() -> None:
    ids = _ids("ab", "ab", "ab")
    assert build_token_tree([ids], torch.zeros(3, 2, dtype=torch.bool)).tokens == 0
    tree = build_token_tree([ids], torch.tensor([[False, False], [True, True], [False, False]]))
    assert tree.unpack_index.tolist() == [[-1, -1], [0, 1], [-1, -1]]
    assert tree.leaf_of_row.tolist() == [-1, 0, -1]


def test_strided_keys_and_gradients_are_taken() -> None:
    positions = torch.arange(4).expand(3, 4)
    embeddings = torch.zeros(4, 3, 2, requires_grad=True).transpose(0, 1)
    assert build_token_tree([positions, embeddings], None).tokens == 4


def test_text_and_dict_agree_with_the_tree() -> None:
    tree = _right_padded("abXcd", "zy", "abXe", "abQ", "zyw").build()
    assert tree.to_text(limit=6).splitlines() == [
        "5 x 5 batch, 17 tokens, 10 unique (ratio 1.70), 7 segments, depth 3",
        "├─ 2 tokens, 3 rows [0, 2)",
        "│  ├─ 1 tokens, 2 rows [2, 3)",
        "│  │  ├─ 2 tokens, row 0 [3, 5)",
        "│  │  └─ 1 tokens, row 2 [5, 6)",
        "│  └─ 1 tokens, row 3 [6, 7)",
        "└─ 2 tokens, 2 rows [7, 9)",
        "... 1 more segments",
    ]
    summary = json.loads(json.dumps(tree.to_dict()))
    assert (summary["tokens"], summary["valid_tokens"], len(summary["segments"])) == (10, 17, 7)
    assert summary["segments"][1] == {"id": 1, "parent": 0, "start": 2, "length": 1, "rows": 2, "first_row": 0}


def test_faulty_arguments_are_refused() -> None:
    ids = _ids("ab", "ab")
    with pytest.raises(ValueError, match="same leading"):
        build_token_tree([ids, ids[:1]], None)
    with pytest.raises(ValueError, match="same leading"):
        build_token_tree([], None)
    with pytest.raises(ValueError, match="same leading"):
        build_token_tree([ids[0]], None)
    with pytest.raises(ValueError, match="bool"):
        build_token_tree([ids], torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least 1"):
        build_token_tree([ids], None, min_shared_tokens=0)
    with pytest.raises(TypeError, match="8 bytes"):
        build_token_tree([ids.to(torch.complex128)], None)
    tree = build_token_tree([ids], None)
    with pytest.raises(ValueError, match="columns"):
        tree.subset(1, 3)
    for bad in (-2, 2):
        with pytest.raises(ValueError, match="packed indices"):
            tree.subset_of_index(torch.tensor([[bad]]))
