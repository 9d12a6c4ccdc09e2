"""Lower a Dynamo graph to functional ATen while autograd is still possible.

`aot_export_module(pre_dispatch=True)` keeps `linear`, `scaled_dot_product_attention`, `layer_norm` and
`embedding` whole, removes in-place ops, and keeps the graph's own grad-mode and autocast switches as nodes.
Legality: it is torch's own functionalization; an input or buffer that the graph mutates is reported, and the
caller declines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_export_module
from torch.fx import traceback as fx_traceback
from torch.utils._python_dispatch import _disable_current_modes


class _Replay(torch.nn.Module):
    """Runs the graph node by node, so that stack traces reach the nodes traced from it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__()
        self.gm = gm

    def forward(self, *args: Any) -> Any:
        return fx.Interpreter(self.gm).run(*args)


class CustomBackwardError(Exception):
    """The graph holds a `torch.autograd.Function`, whose backward the lowering would lose."""


class InputMutationError(Exception):
    """The graph writes to an input; the argument names the inputs."""


def _reject_custom_backward(gm: fx.GraphModule) -> None:
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.target is torch.ops.higher_order.autograd_function_apply:
                raise CustomBackwardError(node)


def lower_to_aten(gm: fx.GraphModule, fake_inputs: list[Any]) -> fx.GraphModule:
    """Return the functional ATen graph of `gm`.

    Args:
        gm: Dynamo's graph; its placeholders are the parameters, buffers, inputs and SymInts in order.
        fake_inputs: One fake value a placeholder; tensors keep `requires_grad`.

    Returns:
        A graph with the same placeholders and a flat tuple of the same outputs.

    Raises:
        CustomBackwardError: The graph holds a function with a backward of its own.
        InputMutationError: The graph writes to an input or a buffer.
    """
    _reject_custom_backward(gm)
    with torch._guards.tracing(None), _disable_current_modes(), fx_traceback.preserve_node_meta():
        lowered, signature = aot_export_module(_Replay(gm), fake_inputs, trace_joint=False, pre_dispatch=True)
    mutated = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate, **signature.parameters_to_mutate}
    if mutated:
        raise InputMutationError(", ".join(sorted(str(v) for v in mutated.values())))
    return lowered
