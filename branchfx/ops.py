"""Schemas, shapes and derivatives of `torch.ops.branchfx.*`.

The kernels live in `branchfx.codegen`; `branchfx.codegen.registration.register_kernels` binds them. This module
declares the operators only, so that a graph that holds them can be traced, printed and differentiated anywhere.

Each derivative is one call of another registered operator: AOTAutograd and Inductor see plain operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAMESPACE = "branchfx"

SCHEMAS: dict[str, str] = {
    "tree_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor segments, Tensor position, Tensor? query_index, "
        "Tensor? key_bias, Tensor? sinks, Tensor[] atoms, float scale, str rule) -> (Tensor, Tensor)"
    ),
    "tree_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor segments, "
        "Tensor position, Tensor? query_index, Tensor? key_bias, Tensor? sinks, Tensor[] atoms, float scale, "
        "str rule) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "unpack": "(Tensor packed, Tensor index) -> Tensor",
    "unpack_backward": "(Tensor grad, Tensor index, SymInt tokens) -> Tensor",
    "unpack_gather": "(Tensor packed, Tensor index, Tensor label) -> Tensor",
    "unpack_gather_backward": "(Tensor grad, Tensor index, Tensor label, SymInt tokens, SymInt width) -> Tensor",
}


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the log-sum-exp of inputs of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_heads_first(like: Tensor, heads: int, tokens: int, width: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate `[1, heads, tokens, width]` whose memory is `[1, tokens, heads, width]`.

    This is the layout of ATen's flash attention on CPU, and what lets a model's `transpose(1, 2).reshape(...)`
    be a view.
    """
    memory = like.new_empty((1, tokens, heads, width), dtype=dtype or like.dtype)
    return memory.transpose(1, 2)


def empty_lse(like: Tensor, heads: int, tokens: int) -> Tensor:
    """Allocate `[1, heads, tokens]` of `lse_dtype` whose memory is `[1, tokens, heads]`."""
    return like.new_empty((1, tokens, heads), dtype=lse_dtype(like.dtype)).transpose(1, 2)


def _tree_attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    position: Tensor,
    query_index: Tensor | None,
    key_bias: Tensor | None,
    sinks: Tensor | None,
    atoms: list[Tensor],
    scale: float,
    rule: str,
) -> tuple[Tensor, Tensor]:
    _, heads, tokens, _ = query.shape
    return empty_heads_first(query, heads, tokens, value.shape[-1]), empty_lse(query, heads, tokens)


def _tree_attention_backward_fake(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    position: Tensor,
    query_index: Tensor | None,
    key_bias: Tensor | None,
    sinks: Tensor | None,
    atoms: list[Tensor],
    scale: float,
    rule: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = (empty_heads_first(x, *x.shape[1:]) for x in (query, key, value))
    grad_sinks = query.new_empty((0,)) if sinks is None else sinks.new_empty(sinks.shape)
    return grad_query, grad_key, grad_value, grad_sinks


def _unpack_fake(packed: Tensor, index: Tensor) -> Tensor:
    return packed.new_empty((*index.shape, *packed.shape[1:]))


def _unpack_backward_fake(grad: Tensor, index: Tensor, tokens: int) -> Tensor:
    return grad.new_empty((tokens, *grad.shape[index.dim() :]))


def _unpack_gather_fake(packed: Tensor, index: Tensor, label: Tensor) -> Tensor:
    return packed.new_empty(label.shape)


def _unpack_gather_backward_fake(grad: Tensor, index: Tensor, label: Tensor, tokens: int, width: int) -> Tensor:
    return grad.new_empty((tokens, width))


# a context is autograd's: it has no static type that allows attributes.
def _tree_attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, segments, position, query_index, key_bias, sinks, atoms, scale, rule = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, out, lse, segments, position, query_index, key_bias, sinks, *atoms)
    ctx.scale, ctx.rule = scale, rule


def _tree_attention_grad(ctx: Any, grad_out: Tensor | None, _grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, segments, position, query_index, key_bias, sinks, *atoms = ctx.saved_tensors
    nothing = (None,) * 3 + ([None] * len(atoms), None, None)
    if grad_out is None:
        return (None,) * 5 + nothing
    grad_query, grad_key, grad_value, grad_sinks = torch.ops.branchfx.tree_attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        segments,
        position,
        query_index,
        key_bias,
        sinks,
        atoms,
        ctx.scale,
        ctx.rule,
    )
    nothing = (None, None, None if sinks is None else grad_sinks, [None] * len(atoms), None, None)
    return (grad_query, grad_key, grad_value, None, None, *nothing)


def _refuse_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse_grad(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError("branchfx::tree_attention has no second derivative.")


def _unpack_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    packed, index = inputs
    ctx.save_for_backward(index)
    ctx.tokens = packed.shape[0]


def _unpack_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (index,) = ctx.saved_tensors
    return torch.ops.branchfx.unpack_backward(grad, index, ctx.tokens), None


def _unpack_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _unpack_backward_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (index,) = ctx.saved_tensors
    return torch.ops.branchfx.unpack(grad, index), None, None


def _unpack_gather_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    packed, index, label = inputs
    ctx.save_for_backward(index, label)
    ctx.tokens, ctx.width = packed.shape


def _unpack_gather_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    index, label = ctx.saved_tensors
    return torch.ops.branchfx.unpack_gather_backward(grad, index, label, ctx.tokens, ctx.width), None, None


def _unpack_gather_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _unpack_gather_backward_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    index, label = ctx.saved_tensors
    return torch.ops.branchfx.unpack_gather(grad, index, label), None, None, None, None


_FAKES: dict[str, Any] = {
    "tree_attention": _tree_attention_fake,
    "tree_attention_backward": _tree_attention_backward_fake,
    "unpack": _unpack_fake,
    "unpack_backward": _unpack_backward_fake,
    "unpack_gather": _unpack_gather_fake,
    "unpack_gather_backward": _unpack_gather_backward_fake,
}

_GRADS: dict[str, tuple[Any, Any]] = {
    "tree_attention": (_tree_attention_setup, _tree_attention_grad),
    "tree_attention_backward": (_refuse_setup, _refuse_grad),
    "unpack": (_unpack_setup, _unpack_grad),
    "unpack_backward": (_unpack_backward_setup, _unpack_backward_grad),
    "unpack_gather": (_unpack_gather_setup, _unpack_gather_grad),
    "unpack_gather_backward": (_unpack_gather_backward_setup, _unpack_gather_backward_grad),
}

for _name, _schema in SCHEMAS.items():
    _qualified = f"{NAMESPACE}::{_name}"
    torch.library.define(_qualified, _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(_qualified, _FAKES[_name])
    _setup, _grad = _GRADS[_name]
    torch.library.register_autograd(_qualified, _grad, setup_context=_setup)


def softmax_with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    """Return the weights of `softmax(cat([scores, sink], -1))` without the sink's own column.

    Args:
        scores: `[..., T]`.
        sink: `[..., 1]`, a logit that takes weight and has no value.
    """
    joined = torch.cat([scores, sink], dim=-1)
    return joined.softmax(-1)[..., :-1]


torch.library.define(f"{NAMESPACE}::softmax_with_sink", "(Tensor scores, Tensor sink) -> Tensor")
torch.library.impl(f"{NAMESPACE}::softmax_with_sink", "CompositeImplicitAutograd", softmax_with_sink)

# stands for an elementwise autograd.Function while a graph is rewritten; it is never run
torch.library.define(f"{NAMESPACE}::custom_function", "(Tensor[] inputs, int number) -> Tensor")
torch.library.register_fake(f"{NAMESPACE}::custom_function", lambda inputs, number: torch.empty_like(inputs[0]))
CUSTOM_FUNCTION = torch.ops.branchfx.custom_function.default
