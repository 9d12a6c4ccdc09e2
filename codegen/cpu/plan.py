"""Which parts of a token tree see which: the calls that a tree-attention kernel makes, worked out on the host.

The plan depends on the tree and on the queries only. Every layer of a step shares both, so plans are cached by the
bytes of the two tensors.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

import numpy as np
import numpy.typing as npt
from torch import Tensor

Int64Array = npt.NDArray[np.int64]

# more runs of queries than this in one segment, and masked blocks are cheaper than two calls a run.
MAX_RUNS = 4
MASKED_QUERY_TOKENS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """One row of the operator's `segments`, and where its queries are.

    Attributes:
        start: First packed token.
        stop: One past the last packed token.
        subtree_stop: One past the last packed token of its descendants.
        parent: Index of the parent segment, -1 for a root.
        query_start: First query at or after `start`.
        query_stop: First query at or after `stop`.
        query_subtree_stop: First query at or after `subtree_stop`.
    """

    start: int
    stop: int
    subtree_stop: int
    parent: int
    query_start: int
    query_stop: int
    query_subtree_stop: int

    @property
    def is_leaf(self) -> bool:
        """Whether no segment descends from it."""
        return self.stop == self.subtree_stop


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """The token tree and the queries on it.

    Attributes:
        segments: In depth-first pre-order; none is empty.
        query_index: `[Nq]`, int64: the packed index of each query; None when every token is one.
        tokens: N.
        queries: Nq.
    """

    segments: tuple[Segment, ...]
    query_index: Int64Array | None
    tokens: int
    queries: int

    def index_of_query(self, query: int) -> int:
        """Return the packed index of a query."""
        return query if self.query_index is None else int(self.query_index[query])

    def first_query_at(self, token: int) -> int:
        """Return the first query whose packed index is `token` or more."""
        return token if self.query_index is None else int(np.searchsorted(self.query_index, token))


class Mode(enum.Enum):
    """Which queries of a call see which of its keys."""

    FULL = enum.auto()
    # query i of the call sees its keys up to i, and a query past the last key sees all of them.
    CAUSAL = enum.auto()
    # by packed index.
    MASKED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One attention call over a range of queries and a range of keys, or over equal ranges side by side.

    Part p of `parts` has queries `[query_start + p * queries, ... + queries)` and keys
    `[key_start + p * key_step, ... + keys)`.

    Attributes:
        mode: Which keys a query sees.
        is_first: Whether these queries have no result yet, so that nothing is to be merged.
        query_start: First query.
        queries: Queries of one part.
        key_start: First packed token of the keys.
        keys: Keys of one part.
        parts: Number of parts.
        key_step: Packed tokens from the first key of a part to that of the next.
    """

    mode: Mode
    is_first: bool
    query_start: int
    queries: int
    key_start: int
    keys: int
    parts: int = 1
    key_step: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class CallPlan:
    """The calls of a site whose rule is plain causal visibility.

    Attributes:
        calls: In pre-order of the tree.
        has_merges: Whether some query is in several calls.
        keys_once: Whether no key is in several calls.
        covers_keys: Whether every key is in some call.
    """

    calls: tuple[Call, ...]
    has_merges: bool
    keys_once: bool
    covers_keys: bool


def read_tree(segments: Tensor, query_index: Tensor | None, tokens: int) -> Tree:
    """Read the operator's host tensors.

    Args:
        segments: `[S, 3]`, int64, CPU.
        query_index: `[Nq]`, int64, CPU, or None.
        tokens: N.

    Returns:
        The tree.

    Raises:
        ValueError: The segments are not a depth-first partition of [0, N), or the queries do not increase in it.
    """
    return _read_tree(_bytes(segments), None if query_index is None else _bytes(query_index), tokens)


def plan_calls(segments: Tensor, query_index: Tensor | None, tokens: int) -> CallPlan:
    """Plan the calls for plain causal visibility; arguments and errors as `read_tree`."""
    return _plan_calls(_bytes(segments), None if query_index is None else _bytes(query_index), tokens)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


@functools.lru_cache(maxsize=16)
def _read_tree(segment_bytes: bytes, query_bytes: bytes | None, tokens: int) -> Tree:
    table = np.frombuffer(segment_bytes, np.int64).reshape(-1, 3)
    query_index = None if query_bytes is None else np.frombuffer(query_bytes, np.int64)
    queries = tokens
    bounds = table
    if query_index is not None:
        queries = len(query_index)
        if queries and (query_index[0] < 0 or query_index[-1] >= tokens or (np.diff(query_index) <= 0).any()):
            raise ValueError(f"query_index must increase strictly within [0, {tokens})")
        bounds = np.searchsorted(query_index, table).astype(np.int64)
    segments: list[Segment] = []
    open_segments: list[int] = []
    end = 0
    for (start, stop, subtree_stop), query_bounds in zip(table.tolist(), bounds.tolist(), strict=True):
        while open_segments and segments[open_segments[-1]].subtree_stop <= start:
            open_segments.pop()
        limit = segments[open_segments[-1]].subtree_stop if open_segments else tokens
        if start != end or not start <= stop <= subtree_stop <= limit:
            raise ValueError(f"segment ({start}, {stop}, {subtree_stop}) breaks the depth-first order at token {end}")
        if start == stop:
            # an empty segment holds nothing: its children become its parent's.
            continue
        parent = open_segments[-1] if open_segments else -1
        open_segments.append(len(segments))
        segments.append(Segment(start, stop, subtree_stop, parent, *query_bounds))
        end = stop
    if end != tokens:
        raise ValueError(f"segments end at token {end} of {tokens}")
    return Tree(tuple(segments), query_index, tokens, queries)


@functools.lru_cache(maxsize=16)
def _plan_calls(segment_bytes: bytes, query_bytes: bytes | None, tokens: int) -> CallPlan:
    tree = _read_tree(segment_bytes, query_bytes, tokens)
    calls: list[Call] = []
    keys_once = True
    position = 0
    while position < len(tree.segments):
        segment = tree.segments[position]
        runs = _query_runs(tree, segment)
        count = 1
        if segment.is_leaf and len(runs) == 1:
            count = _equal_leaves(tree, position, runs[0])
        if len(runs) > MAX_RUNS:
            keys_once = False
            calls.extend(_masked_calls(tree, segment))
        else:
            calls.extend(_run_calls(segment, runs, count))
        position += count
    covered = sum(call.keys * call.parts for call in calls)
    has_merges = any(not call.is_first for call in calls)
    return CallPlan(tuple(calls), has_merges, keys_once, keys_once and covered == tokens)


def _query_runs(tree: Tree, segment: Segment) -> list[tuple[int, int]]:
    """Return the maximal ranges `[start, stop)` of packed tokens of the segment that are all queries."""
    if tree.query_index is None:
        return [(segment.start, segment.stop)]
    index = tree.query_index[segment.query_start : segment.query_stop]
    if len(index) == 0:
        return []
    breaks = np.flatnonzero(np.diff(index) != 1)
    starts = index[np.concatenate([[0], breaks + 1])]
    stops = index[np.concatenate([breaks, [len(index) - 1]])] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _equal_leaves(tree: Tree, first: int, run: tuple[int, int]) -> int:
    """Return how many leaves from `first` on lie side by side with equal lengths and equally placed queries."""
    segment = tree.segments[first]
    length = segment.stop - segment.start
    count = 1
    for other in tree.segments[first + 1 :]:
        shift = count * length
        is_equal = other.is_leaf and other.stop - other.start == length
        # roots need no merge and children do: a call is one or the other.
        if not is_equal or (other.parent < 0) != (segment.parent < 0):
            break
        if _query_runs(tree, other) != [(run[0] + shift, run[1] + shift)]:
            break
        count += 1
    return count


def _run_calls(segment: Segment, runs: list[tuple[int, int]], parts: int) -> list[Call]:
    """Plan a segment, or `parts` equal leaves, whose queries are a few runs.

    The keys before a run are seen by all its queries and all later ones; the keys of a run are seen causally by the
    run and wholly by everything later. No key is in two calls.
    """
    calls: list[Call] = []
    step = segment.stop - segment.start if parts > 1 else 0
    end = segment.query_stop if parts > 1 else segment.query_subtree_stop
    query, key = segment.query_start, segment.start

    def add(mode: Mode, key_stop: int) -> None:
        if key_stop > key and end > query:
            is_first = segment.parent < 0 and not calls
            calls.append(Call(mode, is_first, query, end - query, key, key_stop - key, parts, step))

    for run_start, run_stop in runs:
        add(Mode.FULL, run_start)
        key = max(key, run_start)
        add(Mode.CAUSAL, run_stop)
        key = run_stop
        query += run_stop - run_start
    add(Mode.FULL, segment.stop)
    return calls


def _masked_calls(tree: Tree, segment: Segment) -> list[Call]:
    """Plan a segment with scattered queries: blocks of its own queries, then its descendants."""
    is_first = segment.parent < 0
    calls: list[Call] = []
    for query in range(segment.query_start, segment.query_stop, MASKED_QUERY_TOKENS):
        stop = min(query + MASKED_QUERY_TOKENS, segment.query_stop)
        keys = tree.index_of_query(stop - 1) + 1 - segment.start
        calls.append(Call(Mode.MASKED, is_first, query, stop - query, segment.start, keys))
    below = segment.query_subtree_stop - segment.query_stop
    if below:
        calls.append(Call(Mode.FULL, is_first, segment.query_stop, below, segment.start, segment.stop - segment.start))
    return calls
