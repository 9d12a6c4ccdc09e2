"""The documented entries: what a model's graphs share, and why not."""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from branchfx.codegen.registration import register_kernels
from branchfx.named_batch import named_batch
from branchfx.options import Options
from branchfx.passes.pipeline import SharingPlan, plan_sharing
from branchfx.report import GraphReport, report_batch, report_graph
from branchfx.runtime.packed import batch_size, build_tree, fits

SCHEMA = 1
"""Version of `Explanation.to_dict()`; raised when a field changes its meaning or goes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """What would be shared in one call; `str()` gives text.

    Attributes:
        graphs: One report a captured graph, in the order of capture.
    """

    graphs: tuple[GraphReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data; `schema` names its version."""
        return {"schema": SCHEMA, "graphs": [graph.to_dict() for graph in self.graphs]}

    def to_json(self) -> str:
        """Return the explanation as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        shared = sum(graph.shared for graph in self.graphs)
        lines = [f"{len(self.graphs)} graph{'' if len(self.graphs) == 1 else 's'} captured, {shared} shared"]
        lines += [f"graph {number}: {graph.to_text()}" for number, graph in enumerate(self.graphs)]
        return "\n".join(lines)


def explain(model_or_function: Callable[..., Any]) -> Callable[..., Explanation]:
    """Return a function that runs one call unshared and says what sharing would do.

    The call runs in the caller's grad mode, with the caller's own graph. Options come from the environment, as for a
    `torch.compile` without options. Nothing is counted in `branchfx.stats()`.

    Args:
        model_or_function: What would be compiled. A model's own `compile()` is left as it is.

    Returns:
        A function of the call's arguments.
    """

    def run(*args: Any, **kwargs: Any) -> Explanation:
        register_kernels()
        observed = _Observed(Options.from_user(None))
        torch.compile(_fresh(model_or_function), backend=observed.backend, **_isolated())(*args, **kwargs)
        return Explanation(tuple(observed.reports))

    return run


class _Observed:
    """The graphs of one call, in order of capture."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.reports: list[GraphReport] = []

    def backend(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Plan one graph as `branchreplay` does, and run the caller's own."""
        device = next((a.device.type for a in example_inputs if isinstance(a, torch.Tensor)), "cpu")
        named = named_batch()
        plan = plan_sharing(
            gm,
            example_inputs,
            named=None if named is None else (named.input_ids.shape[0], named.input_ids.shape[1]),
            padding=self.options.padding,
            autocast_dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        )
        place = len(self.reports)
        self.reports.append(report_graph(gm, plan))
        if not isinstance(plan, SharingPlan):
            return gm.forward

        def call(*inputs: Any) -> Any:
            if self.reports[place].batch is None:
                self.reports[place] = self._with_batch(self.reports[place], plan, inputs)
            return gm.forward(*inputs)

        return call

    def _with_batch(self, report: GraphReport, plan: SharingPlan, inputs: tuple[Any, ...]) -> GraphReport:
        rows, columns = batch_size(plan, inputs)
        if rows < 1 or columns < 1:
            return dataclasses.replace(report, not_built="the batch is empty")
        named = named_batch()
        if not fits(plan, inputs, named):
            return dataclasses.replace(report, not_built="the inputs do not have the shapes of one batch")
        shortest = 16 if self.options.min_shared_tokens is None else self.options.min_shared_tokens
        tree, _ = build_tree(plan, inputs, shortest, named)
        if not tree.tokens:
            return dataclasses.replace(report, not_built="the batch has no valid token")
        return dataclasses.replace(report, batch=report_batch(plan, tree, inputs))


def _isolated() -> dict[str, Any]:
    """Return what keeps our graphs out of the recompile limit of the caller's code, where this torch can."""
    return {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function around `function` whose code object is its own.

    Dynamo keeps compiled code with the code object, so a shared one would run into its limit of recompiles.
    """

    def explained(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return types.FunctionType(explained.__code__.replace(), globals(), "explained", None, explained.__closure__)
