"""Pass 4 (with pass 3 inside): find where tokens mix, and prove that they mix causally.

Every attention is one `AttentionSite`, however it is spelled: `scaled_dot_product_attention` with a dense mask, a
float mask, `is_causal` or none; or `softmax(score(q k^T)) v` written out, with softcap, sinks, ALiBi or a mask by
`where`. The dense mask is lifted to a predicate (pass 3, `lift.py` and `predicate.py`) and never built.

Before: `sdpa(q, k, v, attn_mask=and(le(...), index(mask)))`
After:  a site with rule `window=None`, key_valid `Ne(attention_mask, 0)`

Legality: the predicate must imply `k <= q` and must read nothing but columns and token values at the query and the
key; the score must be a function of one dot product and such values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from branchfx.attention_rule import AttentionRule
from branchfx.diagnostics import Code, Decline
from branchfx.passes.ir import AttentionSite, CapturedGraph, Data, Layout
from branchfx.passes.layout import TokenLayouts, decline_at
from branchfx.passes.lift import Lifter, index_of
from branchfx.passes.lifted import HEAD, KEY, QUERY, ROW, Unliftable, as_boolean, as_number, is_boolean
from branchfx.passes.predicate import sort_predicate, sort_score

_aten = torch.ops.aten
_SOFTMAX = (_aten.softmax.int, _aten._softmax.default, _aten._safe_softmax.default)
_CASTS = (_aten._to_copy.default, _aten.to.dtype)
_PRODUCTS = (_aten.matmul.default, _aten.bmm.default)
_PASS_THROUGH = (
    _aten._to_copy.default,
    _aten.to.dtype,
    _aten.clone.default,
    _aten.contiguous.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten.dropout.default,
)


@dataclasses.dataclass(frozen=True, slots=True)
class MixingSites:
    """The result of the analysis: sites by the name of the node they replace, and why others are none."""

    attention: Mapping[str, AttentionSite]
    declines: Mapping[str, Decline]


class MixingSiteAnalysis:
    """Finds the attention sites of a graph; edits nothing."""

    def run(self, graph: CapturedGraph, layouts: TokenLayouts) -> MixingSites:
        """Look at every node whose value mixes positions."""
        sites: dict[str, AttentionSite] = {}
        declines: dict[str, Decline] = {}
        trainable = _trainable(graph)
        for node in graph.gm.graph.nodes:
            layout = layouts.layout(node)
            if layout is None or layout.data is Data.ROW:
                continue
            try:
                if node.target is _aten.scaled_dot_product_attention.default:
                    sites[node.name] = _Builder(layouts, trainable, graph.tables).fused(node)
                elif node.target in _PRODUCTS and _is_value_product(node, layouts):
                    sites[node.name] = _Builder(layouts, trainable, graph.tables).spelled_out(node)
            except Unliftable as error:
                declines[node.name] = decline_at(node, Code.UNSUPPORTED_MASK, f"cannot express {error} at one (q, k)")
            except _NotCausal as error:
                declines[node.name] = decline_at(node, Code.NON_CAUSAL_ATTENTION, str(error))
        return MixingSites(sites, declines)


class _NotCausal(Exception):
    """The predicate does not imply `k <= q`."""


def _trainable(graph: CapturedGraph) -> frozenset[str]:
    """Names of nodes whose value depends on an input that requires a gradient."""
    found = {spec.name for spec in graph.inputs if spec.requires_grad}
    for node in graph.gm.graph.nodes:
        if any(n.name in found for n in node.all_input_nodes):
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.dtype.is_floating_point:
                found.add(node.name)
    return frozenset(found)


def _is_value_product(node: fx.Node, layouts: TokenLayouts) -> bool:
    weights = layouts.layout(node.args[0])  # type: ignore[arg-type]
    here = layouts.layout(node)
    return weights is not None and here is not None and weights.is_pair and not here.is_pair


class _Builder:
    """Builds one site."""

    def __init__(self, layouts: TokenLayouts, trainable: frozenset[str], tables: Mapping[str, int]) -> None:
        self.layouts = layouts
        self.trainable = trainable
        self.lifter = Lifter(layouts.of, tables)

    def fused(self, node: fx.Node) -> AttentionSite:
        """Build the site of `scaled_dot_product_attention`."""
        arguments = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
        arguments |= node.kwargs
        q, k, v = (arguments[n] for n in ("query", "key", "value"))
        scale = arguments.get("scale")
        if scale is None:
            scale = float(q.meta["val"].shape[-1]) ** -0.5  # type: ignore[union-attr]
        dot = sympy.Symbol("dot", real=True)
        visible: Any = sympy.true
        score: Any = dot * sympy.Float(scale, 17)
        mask = arguments.get("attn_mask")
        if isinstance(mask, fx.Node):
            layout = self.lifter.layout(mask)
            lifted = self.lifter.lift(mask, self._mask_index(layout))
            if mask.meta["val"].dtype == torch.bool:
                visible = as_boolean(lifted.expr)
            else:
                visible, score = lifted.visible, score + as_number(lifted.expr)
        return self._site(node, q, k, v, score, visible, dot, causal=bool(arguments.get("is_causal", False)))

    def _mask_index(self, layout: Layout) -> Any:
        """The index of a mask `[B | 1, H | 1, T, T]`; a dim of size 1 has no factor."""
        out: list[tuple[Any, ...]] = []
        rank = len(layout.dims)
        for i, dim in enumerate(layout.dims):
            where = i - rank
            names = {-1: KEY, -2: QUERY, -3: HEAD, -4: ROW}
            if len(dim) > 1:
                raise Unliftable("a mask with merged dims")
            out.append((names.get(where, sympy.Symbol(f"h{i}")),) if dim else ())
        return tuple(out)

    def spelled_out(self, node: fx.Node) -> AttentionSite:
        """Build the site of `softmax(score) @ v`."""
        weights: Any = node.args[0]
        sinks: fx.Node | None = None
        while weights.target in _PASS_THROUGH:
            if weights.target in _CASTS:
                self.lifter.narrowest = min(self.lifter.narrowest, weights.meta["val"].dtype.itemsize)
            weights = weights.args[0]
        if weights.target is torch.ops.branchfx.softmax_with_sink.default:
            sinks = self._sinks(weights.args[1])
        elif weights.target not in _SOFTMAX:
            raise Unliftable(f"{weights.name} ({weights.target}) as attention weights")
        scores = weights.args[0]
        while scores.target in _CASTS:
            self.lifter.narrowest = min(self.lifter.narrowest, scores.meta["val"].dtype.itemsize)
            scores = scores.args[0]
        layout = self.lifter.layout(scores)
        lifted = self.lifter.lift(scores, index_of(layout))
        if len(self.lifter.dots) != 1:
            raise Unliftable(f"{scores.name} with {len(self.lifter.dots)} dot products")
        dot, product = next(iter(self.lifter.dots.items()))
        self._one_grad_mode(product, node)
        q, k = product.args[1:3] if product.target is _aten.baddbmm.default else product.args[:2]
        return self._site(
            node, q, k, node.args[1], lifted.expr, lifted.visible, dot, causal=False, sinks=sinks, spelled=True
        )

    def _one_grad_mode(self, first: fx.Node, last: fx.Node) -> None:
        """A switch between the two products would stop gradients in the middle."""
        node = first
        while node is not last:
            if getattr(node.target, "__name__", "") == "_set_grad_enabled":
                raise Unliftable(f"{last.name}, within which the grad mode changes,")
            node = node.next

    def _shapes(self, node: fx.Node, q: fx.Node, k: fx.Node, v: fx.Node, transposed: bool, causal: bool) -> None:
        """The kernel's query heads are the result's, its key heads those of the values; all keys are there."""
        query, key, value, result = (self.lifter.layout(x) for x in (q, k, v, node))
        if transposed:
            key = Layout((*key.dims[:-2], key.dims[-1], key.dims[-2]), key.data)
        heads = [x.heads for x in (query, key, value, result)]
        if heads[0] != heads[3] or heads[1] != heads[2] or heads[0] % heads[1]:
            raise Unliftable(f"{node.name} of {heads[0]} query, {heads[1]} key and {heads[2]} value heads")
        windows = [x.positions[0].window for x in (query, key, value) if len(x.positions) == 1]
        if len(windows) != 3 or windows[1] != windows[2] or windows[1].start is not None:
            raise Unliftable(f"{node.name} over a part of the keys")
        if windows[1].stop is not None and windows[1] != windows[0]:
            raise Unliftable(f"{node.name} over a part of the keys")
        if causal and windows[0].start is not None:
            raise Unliftable(f"{node.name}, causal by index and not by column,")

    def _sinks(self, extra: Any) -> fx.Node:
        """The logit per head that has no value."""
        while extra.target in (
            _aten.expand.default,
            _aten.view.default,
            _aten.unsqueeze.default,
            _aten._to_copy.default,
            _aten.reshape.default,
        ):
            extra = extra.args[0]
        layout = self.lifter.layout(extra)
        if not layout.is_replicated or len(layout.factors) != 1:
            raise Unliftable(f"{extra.name} as attention sinks")
        return extra  # type: ignore[no-any-return]

    def _site(
        self,
        node: fx.Node,
        query: Any,
        key: Any,
        value: Any,
        expr: Any,
        visible: Any,
        dot: sympy.Symbol,
        *,
        causal: bool,
        sinks: fx.Node | None = None,
        spelled: bool = False,
    ) -> AttentionSite:
        self._shapes(node, query, key, value, spelled, causal)
        if self.lifter.narrowest < node.meta["val"].dtype.itemsize:
            raise Unliftable(f"{node.name}, whose scores or weights are rounded to fewer bits than its values,")
        sides = {symbol: side for symbol, (_, side) in self.lifter.atoms.items()}
        seen = sort_predicate(visible, sides, causal)
        known = [part for part in seen.key_valid if self._is_validity(part)]
        others = [part for part in seen.key_valid if part not in known]
        seen = dataclasses.replace(seen, key_valid=tuple(known), rest=sympy.And(seen.rest, *others))
        if not seen.causal:
            text = "every key is visible" if visible == sympy.true else f"visible where {visible}"
            raise _NotCausal(f"a query sees keys after it: {text}")
        score = sort_score(expr, dot)
        for symbol in score.bias.free_symbols | seen.rest.free_symbols:
            if symbol in self.lifter.atoms and self.lifter.atoms[symbol][0].name in self.trainable:
                raise Unliftable(f"{self.lifter.atoms[symbol][0].name}, a bias that is trained,")
        bias, key_bias = self._bias(score.bias)
        used = sorted(
            {s for s in (bias.free_symbols | seen.rest.free_symbols) if s in self.lifter.atoms}, key=lambda s: s.name
        )
        nodes: list[str] = []
        rename: dict[sympy.Symbol, sympy.Symbol] = {}
        for symbol in used:
            atom, side = self.lifter.atoms[symbol]
            if atom.name not in nodes:
                nodes.append(atom.name)
            rename[symbol] = sympy.Symbol(f"a{nodes.index(atom.name)}_{'k' if side == 'c' else side}", real=True)
        self._known(bias, rename)
        self._known(seen.rest, rename)
        rule = AttentionRule(
            window=seen.window,
            chunk=seen.chunk,
            softcap=score.softcap,
            predicate=None if seen.rest == sympy.true else str(seen.rest.xreplace(rename)),
            bias=None if bias == 0 else str(bias.xreplace(rename)),
        )
        absolute = seen.chunk is not None or any(e.has(QUERY) or e.has(KEY) for e in (bias, seen.rest))
        return AttentionSite(
            node=node.name,
            query=query.name,
            key=key.name,
            value=value.name,
            rule=rule,
            scale=score.scale,
            key_valid=tuple(self._validity(part) for part in seen.key_valid),
            key_bias=key_bias,
            sinks=None if sinks is None else sinks.name,
            atoms=tuple(nodes),
            additive=self.lifter.finite_masking,
            reads_columns=absolute,
            transposed_key=spelled,
        )

    def _known(self, expr: Any, rename: Mapping[sympy.Symbol, sympy.Symbol]) -> None:
        unknown = expr.free_symbols - set(rename) - {QUERY, KEY}
        if unknown:
            raise Unliftable(f"{expr}, which reads {', '.join(sorted(map(str, unknown)))},")

    def _bias(self, bias: Any) -> tuple[Any, str | None]:
        """A bias that is one value at the key goes to the kernel as a tensor."""
        bias = sympy.sympify(bias)
        if isinstance(bias, sympy.Symbol) and self.lifter.atoms.get(bias, (None, ""))[1] == "k":
            return sympy.Integer(0), self.lifter.atoms[bias][0].name
        if is_boolean(bias):
            raise Unliftable(f"the bias {bias}")
        return bias, None

    def _is_validity(self, part: Any) -> bool:
        """Whether a conjunct is an atom that must not be zero."""
        return (part.lhs if isinstance(part, sympy.Ne) and part.rhs == 0 else part) in self.lifter.atoms

    def _validity(self, part: Any) -> str:
        return self.lifter.atoms[part.lhs if isinstance(part, sympy.Ne) else part][0].name
