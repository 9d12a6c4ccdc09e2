"""Elementwise operators: the value at an index depends on the arguments at that index, after broadcasting."""

from __future__ import annotations

import torch
from torch import fx

from branchfx.ops import CUSTOM_FUNCTION
from branchfx.passes.ir import Layout
from branchfx.passes.rules.registry import OpRule, RuleContext, Sample, broadcast_dims, join_data

_aten = torch.ops.aten


def pointwise_layout(node: fx.Node, ctx: RuleContext) -> Layout:
    """Broadcast all tensor arguments."""
    layouts = [ctx.layout(a) for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    return Layout(broadcast_dims(layouts), join_data(layouts))


def _same_as_first(node: fx.Node, ctx: RuleContext) -> Layout:
    return ctx.layout(node.args[0])


def _overloads(names: str) -> tuple[object, ...]:
    out = []
    for name in names.split():
        packet, _, overload = name.partition(".")
        found = getattr(getattr(_aten, packet, None), overload or "default", None)
        if found is not None:
            out.append(found)
    return tuple(out)


_UNARY = """
abs neg exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan tanh sinh cosh asin acos atan asinh acosh
atanh sigmoid silu relu relu6 gelu mish softplus elu selu celu leaky_relu hardtanh hardswish hardsigmoid log_sigmoid
softsign logit erf erfc erfinv floor ceil round round.decimals trunc frac sign sgn logical_not bitwise_not isnan isinf
isfinite square clone contiguous detach alias positive nan_to_num zeros_like ones_like full_like
lift_fresh_copy lift_fresh deg2rad threshold digamma lgamma sinc angle real imag conj _conj resolve_conj resolve_neg
"""
_BINARY = """
add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar rsub.Tensor mul.Tensor mul.Scalar div.Tensor div.Scalar
div.Scalar_mode true_divide.Tensor floor_divide.Scalar remainder.Tensor
remainder.Scalar fmod.Tensor fmod.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar maximum minimum fmax fmin
atan2 copysign.Tensor hypot eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor
gt.Scalar ge.Tensor ge.Scalar logical_and logical_or logical_xor bitwise_and.Tensor bitwise_and.Scalar
bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor
bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar __and__.Tensor __or__.Tensor __xor__.Tensor
__and__.Scalar __or__.Scalar logaddexp logaddexp2 xlogy.Tensor special_xlog1py copy polar complex min.other
max.other heaviside prelu
"""
_OTHER = """
where.self where.ScalarSelf where.ScalarOther where.Scalar masked_fill.Scalar masked_fill.Tensor clamp clamp.Tensor
clamp_min clamp_max clamp_min.Tensor clamp_max.Tensor clip lerp.Tensor lerp.Scalar addcmul addcdiv
expand_as
"""
_FIRST = """
_to_copy to.dtype to.device to.dtype_layout to.other type_as contiguous _assert_tensor_metadata
"""

CUSTOM = OpRule((CUSTOM_FUNCTION,), pointwise_layout)
"""An `autograd.Function` that `passes.custom_functions` found to be elementwise."""

RULES = (
    OpRule(
        _overloads(_UNARY.replace("contiguous", "")),
        pointwise_layout,
        samples=(
            Sample(_aten.silu.default, ("token[B, T, 8]",), "token[B, T, 8]"),
            Sample(_aten.exp.default, ("none[T]",), "none[T]"),
        ),
    ),
    OpRule(
        _overloads(_BINARY),
        pointwise_layout,
        samples=(
            Sample(_aten.add.Tensor, ("token[B, T, 8]", "none[T, 8]"), "token[B, T, 8]"),
            Sample(_aten.mul.Tensor, ("token[B, T, 8]", "none[8]"), "token[B, T, 8]"),
            Sample(lambda x: x[:, 1:] + x[:, :-1], ("token[B, T]",), "BFX010"),
        ),
    ),
    OpRule(
        _overloads(_OTHER),
        pointwise_layout,
        samples=(
            Sample(_aten.where.self, ("token[B, T]:bool", "token[B, T]", "none[]"), "token[B, T]"),
            Sample(lambda x, m: x.masked_fill(m, 0.0), ("token[B, T, 4]", "none[T, 1]:bool"), "token[B, T, 4]"),
        ),
    ),
    OpRule(
        _overloads(_FIRST),
        _same_as_first,
        samples=(Sample(lambda x: x.to(torch.float32), ("token[B, T]",), "token[B, T]"),),
    ),
)
