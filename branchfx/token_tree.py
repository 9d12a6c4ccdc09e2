"""From the token inputs of a padded batch to the compressed prefix tree (trie) of its rows.

The sequence of a row is its valid positions in column order. Two rows share a prefix when every key and the column
agree on each of its tokens. Agreement is decided by comparing the values themselves, floats bit for bit; nothing is
hashed. The N unique tokens are laid out in depth-first pre-order, so the descendants of a token are one contiguous
range after it: token q has token k in its prefix exactly when `k <= q < subtree_end[k]`.

The keys of a token are fused into one integer (mixed radix, injective) or into a few; the rows are sorted as byte
strings, which makes rows with a common prefix neighbours; the common prefixes of neighbours then say where the tree
forks. Python loops run over keys, rows and segments, never over tokens.

Source: compressed prefix tree (trie; Morrison 1968), built as a suffix tree is from its array (Kasai et al. 2001).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Ints: TypeAlias = npt.NDArray[np.int64]
_Array: TypeAlias = npt.NDArray[Any]
# first row, then lo, hi, stop: the rows order[lo:hi] agree on their first `stop` tokens
_Branch: TypeAlias = tuple[int, int, int, int]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORDS: tuple[type[np.unsignedinteger[Any]], ...] = (np.uint8, np.uint16, np.uint32)
# codes are not negative, and the number of their values is an int64 too
_MAX_SPAN = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Segment:
    """A maximal run of tokens that one set of rows shares; a node of the tree.

    Of the set, its size and its smallest row are kept; that row stands for all of them.

    Attributes:
        id: Index of the segment in `TokenTree.segments`.
        parent: Id of the segment that it continues, -1 for a root.
        start: Packed index of the first token.
        length: Number of tokens, at least 1.
        rows: Number of rows that have these tokens.
        first_row: The smallest of those rows.
    """

    id: int
    parent: int
    start: int
    length: int
    rows: int
    first_row: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenSubset:
    """Some of the tokens of a tree, renumbered.

    Attributes:
        token_index: [N2] int64, packed indices, strictly increasing.
        unpack_index: [B, L] int64, per position the index into `token_index`, -1 where there is no token.
    """

    token_index: Tensor
    unpack_index: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """The compressed prefix tree of a batch, its N tokens in depth-first pre-order.

    Siblings, roots too, are ordered by the smallest row below them. All tensors are int64 on the CPU.

    Attributes:
        rows: B, rows of the batch.
        columns: T, padded length of the batch.
        segments: The S segments in pre-order.
        segment_table: [S, 3], per segment (start, stop, subtree_stop) in packed indices.
        row_of_token: [N], the smallest row that has the token.
        column_of_token: [N], the column of the token in that row.
        subtree_end: [N], one past the last packed index of the token's descendants.
        unpack_index: [B, T], packed index of each position, -1 where the position is not in the tree.
    """

    rows: int
    columns: int
    segments: tuple[Segment, ...]
    segment_table: Tensor
    row_of_token: Tensor
    column_of_token: Tensor
    subtree_end: Tensor
    unpack_index: Tensor

    @property
    def tokens(self) -> int:
        """N, the number of unique tokens."""
        return self.row_of_token.shape[0]

    @property
    def valid_tokens(self) -> int:
        """Number of positions (b, t) that are in the tree."""
        return sum(segment.rows * segment.length for segment in self.segments)

    @property
    def token_ratio(self) -> float:
        """`valid_tokens / tokens`, 1.0 for an empty tree: the bound on the speed-up of token-local work."""
        return self.valid_tokens / self.tokens if self.tokens else 1.0

    @property
    def depth(self) -> int:
        """Largest number of segments on a path from a root, 0 for an empty tree."""
        levels: list[int] = []
        for segment in self.segments:
            levels.append(levels[segment.parent] + 1 if segment.parent >= 0 else 1)
        return max(levels, default=0)

    @property
    def leaf_of_row(self) -> Tensor:
        """[B] int64, the segment that holds the last token of each row; -1 for a row without a token."""
        if not self.columns:
            return torch.full((self.rows,), -1, dtype=torch.int64)
        # packed indices grow along a path, so the last token of a row is its largest
        starts = self.segment_table[:, 0].contiguous()
        return torch.searchsorted(starts, self.unpack_index.amax(1), right=True) - 1

    def subset(self, start: int, stop: int) -> TokenSubset:
        """Return the tokens that some row has at columns [start, stop), with an unpack index [B, stop - start].

        Raises:
            ValueError: Unless `0 <= start <= stop <= columns`.
        """
        if not 0 <= start <= stop <= self.columns:
            raise ValueError(f"columns [{start}, {stop}) are not within [0, {self.columns})")
        return self.subset_of_index(self.unpack_index[:, start:stop])

    def subset_of_index(self, unpack: Tensor) -> TokenSubset:
        """Return the tokens that an index map mentions.

        Args:
            unpack: [B, L] (any shape is taken) int64, packed indices, -1 where there is no token.

        Returns:
            The subset, with an unpack index of the shape of `unpack`.

        Raises:
            ValueError: An index is below -1 or not below N.
        """
        index = unpack.numpy()
        if index.size and not -1 <= int(index.min()) <= int(index.max()) < self.tokens:
            raise ValueError(f"packed indices must be -1 or within [0, {self.tokens})")
        # the slot past the end stands for "no token": -1 selects it
        is_used = np.zeros(self.tokens + 1, dtype=np.bool_)
        is_used[index] = True
        is_used[-1] = False
        token_index = np.flatnonzero(is_used)
        renumber = np.full(self.tokens + 1, -1, dtype=np.int64)
        renumber[token_index] = np.arange(token_index.size)
        return TokenSubset(torch.from_numpy(token_index), torch.from_numpy(renumber[index]))

    def to_text(self, limit: int = 32) -> str:
        """Draw the tree: a line of totals, then a line for each of the first `limit` segments."""
        ratio = f"{self.valid_tokens} tokens, {self.tokens} unique (ratio {self.token_ratio:.2f})"
        lines = [f"{self.rows} x {self.columns} batch, {ratio}, {len(self.segments)} segments, depth {self.depth}"]
        last_child = {segment.parent: segment.id for segment in self.segments}
        below: list[str] = []
        for segment in self.segments[:limit]:
            indent = below[segment.parent] if segment.parent >= 0 else ""
            mark, pad = ("└─ ", "   ") if last_child[segment.parent] == segment.id else ("├─ ", "│  ")
            below.append(indent + pad)
            owner = f"row {segment.first_row}" if segment.rows == 1 else f"{segment.rows} rows"
            span = f"[{segment.start}, {segment.start + segment.length})"
            lines.append(f"{indent}{mark}{segment.length} tokens, {owner} {span}")
        if len(self.segments) > limit:
            lines.append(f"... {len(self.segments) - limit} more segments")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the totals and the segments as plain data that `json.dumps` takes."""
        totals = ("rows", "columns", "tokens", "valid_tokens", "token_ratio", "depth")
        return {name: getattr(self, name) for name in totals} | {"segments": [asdict(s) for s in self.segments]}


def build_token_tree(
    keys: Sequence[Tensor], valid: Tensor | None, *, min_shared_tokens: int = 1, relative_columns: bool = False
) -> TokenTree:
    """Build the token tree of a batch.

    Args:
        keys: Per-token inputs, each [B, T] or [B, T, *rest], of any dtype of at most 8 bytes. Without any, only
            columns are compared.
        valid: [B, T] bool, False where a position is left out of the tree; None takes every position.
        min_shared_tokens: Tokens that several rows must have in common, counted from the end of the segment above, to
            share them. A shorter run is repeated at the head of each of its branches, which may make a run further
            down long enough; a row that ends in it gets a segment of its own.
        relative_columns: Compare columns from a row's first valid one, so that left padding does not matter.

    Returns:
        The tree; empty (N = 0) when no position is valid.

    Raises:
        ValueError: Shapes that disagree, `valid` not bool, no shape at all, or `min_shared_tokens` below 1.
        TypeError: A key whose elements are larger than 8 bytes.
    """
    if min_shared_tokens < 1:
        raise ValueError(f"min_shared_tokens must be at least 1, got {min_shared_tokens}")
    rows, columns = _batch_shape(keys, valid)
    position, offsets = _sequences(valid, rows, columns)
    if not position.size:
        return _fill([], [], position, offsets, columns)
    codes, width = _token_codes(keys, position, offsets, columns, relative_columns)
    order, shared = _sort_rows(codes, width, offsets)
    segments, ends = _number_segments(order, shared, offsets, min_shared_tokens)
    return _fill(segments, ends, position, offsets, columns)


def _batch_shape(keys: Sequence[Tensor], valid: Tensor | None) -> tuple[int, int]:
    if valid is not None and valid.dtype != torch.bool:
        raise ValueError(f"valid must be bool, got {valid.dtype}")
    shapes = [tuple(key.shape[:2]) for key in keys] + ([] if valid is None else [tuple(valid.shape)])
    if not shapes or len(shapes[0]) != 2 or any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"keys and valid must have the same leading [B, T], got {shapes}")
    return shapes[0][0], shapes[0][1]


def _sequences(valid: Tensor | None, rows: int, columns: int) -> tuple[_Ints, list[int]]:
    """Return the flat indices [M] of the valid positions, row by row, and the B + 1 bounds of the rows in them."""
    if valid is None:
        return np.arange(rows * columns), [row * columns for row in range(rows + 1)]
    mask = valid.cpu().numpy()
    return np.flatnonzero(mask), [0, *np.cumsum(np.count_nonzero(mask, axis=1)).tolist()]


def _token_codes(
    keys: Sequence[Tensor], position: _Ints, offsets: list[int], columns: int, relative: bool
) -> tuple[_Array, int]:
    """Return codes [M * width] and width: two tokens have equal codes exactly if all keys and the column agree."""
    positions = (len(offsets) - 1) * columns
    narrow = _holes(position, offsets, columns, relative)
    wide: list[_Array] = []
    for key in keys:
        if key.element_size() not in _BITS:
            raise TypeError(f"a key's elements must have at most 8 bytes, got {key.dtype}")
        width = key.shape[2:].numel()
        bits = key.detach().cpu().view(_BITS[key.element_size()]).numpy().reshape(positions, width)
        values = bits if position.size == positions else bits.take(position, axis=0)
        if width == 1:
            narrow.append(values[:, 0])
        elif width:
            wide.append(np.ascontiguousarray(values).view(np.uint8))
    words, span = _fuse(narrow, position.size)
    if len(words) == 1 and not wide:
        small = next((dtype for dtype in _WORDS if span <= np.iinfo(dtype).max + 1), np.int64)
        return words[0].astype(small), 1
    table = np.concatenate([*(word[:, None].view(np.uint8) for word in words), *wide], axis=1)
    return table.reshape(-1), table.shape[1]


def _holes(position: _Ints, offsets: list[int], columns: int, relative: bool) -> list[_Ints]:
    """Return what the columns add to a token's rank in its row: the positions left out before it, [M] or nothing."""
    bounds = np.asarray(offsets)
    rows = np.flatnonzero(np.diff(bounds))
    lo, hi = bounds[rows], bounds[rows + 1]
    first = position[lo]
    origin = first if relative else rows * columns
    padding = first - origin
    if (padding == padding[0]).all() and (position[hi - 1] - first == hi - 1 - lo).all():
        return []
    return [position - np.arange(position.size) - np.repeat(origin - lo, hi - lo)]


def _fuse(narrow: Iterable[_Array], tokens: int) -> tuple[list[_Ints], int]:
    """Combine integer keys [M] in mixed radix into as few int64 words [M] as hold them, at least one.

    A constant key costs nothing. Also returns the number of values that the last word can take.
    """
    words: list[_Ints] = []
    code, span = np.zeros(tokens, dtype=np.int64), 1
    for values in narrow:
        low = int(values.min())
        extent = int(values.max()) - low + 1
        if extent > _MAX_SPAN:
            words.append(values.astype(np.int64))
        elif extent > 1:
            shifted = np.subtract(values, low, dtype=np.int64)
            if span * extent > _MAX_SPAN:
                words.append(code)
                span = 1
            if span > 1:
                # in place: a fresh [M] array costs more in page faults than the arithmetic
                code *= extent
                shifted += code
            code, span = shifted, span * extent
    return [*words, code], span


def _sort_rows(codes: _Array, width: int, offsets: list[int]) -> tuple[list[int], list[int]]:
    """Return the rows sorted as byte strings, and per place in that order the tokens in common with the row before.

    Rows with a common prefix become neighbours, and a row that is a prefix of another comes before it.
    """
    sequences = [codes[lo * width : hi * width] for lo, hi in pairwise(offsets)]
    texts = [sequence.tobytes() for sequence in sequences]
    order = sorted(range(len(texts)), key=texts.__getitem__)
    return order, [0, *(_common_prefix(sequences[a], sequences[b]) // width for a, b in pairwise(order))]


def _common_prefix(left: _Array, right: _Array) -> int:
    """Return the number of leading words that two code strings have in common."""
    size = min(left.size, right.size)
    return int(np.append(left[:size] != right[:size], True).argmax())


def _number_segments(
    order: list[int], shared: list[int], offsets: list[int], min_shared: int
) -> tuple[list[Segment], list[tuple[int, int]]]:
    """Return the segments of the sorted rows in pre-order, and (row, segment) where a row ends in a shared segment."""
    segments: list[Segment] = []
    ends: list[tuple[int, int]] = []
    start = 0
    stack: list[tuple[int, int, _Branch]] = []
    parent, begin, (first_row, lo, hi, stop) = -1, 0, (-1, 0, len(order), 0)
    while True:
        branches, ended = _branches(order, shared, offsets, (first_row, lo, hi, stop), min_shared)
        # a segment's first row needs no copy of itself, and a row without a token ends above every root
        ends += [(row, parent) for row in ended if parent >= 0 and row != first_row]
        stack += [(parent, stop, branch) for branch in branches]
        if not stack:
            return segments, ends
        parent, begin, (first_row, lo, hi, stop) = stack.pop()
        segments.append(Segment(len(segments), parent, start, stop - begin, hi - lo, first_row))
        start += stop - begin
        parent = len(segments) - 1


def _branches(
    order: list[int], shared: list[int], offsets: list[int], above: _Branch, min_shared: int
) -> tuple[list[_Branch], list[int]]:
    """Return what follows a segment, largest first row first, and the rows that end with the segment."""
    branches: list[_Branch] = []
    ended: list[int] = []
    _, lo, hi, begin = above
    pending = [(lo, hi, begin)]
    while pending:
        lo, hi, depth = pending.pop()
        for a, b in pairwise([lo, *(i for i in range(lo + 1, hi) if shared[i] <= depth), hi]):
            row = order[a]
            stop = min(shared[a + 1 : b], default=offsets[row + 1] - offsets[row])
            if b - a > 1 and stop - begin < min_shared:
                # dropped: what lies below begins where this run would have
                pending.append((a, b, stop))
            elif stop == begin:
                ended.append(row)
            else:
                branches.append((min(order[a:b]), a, b, stop))
    return sorted(branches, reverse=True), ended


def _fill(
    segments: list[Segment], ends: list[tuple[int, int]], position: _Ints, offsets: list[int], columns: int
) -> TokenTree:
    """Write the index tensors of the numbered segments."""
    rows, tokens = len(offsets) - 1, sum(segment.length for segment in segments)
    table = np.array([(s.start, s.start + s.length, s.start + s.length) for s in segments], np.int64).reshape(-1, 3)
    for segment in reversed(segments):
        if segment.parent >= 0:
            table[segment.parent, 2] = max(table[segment.parent, 2], table[segment.id, 2])
    row_of_token, column_of_token, subtree_end = (np.empty(tokens, dtype=np.int64) for _ in range(3))
    # packed index of the valid positions only, rows end to end
    packed = np.empty(position.size, dtype=np.int64)
    identity = np.arange(tokens)
    depth_stop: list[int] = []
    for segment, (start, stop, subtree_stop) in zip(segments, table.tolist(), strict=True):
        lo = offsets[segment.first_row]
        begin = depth_stop[segment.parent] if segment.parent >= 0 else 0
        depth_stop.append(begin + segment.length)
        if begin and segments[segment.parent].first_row != segment.first_row:
            # the parent's first row has the whole path above already, so one copy does for any depth
            source = offsets[segments[segment.parent].first_row]
            packed[lo : lo + begin] = packed[source : source + begin]
        own = slice(lo + begin, lo + begin + segment.length)
        packed[own] = identity[start:stop]
        row_of_token[start:stop] = segment.first_row
        np.subtract(position[own], segment.first_row * columns, out=column_of_token[start:stop])
        subtree_end[start:stop] = subtree_stop
    for row, segment_id in ends:
        lo, source, length = offsets[row], offsets[segments[segment_id].first_row], depth_stop[segment_id]
        packed[lo : lo + length] = packed[source : source + length]
    unpack_index = packed
    if position.size < rows * columns:
        unpack_index = np.full(rows * columns, -1, dtype=np.int64)
        unpack_index[position] = packed
    arrays = (table, row_of_token, column_of_token, subtree_end, unpack_index.reshape(rows, columns))
    return TokenTree(rows, columns, tuple(segments), *map(torch.from_numpy, arrays))
