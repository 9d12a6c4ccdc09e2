"""The pipeline, in order: this file is the table of contents of `passes/`.

  0 specialize_floats, inline_checkpoints, custom_functions   a graph without operators that hold graphs
  1 lower, decompose, symbolize, canonicalize   a functional ATen graph, polymorphic in B and T
  2 layout                           which dims are rows and positions; what is prefix-causal
  3 tables, lift, predicate          dense masks and scores as expressions at one (q, k)
  4 mixing                           attention sites, proven causal
  5 placement                        what runs packed: a minimum cut
  6 pack_graph                       the rewrite
  7 demand                           positions that nobody reads (asked by the rewrite)
    verify                           what must hold after each rewrite
    key_graph                        what must be equal for two tokens to share

Any refusal that keeps an attention out of the packed region declines the whole graph, which is then left as it was.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx

from branchfx.diagnostics import Code, Decline
from branchfx.passes.canonicalize import canonicalize
from branchfx.passes.custom_functions import CustomFunction, outline_custom_functions, restore_custom_functions
from branchfx.passes.decompose import decompose
from branchfx.passes.fake_inputs import Placeholder, describe_placeholders, lowering_inputs
from branchfx.passes.inline_checkpoints import inline_checkpoints
from branchfx.passes.ir import CapturedGraph, Data
from branchfx.passes.key_graph import KeyGraph, build_key_graph, common_validity
from branchfx.passes.layout import TokenLayoutAnalysis, TokenLayouts, decline_at
from branchfx.passes.lower import CustomBackwardError, InputMutationError, lower_to_aten
from branchfx.passes.mixing import MixingSiteAnalysis, MixingSites
from branchfx.passes.pack_graph import PackedGraph, PackTokens
from branchfx.passes.placement import Placement, PlacementAnalysis
from branchfx.passes.rules import build_rules
from branchfx.passes.specialize_floats import specialize_floats
from branchfx.passes.symbolize import NotSymbolicError, OneRowError, symbolize
from branchfx.passes.tables import causal_tables
from branchfx.passes.verify import BrokenGraphError, GraphVerifier

logger = logging.getLogger("branchfx.pipeline")

_CONVOLUTIONS = (torch.ops.aten.conv1d.default, torch.ops.aten.conv1d.padding, torch.ops.aten.convolution.default)

Padding = Literal["auto", "skip", "exact"]
_LOWERING_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError, KeyError, IndexError)


@dataclasses.dataclass(frozen=True)
class SharingPlan:
    """Everything the runtime needs to run one graph on unique tokens.

    Attributes:
        captured: The polymorphic graph.
        layouts: Layout of every value.
        sites: The attention sites.
        placement: Where values live.
        packed: The rewritten graph.
        key: How to compute the sharing key.
        skips_padding: Whether padded positions are left out and give zeros.
        notes: Refusals that did not stop the sharing.
        constants: Float inputs, by index, that the graph holds as constants.
    """

    captured: CapturedGraph
    layouts: TokenLayouts
    sites: MixingSites
    placement: Placement
    packed: PackedGraph
    key: KeyGraph
    skips_padding: bool
    notes: tuple[Decline, ...]
    constants: tuple[tuple[int, float], ...]


Observer = Callable[[str, fx.GraphModule], None]


def plan_sharing(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    placeholders: Sequence[Placeholder] | None = None,
    named: tuple[int, int] | None = None,
    padding: Padding = "auto",
    autocast_dtype: torch.dtype | None = None,
    observe: Observer | None = None,
) -> SharingPlan | tuple[Decline, ...]:
    """Run the pipeline on Dynamo's graph.

    Args:
        gm: Dynamo's graph; it is not changed.
        example_inputs: The inputs of the first call, in placeholder order.
        placeholders: What the capture says of them; read from the graph when None, which works only while it is
            being compiled.
        named: Shape [B, T] of the rollouts that the caller names for graphs that see hidden states only.
        padding: Whether padded positions may be left out; `auto` leaves them out when nothing but outputs reads them.
        autocast_dtype: The dtype that ambient autocast gives products, or None.
        observe: Called with (name, graph) before the pipeline and after each rewrite.

    Returns:
        The plan, or why the graph is not shared.
    """
    see = observe or (lambda _name, _gm: None)
    placeholders = placeholders or describe_placeholders(gm, example_inputs)
    if not any(d for p in placeholders for d in p.sizes if p.role.value != "parameter"):
        return (Decline(Code.NO_TOKEN_INPUTS, "", "no input has a batch"),)
    try:
        constant, constants = specialize_floats(gm, example_inputs)
        outlined, functions = outline_custom_functions(inline_checkpoints(constant))
        lowered = lower_to_aten(outlined, lowering_inputs(placeholders))
    except CustomBackwardError as error:
        return (
            decline_at(
                error.args[0], Code.TRACE_FAILED, "a torch.autograd.Function has a backward that ATen does not show"
            ),
        )
    except InputMutationError as error:
        return (Decline(Code.MUTATION, "", f"the graph writes to {error}"),)
    except _LOWERING_ERRORS as error:
        return (Decline(Code.TRACE_FAILED, "", f"{type(error).__name__}: {_first_line(error)}"),)
    try:
        return _plan(lowered, placeholders, example_inputs, functions, constants, named, padding, autocast_dtype, see)
    except BrokenGraphError as error:
        return (Decline(Code.VERIFICATION_FAILED, "", str(error)),)
    except _LOWERING_ERRORS as error:
        # a bug of ours must not end the user's step: the graph runs as it was, and the log has the traceback
        logger.exception("a pass failed")
        return (Decline(Code.VERIFICATION_FAILED, "", f"{type(error).__name__}: {_first_line(error)}"),)


def _plan(
    lowered: fx.GraphModule,
    placeholders: Sequence[Placeholder],
    example_inputs: Sequence[Any],
    functions: tuple[CustomFunction, ...],
    constants: tuple[tuple[int, float], ...],
    named: tuple[int, int] | None,
    padding: Padding,
    autocast_dtype: torch.dtype | None,
    observe: Observer,
) -> SharingPlan | tuple[Decline, ...]:
    """Analyse and rewrite a lowered graph."""
    verifier = GraphVerifier(lowered)

    def see(stage: str, result: fx.GraphModule) -> None:
        verifier.check(stage, result)
        observe(stage, result)

    decompose(lowered)
    see("1_lowered", lowered)
    try:
        captured = symbolize(lowered, placeholders, named)
    except OneRowError as error:
        return (Decline(Code.ONE_ROW, "", str(error)),)
    except NotSymbolicError as error:
        convolution = next((n for n in lowered.graph.nodes if n.target in _CONVOLUTIONS), None)
        if convolution is not None:
            return (decline_at(convolution, Code.RECURRENCE, "a convolution runs over positions"),)
        return (Decline(Code.SHAPE_NOT_UNIFIED, "", str(error)),)
    if captured is None:
        return (Decline(Code.NO_TOKEN_INPUTS, "", "no input of token ids [B, T] reaches an embedding"),)
    captured = dataclasses.replace(captured, tables=causal_tables(captured, example_inputs))
    canonicalize(captured.gm)
    see("2_symbolized", captured.gm)
    rules = build_rules()
    layouts = TokenLayoutAnalysis(rules).run(captured)
    sites = MixingSiteAnalysis().run(captured, layouts)
    placement = PlacementAnalysis(rules).run(captured, layouts, sites)
    declines = _refusals(captured, layouts, sites, placement)
    if declines:
        return declines
    common = common_validity(captured, layouts, sites)
    skips = common is not None and (padding == "skip" or (padding == "auto" and not placement.escapes))
    packed = PackTokens(rules, autocast_dtype, skips).run(captured, layouts, sites, placement)
    restore_custom_functions(packed.gm, functions)
    see("3_packed", packed.gm)
    key = build_key_graph(captured, layouts, sites, placement, skips)
    notes = tuple(d for name, d in layouts.refusals.items() if name in placement.live)
    return SharingPlan(captured, layouts, sites, placement, packed, key, skips, notes, constants)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else ""


def _refusals(
    captured: CapturedGraph, layouts: TokenLayouts, sites: MixingSites, placement: Placement
) -> tuple[Decline, ...]:
    """Every live attention must be packed; else name what stands in its way."""
    stopped = [d for name, d in sites.declines.items() if name in placement.live]
    attention = torch.ops.aten.scaled_dot_product_attention.default
    outside = [
        n
        for n in captured.gm.graph.nodes
        if n.name in placement.live
        and n.name not in placement.packed
        and (n.target is attention or _is_row_softmax(n, layouts))
    ]
    if stopped:
        return tuple(stopped)
    if outside or not sites.attention:
        refused = [d for name, d in layouts.refusals.items() if name in placement.live]
        if refused:
            return tuple(refused)
        if outside:
            return (decline_at(outside[0], Code.ROW_REDUCTION, "the attention reads values that are not token-local"),)
        return (Decline(Code.NO_ATTENTION_SITE, "", "the graph holds no causal attention over positions"),)
    return ()


def _is_row_softmax(node: fx.Node, layouts: TokenLayouts) -> bool:
    if node.target is not torch.ops.aten.softmax.int:
        return False
    layout = layouts.layout(node)
    return layout is not None and layout.data is not Data.ROW and layout.is_pair
