"""Keep an elementwise `torch.autograd.Function` whole, so that its own backward outlives the lowering.

Dynamo hands such a function over as the operator `autograd_function_apply` with a graph for each direction; the
lowering would trace the forward alone and derive another backward. Before it, `outline_custom_functions` replaces
the call by `branchfx::custom_function(inputs, number)`; after the rewrite `restore_custom_functions` puts the
original operator back, on packed values.

Legality: both graphs hold nothing but elementwise operators on tensors of one shape and dtype, so the function gives
each token what it gave it before, wherever the token lies; and the backward is linear in the gradient, so what it makes
of the summed gradient of a shared token is the sum of what it made of each row's. Any other function stays where it is,
and the lowering refuses it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from branchfx.ops import CUSTOM_FUNCTION
from branchfx.passes.rules import pointwise

_apply = torch.ops.higher_order.autograd_function_apply
_ELEMENTWISE = frozenset(target for rule in pointwise.RULES for target in rule.targets)
_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.sub.Tensor)
_LINEAR = (
    *(_aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar, _aten.neg.default),
    *(_aten.clone.default, _aten.alias.default, _aten.detach.default),
)
_TRACE_ERRORS = (RuntimeError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True, slots=True)
class CustomFunction:
    """One call of a `torch.autograd.Function`.

    Attributes:
        forward: Graph from the inputs to (outputs, saved values).
        backward: Graph from the gradients of the outputs and the saved values to those of the inputs.
        takes_tensor: For each input whether it is a tensor; the others are sizes that neither graph reads.
        options: Keyword arguments of the operator.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    takes_tensor: tuple[bool, ...]
    options: Mapping[str, Any]


def outline_custom_functions(gm: fx.GraphModule) -> tuple[fx.GraphModule, tuple[CustomFunction, ...]]:
    """Return `gm` (itself if it calls none) with its elementwise functions as opaque calls, and their table."""
    if not any(node.target is _apply for node in gm.graph.nodes):
        return gm, ()
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    functions: list[CustomFunction] = []
    for node in [n for n in graph.nodes if n.target is _apply]:
        forward, backward = (gm.get_submodule(str(a.target)) for a in node.args[:2])
        values = [a.meta.get("example_value") if isinstance(a, fx.Node) else a for a in node.args[2:]]
        if not _is_elementwise(forward, backward, values):
            continue
        if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
            continue
        is_tensor = tuple(isinstance(v, Tensor) for v in values)
        inputs = [a for a, kept in zip(node.args[2:], is_tensor, strict=True) if kept]
        with graph.inserting_before(node):
            call = graph.call_function(CUSTOM_FUNCTION, (inputs, len(functions)))
        call.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
        functions.append(CustomFunction(forward, backward, is_tensor, dict(node.kwargs)))
        for user in list(node.users):
            user.replace_all_uses_with(call)
            graph.erase_node(user)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(gm, graph), tuple(functions)


def restore_custom_functions(gm: fx.GraphModule, functions: Sequence[CustomFunction]) -> None:
    """Replace the opaque calls in place by the operator that they stand for."""
    calls = [n for n in gm.graph.nodes if n.target is CUSTOM_FUNCTION]
    for node in calls:
        tensors, number = iter(node.args[0]), node.args[1]
        inputs = [next(tensors) if kept else 1 for kept in functions[number].takes_tensor]
        bodies = []
        with gm.graph.inserting_before(node):
            for kind in ("forward", "backward"):
                name = f"custom_function_{number}_{kind}"
                if not hasattr(gm, name):
                    gm.add_submodule(name, getattr(functions[number], kind))
                bodies.append(gm.graph.get_attr(name))
            result = gm.graph.call_function(_apply, (*bodies, *inputs), dict(functions[number].options))
            first = gm.graph.call_function(operator.getitem, (result, 0))
        first.meta = dict(node.meta)
        node.replace_all_uses_with(first)
        gm.graph.erase_node(node)
    if calls:
        gm.graph.lint()
        gm.recompile()


def _is_elementwise(forward: fx.GraphModule, backward: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether both graphs are elementwise on tensors of one shape and dtype, with one output, and read no sizes."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if not tensors or any(x.shape != tensors[0].shape for x in tensors):
        return False
    if not all(isinstance(x, (Tensor, int, torch.SymInt)) for x in inputs) or _reads_sizes(forward, backward):
        return False
    with torch._guards.tracing(None), _disable_current_modes(), FakeTensorMode():
        # any shape serves for elementwise operators; odd sizes make a product of dims show
        likes = [torch.empty((3, 5, 7), dtype=x.dtype, device=x.device) if isinstance(x, Tensor) else 1 for x in inputs]
        try:
            traced = make_fx(forward)(*likes)
            outputs, saved = forward(*likes)
            backs = make_fx(backward)(*outputs, *saved)
            grads = backward(*outputs, *saved)
        except _TRACE_ERRORS:
            return False
    if len(outputs) != 1 or not isinstance(outputs[0], Tensor):
        return False
    values = [x for x in (*outputs, *saved, *grads) if isinstance(x, Tensor)]
    if any(x.shape != (3, 5, 7) or x.dtype != tensors[0].dtype for x in values):
        return False
    if not _is_linear(backs.graph, len(outputs)):
        return False
    nodes = [n for graph in (traced, backs) for n in graph.graph.nodes if n.op not in ("placeholder", "output")]
    return all(n.op == "call_function" and n.target in _ELEMENTWISE for n in nodes)


def _is_linear(graph: fx.Graph, gradients: int) -> bool:
    """Whether every result is linear in the first inputs, so that it may be taken of a sum of gradients."""
    linear = set([n for n in graph.nodes if n.op == "placeholder"][:gradients])
    for node in graph.nodes:
        inputs = [n in linear for n in node.all_input_nodes]
        if node.op != "call_function" or not any(inputs):
            continue
        first, *others = (isinstance(a, fx.Node) and a in linear for a in node.args)
        is_linear = (
            (node.target in _LINEAR and first and not any(others))
            or (node.target in _SUMS and all(inputs) and len(inputs) == 2)
            or (node.target is _aten.mul.Tensor and first != others[0])
        )
        if not is_linear:
            return False
        linear.add(node)
    results = next(n for n in graph.nodes if n.op == "output").args[0]
    return all(r is None or (isinstance(r, fx.Node) and r in linear) for r in results)


def _reads_sizes(*graphs: fx.GraphModule) -> bool:
    """Whether a size that comes in does more than go out again."""
    for gm in graphs:
        for node in gm.graph.nodes:
            is_size = node.op == "placeholder" and not isinstance(node.meta.get("example_value"), Tensor)
            if is_size and any(user.op != "output" for user in node.users):
                return True
    return False
