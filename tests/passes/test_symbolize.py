"""A static capture becomes polymorphic in B and T, also where their sizes equal constants of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from branchfx.passes.decompose import decompose
from branchfx.passes.fake_inputs import describe_placeholders, lowering_inputs
from branchfx.passes.ir import CapturedGraph, InputRole
from branchfx.passes.layout import TokenLayoutAnalysis
from branchfx.passes.lower import lower_to_aten
from branchfx.passes.pipeline import SharingPlan, plan_sharing
from branchfx.passes.rules import build_rules
from branchfx.passes.symbolize import replace_literals, symbolize, unify_literals

VOCABULARY = 48
TOLERANCE = 1e-6


class Tiny(nn.Module):
    """One attention layer with rotary-like tables, heads by `view`, and a mask of its own."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim, width = heads, head_dim, heads * head_dim
        self.embed = nn.Embedding(VOCABULARY, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, columns = ids.shape
        positions = torch.arange(columns, device=ids.device)
        x = self.embed(ids) + torch.sin(positions[None, :, None] / 10.0)
        q, k, v = (
            part.view(rows, columns, self.heads, self.head_dim).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        visible = (positions[None, :] <= positions[:, None])[None, None].expand(rows, 1, columns, columns)
        if mask is not None:
            visible = visible & mask[:, None, None, :].bool()
        y = nn.functional.scaled_dot_product_attention(q, k, v, visible)
        y = y.transpose(1, 2).reshape(rows, columns, self.heads * self.head_dim)
        return self.out(x + y)


def capture(model: nn.Module, *args: Tensor, dynamic: bool | None = False) -> tuple[fx.GraphModule, Sequence[Any]]:
    seen: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append((gm, inputs))
        return gm.forward

    torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    assert len(seen) == 1
    return seen[0]


def lowered(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, Any]:
    placeholders = describe_placeholders(gm, inputs)
    graph = lower_to_aten(gm, lowering_inputs(placeholders))
    decompose(graph)
    return graph, placeholders


def symbolized(gm: fx.GraphModule, inputs: Sequence[Any]) -> CapturedGraph:
    captured = symbolize(*lowered(gm, inputs))
    assert captured is not None
    return captured


def run(captured: CapturedGraph, model: nn.Module, inputs: Sequence[Any], ids: Tensor, *more: Tensor) -> Tensor:
    """Run the symbolized graph on a batch of another size."""
    batch = iter((ids, *more))
    args: list[Any] = []
    for i, (spec, old) in enumerate(zip(captured.inputs, inputs, strict=True)):
        if spec.role is InputRole.TOKEN:
            args.append(next(batch))
        elif isinstance(old, Tensor):
            # parameters, and floats that Dynamo passes as tensors
            args.append(old)
        else:
            symbol = next(s for s, place in captured.bindings.items() if place == (i, -1))
            args.append(ids.shape[0] if symbol == captured.rows else ids.shape[1])
    with torch.no_grad():
        return captured.gm(*args)[0]


def ids_of(rows: int, columns: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, columns))


# name: rows, columns, heads, head_dim
COINCIDENCES = {
    "nothing_equal": (3, 11, 2, 8),
    "T_is_head_dim": (3, 32, 2, 32),
    "B_is_heads": (4, 11, 4, 8),
    "T_is_heads": (3, 4, 4, 8),
    "B_is_head_dim": (8, 11, 2, 8),
    "T_is_width": (3, 16, 2, 8),
    "T_is_vocabulary": (3, 48, 2, 8),
    "BT_is_width": (2, 8, 2, 8),
    "B_is_T": (6, 6, 2, 8),
    "B_is_T_is_heads_is_head_dim": (4, 4, 4, 4),
    "B_is_chunks": (3, 12, 2, 8),
}
OTHER_SIZES = ((2, 5), (5, 2), (7, 32), (32, 7), (4, 4))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", COINCIDENCES)
def test_static_capture_serves_other_sizes(name: str) -> None:
    rows, columns, heads, head_dim = COINCIDENCES[name]
    model = Tiny(heads, head_dim)
    gm, inputs = capture(model, ids_of(rows, columns))
    captured = symbolized(gm, inputs)
    assert captured.rows != captured.positions
    for size in ((rows, columns), *OTHER_SIZES):
        ids = ids_of(*size)
        torch.testing.assert_close(
            run(captured, model, inputs, ids), model(ids).detach(), rtol=TOLERANCE, atol=TOLERANCE
        )


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["T_is_head_dim", "B_is_heads", "B_is_T"])
def test_mask_joins_the_token_input(name: str) -> None:
    rows, columns, heads, head_dim = COINCIDENCES[name]
    model = Tiny(heads, head_dim)
    gm, inputs = capture(model, ids_of(rows, columns), torch.ones(rows, columns, dtype=torch.int64))
    captured = symbolized(gm, inputs)
    assert [s.role for s in captured.inputs].count(InputRole.TOKEN) == 2
    ids, mask = ids_of(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, 6:] = 0
    torch.testing.assert_close(
        run(captured, model, inputs, ids, mask), model(ids, mask).detach(), rtol=TOLERANCE, atol=TOLERANCE
    )


@pytest.mark.usefixtures("fresh_dynamo")
def test_heads_stay_constant_and_rows_do_not() -> None:
    gm, inputs = capture(Tiny(4, 32), ids_of(4, 32))
    captured = symbolized(gm, inputs)
    rows, columns = captured.rows, captured.positions
    shapes = {
        tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in n.meta["val"].shape)
        for n in captured.gm.graph.nodes
        if isinstance(n.meta.get("val"), Tensor)
    }
    assert (rows, 4, columns, 32) in shapes
    assert (rows, columns, 128) in shapes
    assert all(rows in s or columns in s for s in shapes if len(s) == 4 and set(s) != {1})


@pytest.mark.usefixtures("fresh_dynamo")
def test_dynamic_capture() -> None:
    model = Tiny(2, 8)
    gm, inputs = capture(model, ids_of(3, 11), dynamic=True)
    captured = symbolized(gm, inputs)
    for size in OTHER_SIZES:
        ids = ids_of(*size)
        torch.testing.assert_close(
            run(captured, model, inputs, ids), model(ids).detach(), rtol=TOLERANCE, atol=TOLERANCE
        )


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["nothing_equal", "T_is_head_dim", "B_is_heads"])
def test_unification_agrees_with_the_first_guess(name: str) -> None:
    rows, columns, heads, head_dim = COINCIDENCES[name]
    model = Tiny(heads, head_dim)
    gm, inputs = capture(model, ids_of(rows, columns))
    graph, placeholders = lowered(gm, inputs)
    classes, literals = unify_literals(graph, placeholders)
    replace_literals(graph, placeholders, classes, literals)
    ids = ids_of(2, 5)
    with torch.no_grad():
        out = graph(*[a if isinstance(a, nn.Parameter) else ids for a in inputs])[0]
    torch.testing.assert_close(out, model(ids).detach(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", COINCIDENCES)
def test_output_is_a_token_value(name: str) -> None:
    rows, columns, heads, head_dim = COINCIDENCES[name]
    captured = symbolized(*capture(Tiny(heads, head_dim), ids_of(rows, columns)))
    layouts = TokenLayoutAnalysis(build_rules()).run(captured)
    result = next(n for n in captured.gm.graph.nodes if n.op == "output").args[0][0]
    assert layouts.refusals == {}
    assert layouts.layout(result).is_token


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", COINCIDENCES)
def test_pipeline_plans(name: str) -> None:
    rows, columns, heads, head_dim = COINCIDENCES[name]
    gm, inputs = capture(Tiny(heads, head_dim), ids_of(rows, columns))
    plan = plan_sharing(gm, inputs)
    assert isinstance(plan, SharingPlan), plan


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("size", [(1, 8), (3, 1), (1, 1)])
def test_capture_of_one_row_or_column_is_refused_as_data(size: tuple[int, int]) -> None:
    plan = plan_sharing(*capture(Tiny(2, 8), ids_of(*size)))
    assert not isinstance(plan, SharingPlan)
    assert [d.code for d in plan] == ["BFX102"]


@pytest.mark.usefixtures("fresh_dynamo")
def test_graph_without_token_ids_is_refused_as_data() -> None:
    gm, inputs = capture(nn.Linear(8, 8), torch.randn(3, 8))
    plan = plan_sharing(gm, inputs)
    assert not isinstance(plan, SharingPlan)
    assert [d.code for d in plan] == ["BFX001"]


class Sized(Tiny):
    """Cuts its positions out of a table at a maximum of sizes."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        table = torch.arange(64, device=ids.device).flip(0)
        first = torch.sym_max(0, 64 - ids.shape[1])
        return super().forward(ids) + table[first:][None, :, None] / 64.0


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_maximum_of_sizes_is_settled_and_remembered() -> None:
    gm, inputs = capture(Sized(2, 8), ids_of(3, 10), dynamic=True)
    plan = plan_sharing(gm, inputs)
    assert isinstance(plan, SharingPlan), plan
    (relation,) = plan.captured.assumed
    assert relation.subs(plan.captured.positions, 64) == True  # noqa: E712 - a sympy relation
    assert relation.subs(plan.captured.positions, 65) == False  # noqa: E712


DECOMPOSED = {
    "empty vector": (lambda x, m: torch.cat([x.new_empty(0), x], 1), "cat"),
    "masked write": (lambda x, m: x.index_put((m,), x.new_zeros(())), "index_put"),
    "new zeros": (lambda x, m: x + x.new_zeros(x.shape), "new_zeros"),
}


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decompositions_give_the_same_values(name: str) -> None:
    function, gone = DECOMPOSED[name]
    x, mask = torch.randn(3, 4), torch.rand(3, 4) > 0.5
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(v) for v in (x, mask)]
    gm = lower_to_aten(make_fx(lambda *args: (function(*args),))(x, mask), fakes)
    before = [str(n.target) for n in gm.graph.nodes]
    assert decompose(gm) > 0
    after = [str(n.target) for n in gm.graph.nodes]
    assert any(gone in t for t in before)
    assert not any(gone in t for t in after)
    torch.testing.assert_close(gm(x, mask)[0], function(x, mask))
