"""Pass 2: for every value, which dims are rows and positions, and whether it is prefix-causal.

A forward walk over the graph with one rule an operator. A value is called `token` only when its entry at (b, t)
depends on nothing but the token inputs of row b at columns up to t; everything unknown is opaque, with the reason.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping

import torch
from torch import fx

from branchfx.diagnostics import Code, Decline, user_line
from branchfx.passes.ir import BASE, CapturedGraph, Data, Dim, InputRole, Layout, Position, Row, Size
from branchfx.passes.lift import Lifter, enumerated_axis
from branchfx.passes.lifted import Unliftable
from branchfx.passes.rules.registry import Refusal, RuleContext, RuleTable, shape_of

OPAQUE = Layout((), Data.ROW)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLayouts:
    """The result of the analysis.

    Attributes:
        of: Layout of every tensor value, by node name; a tuple for operators with several results.
        refusals: Why a node was the first to be opaque, by node name.
    """

    of: Mapping[str, Layout | tuple[Layout, ...]]
    refusals: Mapping[str, Decline]

    def layout(self, node: fx.Node) -> Layout | None:
        """Return the layout of a single tensor value, or None."""
        found = self.of.get(node.name)
        return found if isinstance(found, Layout) else None


def decline_at(node: fx.Node, code: Code, reason: str) -> Decline:
    """Return a decline that names a node and its source line."""
    return Decline(code=code, node_name=node.name, reason=reason, stack_trace=user_line(node.meta.get("stack_trace")))


class TokenLayoutAnalysis:
    """Computes `TokenLayouts` of a captured graph; edits nothing."""

    def __init__(self, rules: RuleTable) -> None:
        self.rules = rules

    def run(self, graph: CapturedGraph) -> TokenLayouts:
        """Walk the graph once."""
        layouts: dict[str, Layout | tuple[Layout, ...]] = {}
        refusals: dict[str, Decline] = {}
        lifter = Lifter(layouts)

        def enumerates(node: fx.Node) -> Dim | None:
            try:
                return enumerated_axis(lifter, node)
            except Unliftable:
                return None

        ctx = RuleContext(graph.rows, graph.positions, layouts, enumerates)
        roles = {spec.name: spec for spec in graph.inputs}
        for node in graph.gm.graph.nodes:
            if node.op == "placeholder":
                if isinstance(node.meta["val"], torch.Tensor):
                    spec = roles[node.name]
                    layouts[node.name] = self._input(node, spec.role, ctx)
                    if spec.role is InputRole.TOKEN and spec.requires_grad and node.name != graph.named:
                        layouts[node.name] = OPAQUE
                        refusals[node.name] = decline_at(
                            node, Code.FLOAT_INPUT_GRAD, f"the input {node.name} requires a gradient row by row"
                        )
                continue
            if node.op == "get_attr" and isinstance(node.meta.get("val"), torch.Tensor):
                layouts[node.name] = _replicated(node.meta["val"])
                continue
            if node.op != "call_function" or not _is_tensor(node.meta.get("val")):
                continue
            try:
                layouts[node.name] = self._value(node, ctx)
            except Refusal as refusal:
                layouts[node.name] = OPAQUE
                refusals[node.name] = decline_at(node, refusal.code, refusal.reason)
        return TokenLayouts(layouts, refusals)

    def _input(self, node: fx.Node, role: InputRole, ctx: RuleContext) -> Layout:
        shape = shape_of(node.meta["val"])
        if role is InputRole.TOKEN:
            rest: tuple[Dim, ...] = tuple((Size(int(s)),) if s != 1 else () for s in shape[2:])
            return Layout(((Row(),), (Position(BASE),), *rest), Data.TOKEN)
        if any(s.free_symbols for s in shape):
            return OPAQUE
        return Layout(tuple((Size(int(s)),) if s != 1 else () for s in shape))

    def _value(self, node: fx.Node, ctx: RuleContext) -> Layout | tuple[Layout, ...]:
        if node.target is operator.getitem:
            source = ctx.layouts.get(node.args[0].name)  # type: ignore[union-attr]
            return source[node.args[1]] if isinstance(source, tuple) else OPAQUE  # type: ignore[index]
        inputs = [n for n in node.all_input_nodes if n.name in ctx.layouts]
        found = [ctx.layouts[n.name] for n in inputs]
        if any(isinstance(x, Layout) and x.data is Data.ROW for x in found):
            return OPAQUE
        rule = self.rules.get(node.target)
        if rule is None:
            if inputs and all(isinstance(x, Layout) and x.is_replicated for x in found) and _is_fixed(node):
                return _replicated(node.meta["val"])
            raise Refusal(Code.UNKNOWN_OPERATOR, f"no rule says how {node.target} treats rows and positions")
        try:
            layout = rule.layout(node, ctx)
        except (TypeError, IndexError, KeyError, ValueError, AttributeError, AssertionError) as error:
            # an argument form that the rule does not know: a named refusal, never a crash of the user's step
            reason = f"the rule of {node.target} does not know this call ({type(error).__name__}: {error})"
            raise Refusal(Code.UNKNOWN_OPERATOR, reason) from error
        self._check(node, layout, ctx)
        return layout

    def _check(self, node: fx.Node, layout: Layout | tuple[Layout, ...], ctx: RuleContext) -> None:
        """The claimed dims must have the sizes of the value: a rule that miscounts is not believed."""
        value = node.meta["val"]
        pairs = zip(layout, value, strict=True) if isinstance(layout, tuple) else [(layout, value)]
        for claim, tensor in pairs:
            if not isinstance(tensor, torch.Tensor):
                continue
            shape = shape_of(tensor)
            sizes = [ctx.dim_size(dim) for dim in claim.dims]
            if len(sizes) != len(shape) or any((a - b).expand() != 0 for a, b in zip(sizes, shape, strict=True)):
                raise Refusal(Code.SHAPE_NOT_UNIFIED, f"{node.target}: claimed {claim}, but the shape is {list(shape)}")


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in value)
    )


def _is_fixed(node: fx.Node) -> bool:
    """Whether no random numbers are drawn and no size depends on the batch."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    value = node.meta["val"]
    tensors = [v for v in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(v, torch.Tensor)]
    return all(not s.free_symbols for v in tensors for s in shape_of(v))


def _replicated(value: object) -> Layout | tuple[Layout, ...]:
    if isinstance(value, torch.Tensor):
        return Layout(tuple((Size(int(s)),) if s != 1 else () for s in shape_of(value)))
    return tuple(_replicated(v) for v in value)  # type: ignore[attr-defined, misc]
