"""The documented entries: what a model's graphs share, and why not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from branchfx.codegen.registration import register_kernels
from branchfx.options import Options
from branchfx.passes.cost import NOTHING, TOKENS, contraction_length, node_cost
from branchfx.passes.ir import Layout
from branchfx.passes.pipeline import SharingPlan, plan_sharing
from branchfx.runtime.packed import batch_size, build_tree, fits

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What would be shared in one call.

    Attributes:
        graphs: One entry a captured graph: node counts, attention sites with their rule, declines, and, where it
            is shared, the token tree and the FLOPs of token-local work before and after.
    """

    graphs: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data; `schema` names its version."""
        return {"schema": SCHEMA, "graphs": list(self.graphs)}

    def to_json(self) -> str:
        """Return the explanation as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        lines = [f"{len(self.graphs)} graph(s)"]
        for number, graph in enumerate(self.graphs):
            lines.append(f"graph {number}: {graph['nodes']} nodes, {'shared' if graph['shared'] else 'declined'}")
            lines += [f"  {line}" for decline in graph["declines"] for line in decline["text"].splitlines()]
            lines += [f"  attention {site['node']}: {site['rule']}" for site in graph.get("sites", ())]
            if "tokens" in graph:
                lines.append(
                    f"  {graph['rows']} rows, {graph['tokens']} tokens ({graph['padded_tokens']} padded), "
                    f"{graph['unique_tokens']} unique, token ratio {graph['token_ratio']:.2f}"
                )
                before, after = graph["flops_before"], graph["flops_after"]
                lines.append(f"  token-local FLOPs forward: {before:.3g} -> {after:.3g}")
                lines += [f"  {line}" for line in graph["tree"].splitlines()]
        return "\n".join(lines)


def explain(model_or_function: Callable[..., Any]) -> Callable[..., Explanation]:
    """Return a function that runs one call unshared and says what sharing would do.

    Args:
        model_or_function: What would be compiled; its own compiled state is not touched.

    Returns:
        A function of the call's arguments.
    """

    def run(*args: Any, **kwargs: Any) -> Explanation:
        register_kernels()
        settings = Options.from_user(None)
        graphs: list[dict[str, Any]] = []

        def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            plan = plan_sharing(gm, example_inputs, padding=settings.padding)
            entry: dict[str, Any] = {"nodes": len(gm.graph.nodes), "shared": isinstance(plan, SharingPlan)}
            graphs.append(entry)
            declines = plan.notes if isinstance(plan, SharingPlan) else plan
            entry["declines"] = [{**d.to_dict(), "text": str(d)} for d in declines]
            if not isinstance(plan, SharingPlan):
                return gm.forward
            entry["packed_nodes"] = len(plan.placement.packed)
            entry["sites"] = [{"node": s.node, "rule": s.rule.to_json()} for s in plan.sites.attention.values()]

            def call(*inputs: Any) -> Any:
                if fits(plan, inputs):
                    entry.update(_of_batch(plan, inputs, settings))
                return gm.forward(*inputs)

            return call

        def called(*a: Any, **k: Any) -> Any:
            return model_or_function(*a, **k)

        torch.compile(called, backend=backend)(*args, **kwargs)
        return Explanation(tuple(graphs))

    return run


def _of_batch(plan: SharingPlan, inputs: Any, settings: Options) -> dict[str, Any]:
    shortest = 16 if settings.min_shared_tokens is None else settings.min_shared_tokens
    tree, _ = build_tree(plan, inputs, shortest)
    rows, columns = batch_size(plan, inputs)
    packed, rest = NOTHING, NOTHING
    for node in plan.captured.gm.graph.nodes:
        layout = plan.layouts.layout(node)
        if isinstance(layout, Layout) and node.name in plan.placement.live and layout.is_token:
            cost = node_cost(node, layout, contraction_length(node))
            if node.name in plan.placement.packed:
                packed = packed + cost
            else:
                rest = rest + cost
    positions = rows * columns
    fixed = float(rest.flops.subs(TOKENS, positions))
    return {
        "rows": rows,
        "tokens": tree.valid_tokens,
        "padded_tokens": positions,
        "unique_tokens": tree.tokens,
        "token_ratio": tree.token_ratio,
        "flops_before": fixed + float(packed.flops.subs(TOKENS, positions)),
        "flops_after": fixed + float(packed.flops.subs(TOKENS, tree.tokens)),
        "tree": tree.to_text(),
    }
