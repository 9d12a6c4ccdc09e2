"""Reductions, softmax, normalization and scans: legal over constant dims; over positions only where named."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from branchfx import ops as _operators
from branchfx.diagnostics import Code
from branchfx.passes.ir import Data, Dim, Layout, Position, Size
from branchfx.passes.rules.registry import OpRule, Refusal, RuleContext, Sample, join_data, require_constant

_aten = torch.ops.aten


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """Return a positional or keyword argument."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _reduce(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    raw = argument(node, 2 if node.target in _NORMS else 1, "dim")
    if raw is None or raw == []:
        raw = list(range(len(x.dims)))
    dims = {d % max(len(x.dims), 1) for d in ([raw] if isinstance(raw, int) else raw)}
    for d in dims:
        require_constant(x.dims[d], "a reduction")
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    keep = first.dim() == len(x.dims)
    out: list[Dim] = [() if i in dims else d for i, d in enumerate(x.dims) if keep or i not in dims]
    layout = Layout(tuple(out), x.data)
    return (layout,) * len(value) if isinstance(value, (tuple, list)) else layout


def _reduce_all(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    for dim in x.dims:
        require_constant(dim, "a reduction")
    return Layout((), x.data)


def _along(node: fx.Node, ctx: RuleContext) -> Layout:
    """Softmax and friends: same shape, one dim is mixed."""
    x = ctx.layout(node.args[0])
    d = argument(node, 1, "dim") % max(len(x.dims), 1)
    if x.is_pair and d == len(x.dims) - 1 and node.target in _SOFTMAX:
        # the attention pass proves that only visible keys count, or refuses the site
        return x
    require_constant(x.dims[d], "a softmax or scan")
    return x


def _with_sink(node: fx.Node, ctx: RuleContext) -> Layout:
    """A softmax over keys and one more logit; the attention pass proves that only visible keys count."""
    x, sink = ctx.layout(node.args[0]), ctx.layout(node.args[1])
    if not x.is_pair:
        require_constant(x.dims[-1], "a softmax")
    return Layout(x.dims, join_data([x, sink]))


def _scan(node: fx.Node, ctx: RuleContext) -> Layout:
    """A cumulative sum over positions reads only the past; it stays in row space."""
    x = ctx.layout(node.args[0])
    d = argument(node, 1, "dim") % max(len(x.dims), 1)
    dim = x.dims[d]
    if len(dim) == 1 and isinstance(dim[0], Position) and dim[0].window.start is None:
        return x
    require_constant(dim, "a scan")
    return x


def _normalize(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    for dim in x.dims[len(x.dims) - len(node.args[1]) :]:  # type: ignore[arg-type]
        require_constant(dim, "a normalization")
    weights = [ctx.layout(a) for a in node.args[2:] if isinstance(a, fx.Node)]
    for weight in weights:
        if not weight.is_replicated:
            raise Refusal(Code.UNKNOWN_OPERATOR, "a normalization has a weight that is not a parameter")
    layout = Layout(x.dims, join_data([x, *weights]))
    value = node.meta["val"]
    if isinstance(value, (tuple, list)):
        stats = Layout(
            tuple(x.dims[i] if i < len(x.dims) - len(node.args[1]) else () for i in range(len(x.dims))), x.data
        )  # type: ignore[arg-type]
        return (layout, *(stats,) * (len(value) - 1))
    return layout


def _group_norm(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    for dim in x.dims[1:]:
        require_constant(dim, "a group normalization")
    return x


def _top_k(node: fx.Node, ctx: RuleContext) -> tuple[Layout, ...]:
    x = ctx.layout(node.args[0])
    k = int(node.args[1])  # type: ignore[arg-type]
    d = argument(node, 2, "dim", -1) % len(x.dims)
    require_constant(x.dims[d], "topk")
    dims = list(x.dims)
    dims[d] = (Size(k),) if k != 1 else ()
    return (Layout(tuple(dims), x.data),) * 2


def _random(node: fx.Node, ctx: RuleContext) -> Layout:
    p, train = node.args[1], node.args[2]
    if train and p != 0:
        raise Refusal(
            Code.RANDOM_OP, f"dropout with p={p} is active: G rollouts draw G masks, a shared token would draw one"
        )
    x = ctx.layout(node.args[0])
    value = node.meta["val"]
    return x if not isinstance(value, (tuple, list)) else (x,) * len(value)  # type: ignore[return-value]


def _always_random(node: fx.Node, ctx: RuleContext) -> Layout:
    raise Refusal(Code.RANDOM_OP, f"{node.target} draws random numbers")


def _batch_norm(node: fx.Node, ctx: RuleContext) -> Layout:
    raise Refusal(Code.BATCH_STATISTICS, "batch normalization uses statistics over the rows")


def _found(names: str) -> tuple[Any, ...]:
    out = []
    for name in names.split():
        packet, _, overload = name.partition(".")
        found = getattr(getattr(_aten, packet, None), overload or "default", None)
        if found is not None:
            out.append(found)
    return tuple(out)


_NORMS = _found("linalg_vector_norm.default norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype")
_SOFTMAX = frozenset(_found("softmax.int _softmax.default _safe_softmax.default"))

RULES = (
    OpRule(_NORMS, _reduce),
    OpRule((torch.ops.branchfx.softmax_with_sink.default,), _with_sink),
    OpRule(
        _found(
            "sum.dim_IntList mean.dim amax.default amin.default prod.dim_int var.dim var.correction "
            "std.dim std.correction "
            "logsumexp.default argmax.default "
            "argmin.default any.dim all.dim any.dims all.dims max.dim min.dim var_mean.correction "
            "count_nonzero.dim_IntList"
        ),
        _reduce,
        samples=(
            Sample(lambda x: x.sum(-1), ("token[B, T, 8]",), "token[B, T]"),
            Sample(lambda x: x.mean(-1, keepdim=True), ("token[B, T, 8]",), "token[B, T, 1]"),
            Sample(lambda x: x.sum(1), ("token[B, T, 8]",), "BFX011"),
            Sample(lambda x: x.logsumexp(-1), ("token[B, T, 8]",), "token[B, T]"),
        ),
    ),
    OpRule(_found("sum.default mean.default max.default min.default any.default all.default norm.Scalar"), _reduce_all),
    OpRule(
        _found("softmax.int log_softmax.int _softmax.default _log_softmax.default _safe_softmax.default"),
        _along,
        samples=(
            Sample(lambda x: x.log_softmax(-1), ("token[B, T, 8]",), "token[B, T, 8]"),
            Sample(lambda x: x.softmax(1), ("token[B, T, 8]",), "BFX011"),
        ),
    ),
    OpRule(
        _found("cumsum.default cumprod.default logcumsumexp.default"),
        _scan,
        packable=False,
        samples=(Sample(lambda x: x.cumsum(1), ("token[B, T]:int",), "token[B, T]"),),
    ),
    OpRule(
        _found("layer_norm.default rms_norm.default native_layer_norm.default _fused_rms_norm.default"),
        _normalize,
        samples=(
            Sample(
                lambda x, w: torch.nn.functional.layer_norm(x, (8,), w), ("token[B, T, 8]", "none[8]"), "token[B, T, 8]"
            ),
            Sample(lambda x: torch.nn.functional.rms_norm(x, (8,)), ("token[B, T, 8]",), "token[B, T, 8]"),
        ),
    ),
    OpRule(_found("group_norm.default"), _group_norm),
    OpRule(
        _found("topk.default"),
        _top_k,
        samples=(Sample(lambda x: x.topk(2, -1)[0], ("token[B, T, 8]",), "token[B, T, 2]"),),
    ),
    OpRule(
        _found("dropout.default native_dropout.default"),
        _random,
        samples=(
            Sample(lambda x: _aten.dropout.default(x, 0.0, True), ("token[B, T, 8]",), "token[B, T, 8]"),
            Sample(lambda x: _aten.dropout.default(x, 0.5, True), ("token[B, T, 8]",), "BFX008"),
        ),
    ),
    OpRule(
        _found(
            "bernoulli.default bernoulli.p rand.default randn.default rand_like.default "
            "randn_like.default randint.default "
            "normal.float_Tensor multinomial.default randperm.default alpha_dropout.default feature_dropout.default "
            "rrelu.default rrelu_with_noise.default exponential.default uniform.default"
        ),
        _always_random,
    ),
    OpRule(_found("batch_norm.default native_batch_norm.default instance_norm.default"), _batch_norm),
)

__all__ = ["RULES", "Data", "_operators", "argument"]
