"""Packed space to row space and back: gathers, and the segmented sums that are their derivatives.

Every sum over the rows that share a token runs in row order and, for 16-bit gradients, in float32: the result
depends neither on the number of threads nor on the order of a scatter.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCRATCH_NUMEL = 1 << 20


def unpack(packed: Tensor, index: Tensor) -> Tensor:
    """Gather tokens into row space.

    Args:
        packed: `[N, *rest]`.
        index: `[*I]`, int64; negative where the row has no token.

    Returns:
        `[*I, *rest]`, zero where the index is negative.

    Raises:
        IndexError: An index is N or more.
    """
    return _gather_rows(packed, index.reshape(-1)).view(*index.shape, *packed.shape[1:])


def unpack_backward(grad: Tensor, index: Tensor, tokens: int) -> Tensor:
    """Sum the gradients of the rows that read a token.

    Args:
        grad: `[*I, *rest]`.
        index: `[*I]`, int64, as given to `unpack`.
        tokens: N.

    Returns:
        `[N, *rest]`.
    """
    rest = grad.shape[index.dim() :]
    rows = grad.reshape(index.numel(), *rest)
    token, order = _sorted_valid(index.reshape(-1))
    is_first = _is_first(token)
    source = order.new_full((tokens,), -1)
    source[token[is_first]] = order[is_first]
    # most tokens have one reader: one parallel gather serves them, the ordered sum is left with the repeats.
    total = _gather_rows(rows, source)
    repeated = (~is_first).nonzero().squeeze(-1)
    if repeated.numel() == 0:
        return total
    target = token[repeated]
    if grad.dtype in (torch.float16, torch.bfloat16):
        _add_in_float32(total, target, rows, order[repeated])
        return total
    return _add_in_order(total, target, rows.index_select(0, order[repeated]))


def unpack_gather(packed: Tensor, index: Tensor, label: Tensor) -> Tensor:
    """Gather entries of tokens into row space, `out[i, j] = packed[index[i], label[i, j]]`.

    Args:
        packed: `[N, V]`.
        index: `[*I]`, int64; negative where the row has no token.
        label: `[*I, K]`, int64; not read where the index is negative.

    Returns:
        `[*I, K]`, zero where the index is negative.

    Raises:
        IndexError: A label that is read is outside [0, V), or an index is N or more. On CUDA, as for
            `torch.gather`, a device assertion.
    """
    is_valid, flat = _flat_entries(index, label, *packed.shape)
    out = packed.new_zeros(label.shape)
    # by row and column: `packed` may be a strided view, and to flatten it would copy all of it.
    width = packed.shape[1]
    out.view(-1)[is_valid] = packed[flat // width, flat % width] if width else packed.reshape(-1)[flat]
    return out


def unpack_gather_backward(grad: Tensor, index: Tensor, label: Tensor, tokens: int, width: int) -> Tensor:
    """Sum the gradients of the entries that were read.

    Args:
        grad: `[*I, K]`.
        index: `[*I]`, int64, as given to `unpack_gather`.
        label: `[*I, K]`, int64, as given to `unpack_gather`.
        tokens: N.
        width: V.

    Returns:
        `[N, V]`.
    """
    is_valid, flat = _flat_entries(index, label, tokens, width)
    entry, order = flat.sort(stable=True)
    addend = grad.reshape(-1)[is_valid][order]
    target, slot = torch.unique_consecutive(entry, return_inverse=True)
    sums = addend.new_zeros(target.numel(), dtype=torch.float64 if grad.dtype == torch.float64 else torch.float32)
    _add_in_order(sums, slot, addend.to(sums.dtype))
    out = grad.new_zeros((tokens, width))
    out.view(-1)[target] = sums.to(grad.dtype)
    return out


def _gather_rows(source: Tensor, index: Tensor) -> Tensor:
    """Return `source[index]`, `[M, *rest]`, zero where the index `[M]` is negative."""
    if source.shape[0] == 0:
        if (index >= 0).any():
            raise IndexError("index out of range: there are no tokens")
        return source.new_zeros((index.numel(), *source.shape[1:]))
    out = source.index_select(0, index.clamp(min=0))
    absent = (index < 0).nonzero().squeeze(-1)
    return out.index_fill_(0, absent, 0) if absent.numel() else out


def _sorted_valid(index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the non-negative values of `index` `[M]` in order, and where each was; equal ones keep their order."""
    value, order = index.sort(stable=True)
    start = int((index < 0).sum())
    return value[start:], order[start:]


def _is_first(ordered: Tensor) -> Tensor:
    """Return, for a sorted `[M]`, whether each value differs from the one before it."""
    changes = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=changes[1:])
    return changes


def _add_in_order(total: Tensor, index: Tensor, addend: Tensor) -> Tensor:
    """Add `addend[m]` to `total[index[m]]` in place, in the order of m; `index` is sorted."""
    if total.is_cuda:
        # index_add_ uses atomics there; the accumulating index_put_ sorts and sums in order.
        return total.index_put_((index,), addend, accumulate=True)
    return total.index_add_(0, index, addend)


def _add_in_float32(total: Tensor, target: Tensor, rows: Tensor, source: Tensor) -> None:
    """Add `rows[source[m]]` to `total[target[m]]` in the order of m, rounding each sum once; `target` is sorted."""
    shared, slot = torch.unique_consecutive(target, return_inverse=True)
    flat_total, flat_rows = total.view(total.shape[0], -1), rows.reshape(rows.shape[0], -1)
    # a few columns at a time: the float32 copies stay small enough for the allocator to reuse.
    step = max(SCRATCH_NUMEL // source.numel(), 64)
    for start in range(0, flat_total.shape[1], step):
        columns = flat_total[:, start : start + step]
        sums = columns.index_select(0, shared).float()
        addend = flat_rows[:, start : start + step].index_select(0, source).float()
        columns.index_copy_(0, shared, _add_in_order(sums, slot, addend).to(total.dtype))


def _flat_entries(index: Tensor, label: Tensor, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Return which entries are read, bool `[I * K]`, and their offsets in the flat `[N * V]`, int64."""
    is_valid = (index >= 0).unsqueeze(-1).expand_as(label).reshape(-1)
    row = index.unsqueeze(-1).expand_as(label).reshape(-1)[is_valid]
    column = label.reshape(-1)[is_valid]
    is_outside = (row >= tokens) | (column < 0) | (column >= width)
    if not index.is_cuda and is_outside.any():
        raise IndexError(
            f"index out of range: tokens up to {int(row.max())} of {tokens}, "
            f"labels from {int(column.min())} to {int(column.max())} of {width}"
        )
    # past the end for an invalid one, so that the gather's own device assertion fires on CUDA.
    return is_valid, torch.where(is_outside, tokens * width, row * width + column)
