"""Algebra that makes different spellings of one computation alike, before any analysis looks.

`softmax(x - amax(x, d, keepdim=True), d)`  becomes  `softmax(x, d)`
`softmax(cat([x, sink], -1), -1)[..., :-1]`  becomes  `softmax_with_sink(x, sink)`

Legality: the second is the definition of the operator; softmax is invariant to a shift that is constant along its
dim, and ATen's softmax subtracts the maximum itself. Dead nodes without side effects are dropped too.
"""

from __future__ import annotations

import torch
from torch import fx

_aten = torch.ops.aten
_SOFTMAX = (_aten.softmax.int, _aten._softmax.default)
_CASTS = (_aten._to_copy.default, _aten.to.dtype)


def canonicalize(gm: fx.GraphModule) -> int:
    """Edit `gm` in place; return how many spellings were changed."""
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target in _SOFTMAX and _drop_shift(node):
            changed += 1
    for node in list(gm.graph.nodes):
        if node.target is _aten.slice.Tensor and _name_sink(node):
            changed += 1
    gm.graph.eliminate_dead_code(_is_impure)
    gm.recompile()
    return changed


def _drop_shift(node: fx.Node) -> bool:
    shifted = node.args[0]
    if not (isinstance(shifted, fx.Node) and shifted.target is _aten.sub.Tensor):
        return False
    x, top = shifted.args[:2]
    if not (isinstance(top, fx.Node) and isinstance(x, fx.Node)):
        return False
    source = top.args[0] if top.target is _aten.amax.default else None
    if source is None and len(top.args) == 2 and getattr(top.target, "__name__", "") == "getitem" and top.args[1] == 0:
        inner = top.args[0]
        source = inner.args[0] if isinstance(inner, fx.Node) and inner.target is _aten.max.dim else None
    if source is not x or top.meta["val"].dim() != x.meta["val"].dim():
        return False
    rank = x.meta["val"].dim()
    if top.target is _aten.amax.default:
        reduced = top.args[1] if len(top.args) > 1 and top.args[1] else list(range(rank))
    else:
        reduced = top.args[0].args[1]
    reduced = [reduced] if isinstance(reduced, int) else reduced
    if int(node.args[1]) % rank not in [int(d) % rank for d in reduced]:
        # the shift differs along the softmax
        return False
    node.update_arg(0, x)
    return True


def _name_sink(node: fx.Node) -> bool:
    """The slice that drops the sink's column names the whole step."""
    weights = node.args[0]
    while isinstance(weights, fx.Node) and weights.target in (*_CASTS, _aten.dropout.default):
        if weights.target is _aten.dropout.default and weights.args[1] != 0 and weights.args[2]:
            return False
        weights = weights.args[0]
    if not isinstance(weights, fx.Node) or weights.target is not _aten.softmax.int:
        return False
    joined, rank = weights.args[0], weights.meta["val"].dim()
    while isinstance(joined, fx.Node) and joined.target in _CASTS:
        joined = joined.args[0]
    if not isinstance(joined, fx.Node) or joined.target is not _aten.cat.default:
        return False
    parts, dims = joined.args[0], (node.args[1], joined.args[1] if len(joined.args) > 1 else 0, weights.args[1])
    if len(parts) != 2 or any(int(d) % rank != rank - 1 for d in dims) or node.args[2:] != (0, -1):  # type: ignore[arg-type]
        return False
    scores, sink = parts  # type: ignore[misc, str-unpack]
    if sink.meta["val"].shape[-1] != 1:
        return False
    with node.graph.inserting_before(node):
        new = node.graph.call_function(torch.ops.branchfx.softmax_with_sink.default, (scores, sink))
    new.meta = dict(node.meta)
    if node.meta["val"].dtype != scores.meta["val"].dtype:
        return False
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return True


def _is_impure(node: fx.Node) -> bool:
    """Grad-mode and autocast switches, inputs and the output stay; asserted metadata goes."""
    if node.op in ("placeholder", "output"):
        return True
    if node.target is _aten._assert_tensor_metadata.default:
        return False
    return not isinstance(node.target, torch._ops.OpOverload) and "val" in node.meta and node.meta["val"] is None
