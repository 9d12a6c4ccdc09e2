"""The packed schedule: all unique tokens in one forward and one backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from branchfx.named_batch import NamedBatch
from branchfx.passes.ir import InputRole, Window
from branchfx.passes.pipeline import SharingPlan
from branchfx.passes.rules.registry import shape_of
from branchfx.passes.tables import holds_band
from branchfx.token_tree import TokenSubset, TokenTree, build_token_tree


def batch_size(plan: SharingPlan, args: Sequence[Any]) -> tuple[int, int]:
    """Return (B, T) of a call."""
    sizes = real_sizes(plan, args)
    return sizes[plan.captured.rows], sizes[plan.captured.positions]


def real_sizes(plan: SharingPlan, args: Sequence[Any]) -> dict[sympy.Symbol, int]:
    """Return the value of every free size in a call."""
    return {s: int(args[i].shape[d] if d >= 0 else args[i]) for s, (i, d) in plan.captured.bindings.items()}


def build_tree(
    plan: SharingPlan, args: Sequence[Any], min_shared_tokens: int, named: NamedBatch | None = None
) -> tuple[TokenTree, Tensor | None]:
    """Compare the sharing key of the batch and return its tree and the validity mask.

    Args:
        plan: Of the graph.
        args: Inputs of the call.
        min_shared_tokens: Shorter shared runs are not split off.
        named: What the caller says of the tokens; needed where the plan's graph sees hidden states only.
    """
    with torch.no_grad():
        values = [v.detach() for v in plan.key.gm(*args)]
    rows, columns = batch_size(plan, args)
    shaped = [
        # one dim may hold rows and positions
        (value.movedim(row, 0) if row == column else value.movedim((row, column), (0, 1))).cpu()
        for value, (row, column) in zip(values, plan.key.shapes, strict=True)
    ]
    keys = [k.reshape(rows, columns, -1) for k in shaped[: plan.key.keys]]
    if plan.captured.named and named is not None:
        keys += [key.cpu() for key in named.keys]
    valid: Tensor | None = None
    for mask in shaped[plan.key.keys :]:
        flag = (mask != 0).reshape(rows, columns)
        valid = flag if valid is None else valid & flag
    if not keys and (valid is None or not plan.key.drops):
        keys = [torch.zeros(rows, columns, dtype=torch.int8)]
    tree = build_token_tree(
        keys,
        valid if plan.key.drops else None,
        min_shared_tokens=min_shared_tokens,
        relative_columns=not plan.key.absolute_columns,
    )
    return tree, valid


def fits(plan: SharingPlan, args: Sequence[Any], named: NamedBatch | None = None) -> bool:
    """Whether the inputs have the shapes that the plan takes them to have, such as a mask as long as the ids."""
    if any(float(args[index]) != value for index, value in plan.constants):
        return False
    # contents, not versions: writes through `.data` or NumPy leave no trace
    names = [spec.name for spec in plan.captured.inputs]
    if not all(holds_band(args[names.index(n)], band) for n, band in plan.captured.tables.items()):
        return False
    sizes = real_sizes(plan, args)
    if plan.captured.named and (named is None or tuple(named.input_ids.shape) != batch_size(plan, args)):
        return False
    if any(relation.subs(sizes) == sympy.false for relation in plan.captured.assumed):
        return False
    nodes = (n for n in plan.captured.gm.graph.nodes if n.op == "placeholder")
    for node, spec, arg in zip(nodes, plan.captured.inputs, args, strict=False):
        if spec.role is InputRole.PARAMETER or not isinstance(arg, Tensor):
            continue
        for expected, actual in zip(shape_of(node.meta["val"]), arg.shape, strict=True):
            if expected.subs(sizes) != actual:
                return False
    return True


def has_masked_query(plan: SharingPlan, valid: Tensor | None) -> bool:
    """Whether some query may see no key, at a site where it would then attend to everything, future included.

    Masks that add a large finite number turn such a row into a uniform average; a packed row gives zero.
    """
    additive = [site for site in plan.sites.attention.values() if site.additive]
    if plan.key.drops or not additive:
        return False
    if any(site.rule.predicate is not None for site in additive):
        return True
    if valid is None:
        return False
    local = any(site.rule.window is not None or site.rule.chunk is not None for site in additive)
    return not bool(valid.all() if local else valid[:, 0].all())


def _bounds(window: Window, columns: int, sizes: Mapping[sympy.Symbol, int]) -> tuple[int, int]:
    """Return the columns `[start, stop)` of a window in a call."""
    start = 0 if window.start is None else int(window.start.subs(sizes))
    return start, columns if window.stop is None else int(window.stop.subs(sizes))


def tree_arguments(plan: SharingPlan, tree: TokenTree, args: Sequence[Any]) -> list[Tensor]:
    """Return the values of `plan.packed.tree_inputs`."""
    device = next(a.device for a in args if isinstance(a, Tensor))
    sizes = real_sizes(plan, args)
    subsets: dict[Window, TokenSubset] = {}
    out: list[Tensor] = []
    for item in plan.packed.tree_inputs:
        start, stop = _bounds(item.window, tree.columns, sizes)
        whole = item.window == Window()
        if not whole and item.window not in subsets:
            subsets[item.window] = tree.subset(start, stop)
        subset = None if whole else subsets[item.window]
        index = None if subset is None else subset.token_index
        column = tree.column_of_token if index is None else tree.column_of_token[index]
        if item.kind == "segments":
            out.append(tree.segment_table)
        elif item.kind == "query":
            assert index is not None
            out.append(index)
        elif item.kind == "unpack":
            out.append((tree.unpack_index if subset is None else subset.unpack_index).to(device))
        elif item.kind == "column":
            out.append(column.to(device))
        elif item.kind == "token":
            assert index is not None
            out.append(index.to(device))
        else:
            row = tree.row_of_token if index is None else tree.row_of_token[index]
            first, last = _bounds(item.held, tree.columns, sizes)
            out.append((row * (last - first) + column - first).to(device))
    return out


def dynamic_dims(plan: SharingPlan, args: Sequence[Any]) -> list[frozenset[int]]:
    """Return the dims of each argument of the packed graph that change between calls."""
    free = {place for place in plan.captured.bindings.values()}
    out: list[frozenset[int]] = []
    placeholders = [n for n in plan.captured.gm.graph.nodes if n.op == "placeholder"]
    for i, (spec, node) in enumerate(zip(plan.captured.inputs, placeholders, strict=True)):
        value = node.meta["val"]
        if spec.role is InputRole.PARAMETER:
            out.append(frozenset())
        elif isinstance(value, Tensor):
            out.append(frozenset(d for d, s in enumerate(value.shape) if isinstance(s, torch.SymInt)))
        else:
            out.append(frozenset({-1}) if (i, -1) in free else frozenset())
    for item in plan.packed.tree_inputs:
        out.append(frozenset({0, 1}) if item.kind == "unpack" else frozenset({0}))
    return out
