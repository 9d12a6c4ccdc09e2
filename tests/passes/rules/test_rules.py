"""Every rule's samples, executed: the layout that the rule finds, and whether what it calls `token` really is one.

Soundness by execution: two rows, or two batches, that agree on the first `PREFIX` tokens must agree on every value
that a rule calls `token`, at those positions. This is checked at every node of a sample's graph, not only its result.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from branchfx.passes.fake_inputs import FakeInputs, Placeholder
from branchfx.passes.ir import CapturedGraph, Data, InputRole, InputSpec, Layout, Position, Row, Size, Slots
from branchfx.passes.layout import OPAQUE, TokenLayoutAnalysis, TokenLayouts
from branchfx.passes.rules import all_rules, build_rules
from branchfx.passes.rules.registry import OpRule, Sample, shape_of

_aten = torch.ops.aten

ROWS, COLUMNS, PREFIX = 3, 7, 4
TABLE_ROWS = 64
TOLERANCE = 1e-12  # float64: a product over other rows may be summed in another order
DTYPES = {"": torch.float64, "int": torch.int64, "bool": torch.bool}

# rules without samples, by their first operator, and what tests them instead
WITHOUT_SAMPLES = {
    "branchfx.softmax_with_sink.default": "made by canonicalize; tests/e2e (gpt_oss)",
    "aten.sum.default": "a full reduction: only ever of constants",
    "aten.group_norm.default": "no causal LM of the zoo uses it on tokens",
    "aten.bernoulli.default": "always refused",
    "aten.batch_norm.default": "always refused",
    "aten.baddbmm.default": "taken apart by decompose before the analysis",
    "aten.scaled_dot_product_attention.default": "tests/e2e: the layout is legal only with the site's proof",
    "aten.conv1d.default": "always refused",
    "aten.einsum.default": "below, in EXTRA",
    "aten.sort.default": "tests/e2e (mixtral, qwen3_moe): an order of slots",
    "aten.floor_divide.default": "tests/e2e (mixtral, qwen3_moe): an order of slots",
    "aten.histc.default": "tests/e2e (mixtral, qwen3_moe): an order of slots",
    "aten._grouped_mm.default": "tests/e2e (mixtral, qwen3_moe): an order of slots",
    "aten.empty_like.default": "tests/e2e (mixtral, qwen3_moe): an order of slots",
    "aten.index_put.default": "tests/e2e (mixtral, qwen3_moe): an order of slots",
    "aten.constant_pad_nd.default": "below, in EXTRA",
    "aten.scatter.src": "below, in EXTRA",
    "aten.slice_scatter.default": "below, in EXTRA",
    "aten.select_scatter.default": "below, in EXTRA",
    "aten.index_select.default": "below, in EXTRA",
    "aten.one_hot.default": "below, in EXTRA",
    "aten.tril.default": "below, in EXTRA",
    "aten.diff.default": "tests/e2e: position ids of a call without a mask",
    "aten.linalg_vector_norm.default": "below, in FIXED",
}

X, IDS = "token[B, T, 8]", "token[B, T]:int"

EXTRA = {
    "einsum_projects": Sample(
        lambda x, w: _aten.einsum.default("btc,dc->btd", [x, w]), (X, "none[4, 8]"), "token[B, T, 4]"
    ),
    "einsum_scores": Sample(lambda q, k: _aten.einsum.default("bqc,bkc->bqk", [q, k]), (X, X), "token[B, T, T]"),
    "einsum_sums_positions": Sample(lambda q, k: _aten.einsum.default("btc,btd->bcd", [q, k]), (X, X), "BFX011"),
    "pad_features": Sample(lambda x: _aten.constant_pad_nd.default(x, [0, 2]), (X,), "token[B, T, 10]"),
    "pad_positions": Sample(lambda x: _aten.constant_pad_nd.default(x, [0, 0, 1, -1]), (X,), "BFX011"),
    "scatter": Sample(lambda x, i: x.scatter(-1, i % 8, 1.0), (X, "token[B, T, 2]:int"), X),
    "scatter_positions": Sample(lambda x, i: x.scatter(1, i % 4, 1.0), (X, "token[B, T, 8]:int"), "BFX011"),
    "slice_scatter": Sample(lambda x, y: _aten.slice_scatter.default(x, y, 2, 2, 6), (X, "token[B, T, 4]"), X),
    "select_scatter": Sample(lambda x, y: _aten.select_scatter.default(x, y, 2, 3), (X, "token[B, T]"), X),
    "index_select": Sample(lambda x, i: x.index_select(2, i % 8), (X, "none[3]:int"), "token[B, T, 3]"),
    "one_hot": Sample(lambda x: torch.nn.functional.one_hot(x, 16), (IDS,), "token[B, T, 16]"),
    "tril_table": Sample(lambda x, w: w[: x.shape[1], : x.shape[1]].tril(), (X, "none[64, 64]"), "none[T, T]"),
    "slice_shift": Sample(lambda x: x[:, 1:], (X,), "token[B, T[1:], 8]"),
    "slice_twice": Sample(lambda x: x[:, 1:][:, :-2], (X,), "token[B, T[1:T - 2], 8]"),
    "slice_every_second": Sample(lambda x: x[:, ::2], (X,), "BFX010"),
    "select_position": Sample(lambda x: x[:, -1], (X,), "BFX011"),
    "gather_positions": Sample(lambda x, i: x.gather(1, i % 4), ("token[B, T]", IDS), "BFX011"),
    "gather_shifted_labels": Sample(lambda x, i: x[:, :-1].gather(-1, (i[:, 1:] % 8)[..., None]), (X, IDS), "BFX010"),
    "lookup_by_token": Sample(lambda x, i: x[0, i % 4], (X, IDS), "BFX011"),
    "cumsum_reversed": Sample(lambda x: x.flip(1).cumsum(1).flip(1), ("token[B, T]",), "BFX011"),
    "cumsum_of_tail": Sample(lambda x: x[:, 2:].cumsum(1), ("token[B, T]",), "BFX011"),
    "cumsum_rows": Sample(lambda x: x.cumsum(0), ("token[B, T]",), "BFX011"),
    "mean_all": Sample(lambda x: x.mean(), ("token[B, T]",), "BFX011"),
    "view_splits_rows": Sample(lambda x: x.view(x.shape[1], -1), ("token[B, T]",), "BFX010"),
    "view_merges_features": Sample(lambda x: x.view(x.shape[0], -1), (X,), "token[B, T*8]"),
    "row_numbers": Sample(lambda x: x + torch.arange(x.shape[0])[:, None], (IDS,), "ordinal[B, T]"),
    "enumerated_rows": Sample(lambda x: x[torch.arange(x.shape[0])], (X,), X),
    "roll_of_features": Sample(lambda x: x.roll(1, 2), (X,), X),
    "flip_of_last": Sample(lambda x: x.flip(-1), (X,), X),
    "variance": Sample(lambda x: x.var(-1), (X,), "token[B, T]"),
    "where_by_column": Sample(
        lambda x: torch.where(torch.arange(x.shape[1])[None] > 2, x, 0.0), ("token[B, T]",), "token[B, T]"
    ),
    "pairs_by_expand": Sample(lambda x: x[:, :, None].expand(-1, -1, x.shape[1]), ("token[B, T]",), "token[B, T, T]"),
    "softmax_over_queries": Sample(lambda q, k: (q @ k.transpose(1, 2)).softmax(1), (X, X), "BFX011"),
    "diagonal_of_scores": Sample(lambda q, k: (q @ k.transpose(1, 2)).diagonal(0, 1, 2), (X, X), "BFX012"),
    "outer_product_of_rows": Sample(lambda x: x[:, None] * x[None], ("token[B, T]",), "BFX011"),
    "reversed_lookup": Sample(lambda x: x[:, x.shape[1] - 1 - torch.arange(x.shape[1])], (X,), "BFX010"),
    "table_with_offset": Sample(lambda x, w: x + w[2 : x.shape[1] + 2], (X, "none[64, 8]"), X),
    "numbers_over_the_batch": Sample(
        lambda x: torch.arange(x.shape[0] * x.shape[1]).view(x.shape[0], -1) + x, (IDS,), "ordinal[B, T]"
    ),
    "table_by_row_number": Sample(
        lambda x, w: x + w[torch.arange(x.shape[0])][:, None], (X, "none[64, 8]"), "ordinal[B, T, 8]"
    ),
}

# what a rule gets wrong today: remove the entry with the fix (strict, so a fix shows)
FIXED = {
    "roll_without_dims": Sample(lambda x: x.roll(2), (X,), "BFX010"),
    "table_cut_to_rows": Sample(lambda x, w: x + w[: x.shape[0]][:, None], (X, "none[64, 8]"), "ordinal[B, T, 8]"),
    "triangle_of_rows": Sample(lambda x: x * torch.ones(x.shape).tril(), ("token[B, T]",), "BFX010"),
    "triangle_of_positions": Sample(lambda x: x.tril(), (X,), "BFX010"),
    "scatter_of_shifted": Sample(
        lambda x, y, i: x[:, 1:].scatter(-1, i[:, 1:] % 8, y), (X, X, "token[B, T, 8]:int"), "BFX010"
    ),
    "normalize": Sample(lambda x: torch.nn.functional.normalize(x, dim=-1), (X,), X),
    "norm_of_positions": Sample(lambda x: torch.linalg.vector_norm(x, 2, 1), (X,), "BFX011"),
    "norm_of_head": Sample(
        lambda x: torch.linalg.vector_norm(x.view(*x.shape[:2], 2, 4).transpose(1, 2), 2, -1), (X,), "token[B, 2, T]"
    ),
    "glu": Sample(lambda x: torch.nn.functional.glu(x, -1), (X,), "BFX012"),
    "cummax": Sample(lambda x: x.cummax(1)[0], ("token[B, T]",), "BFX012"),
}
"""What a rule once got wrong."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """One sample as a captured graph, with the layout text of each placeholder."""

    graph: CapturedGraph
    specs: tuple[tuple[str, tuple[int | str, ...], torch.dtype], ...]


def _parse(text: str) -> tuple[str, list[list[str]], torch.dtype]:
    match = re.fullmatch(r"(token|none)\[(.*)\](?::(int|bool))?", text)
    assert match, f"{text} is no layout text that a test can make"
    dims = [part.split("*") for part in match[2].split(", ")] if match[2] else []
    return match[1], dims, DTYPES[match[3] or ""]


def _base_shape(kind: str, dims: list[list[str]]) -> tuple[int | str, ...]:
    """The placeholder that an input is made of: `[B, T, ...]`, a parameter, or a table whose first rows are read."""
    factors = [f for dim in dims for f in dim]
    if kind == "token":
        assert factors[:2] == ["B", "T"], "a token input begins with its rows and positions"
        return ("B", "T", *(int(f) for f in factors[2:]))
    assert "T" not in factors[1:], "a table by position has its positions in front"
    return tuple(TABLE_ROWS if f == "T" else int(f) for f in factors)


def _as_declared(base: torch.Tensor, dims: list[list[str]], anchor: torch.Tensor) -> torch.Tensor:
    sizes: dict[str, Any] = {"B": anchor.shape[0], "T": anchor.shape[1]}
    if dims and dims[0] == ["T"]:
        return base[: anchor.shape[1]]
    if not any(len(dim) > 1 for dim in dims):
        return base
    shape = []
    for dim in dims:
        size: Any = 1
        for f in dim:
            size = size * sizes.get(f, int(f) if f.isdigit() else 1)
        shape.append(size)
    return base.view(shape)


def trace(sample: Sample) -> Traced:
    """Trace a sample over symbolic B and T; the first placeholder is an anchor `[B, T]` of token ids."""
    parsed = [_parse(text) for text in sample.inputs]
    specs = [("token", ("B", "T"), torch.int64)]
    specs += [(kind, _base_shape(kind, dims), dtype) for kind, dims, dtype in parsed]
    real = {"B": 11, "T": 23}
    placeholders = [
        Placeholder(
            f"p{i}",
            InputRole.OTHER if kind == "token" else InputRole.PARAMETER,
            shape,
            tuple(real.get(str(s), s) for s in shape),
            dtype,
            torch.device("cpu"),
        )
        for i, (kind, shape, dtype) in enumerate(specs)
    ]
    inputs = FakeInputs(lambda _key, size: size)
    fakes = inputs.make(placeholders, lambda key: key)

    def run(anchor: torch.Tensor, *bases: torch.Tensor) -> Any:
        out = sample.run(*(_as_declared(b, dims, anchor) for b, (_, dims, _) in zip(bases, parsed, strict=True)))
        return out[0] if isinstance(out, tuple) else out

    gm = make_fx(run, tracing_mode="symbolic", pre_dispatch=True)(*fakes)
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    roles = [InputRole.TOKEN if kind == "token" else InputRole.PARAMETER for kind, _, _ in specs]
    graph = CapturedGraph(
        gm,
        tuple(InputSpec(name, role, False) for name, role in zip(names, roles, strict=True)),
        inputs.symbol["B"],
        inputs.symbol["T"],
        dict(inputs.binding),
    )
    return Traced(graph, tuple(specs))


def analyse(traced: Traced) -> TokenLayouts:
    return TokenLayoutAnalysis(build_rules()).run(traced.graph)


def text_of(layout: Layout, graph: CapturedGraph) -> str:
    return re.sub(rf"\b{graph.positions}\b", "T", str(layout))


def _random(shape: tuple[int | str, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    sizes = [{"B": ROWS, "T": COLUMNS}.get(str(s), s) for s in shape]
    if dtype.is_floating_point:
        return torch.randn(sizes, dtype=dtype, generator=generator)  # type: ignore[arg-type]
    return torch.randint(0, 2 if dtype is torch.bool else 16, sizes, generator=generator).to(dtype)  # type: ignore[arg-type]


def make_batches(traced: Traced) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two batches: rows 0 and 1 agree on the prefix, in both; all else of the tokens differs."""
    generator = torch.Generator().manual_seed(0)
    first = [_random(shape, dtype, generator) for _, shape, dtype in traced.specs]
    second = []
    for value, (kind, shape, dtype) in zip(first, traced.specs, strict=True):
        if kind != "token":
            second.append(value)
            continue
        value[1, :PREFIX] = value[0, :PREFIX]
        other = _random(shape, dtype, generator)
        other[:2, :PREFIX] = value[:2, :PREFIX]
        second.append(other)
    return first, second


class _Values(fx.Interpreter):
    """Runs a graph and keeps every value."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n.name] = super().run_node(n)
        return self.values[n.name]


def run_graph(traced: Traced, batch: list[torch.Tensor]) -> dict[str, Any]:
    interpreter = _Values(traced.graph.gm)
    # a value may be an alias of an input
    interpreter.run(*copy.deepcopy(batch))
    return interpreter.values


def _axes(value: torch.Tensor, layout: Layout, graph: CapturedGraph) -> tuple[torch.Tensor, list[int], list[int]]:
    """Return the value with one axis a factor, cut to the columns of the prefix; its row axes; its position axes."""
    real = {graph.rows: ROWS, graph.positions: COLUMNS}
    sizes, starts = [], {}
    for i, factor in enumerate(layout.factors):
        if isinstance(factor, Row):
            sizes.append(ROWS)
        elif isinstance(factor, Position):
            w = factor.window
            starts[i] = 0 if w.start is None else int(w.start.subs(real))
            sizes.append((COLUMNS if w.stop is None else int(w.stop.subs(real))) - starts[i])
        else:
            assert isinstance(factor, Size)
            sizes.append(factor.value)
    value = value.reshape(sizes)
    for axis, start in starts.items():
        value = value.narrow(axis, 0, max(0, min(PREFIX - start, sizes[axis])))
    return value, [i for i, f in enumerate(layout.factors) if isinstance(f, Row)], list(starts)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def check_soundness(traced: Traced, layouts: TokenLayouts) -> int:
    """Assert what the layouts claim of every node; return how many values were compared."""
    first, second = make_batches(traced)
    one, two = run_graph(traced, first), run_graph(traced, second)
    compared = 0
    for node in traced.graph.gm.graph.nodes:
        layout = layouts.layout(node)
        if layout is None or layout.data is Data.ROW or any(isinstance(f, Slots) for f in layout.factors):
            continue
        a, b = one[node.name], two[node.name]
        real = [
            int(s.subs({traced.graph.rows: ROWS, traced.graph.positions: COLUMNS})) for s in shape_of(node.meta["val"])
        ]
        assert list(a.shape) == real, f"{node.name}: shape {list(a.shape)}, predicted {real}"
        if layout.data is Data.NONE:
            assert _same(a, b), f"{node.name} is called {layout} but depends on tokens"
        if layout.data is Data.TOKEN:
            a, rows, _ = _axes(a, layout, traced.graph)
            b, _, _ = _axes(b, layout, traced.graph)
            assert len(rows) == 1
            for x, y in ((a, b), (b, a)):
                u, v = x.movedim(rows[0], 0), y.movedim(rows[0], 0)
                assert _same(u[0], v[0]), f"{node.name} is called {layout} but reads later tokens or other rows"
                assert _same(u[0], u[1]), f"{node.name} is called {layout} but equal rows differ"
        compared += 1
    return compared


def check_sample(sample: Sample) -> None:
    traced = trace(sample)
    layouts = analyse(traced)
    result = next(n for n in traced.graph.gm.graph.nodes if n.op == "output").args[0]
    if sample.expect.startswith("BFX"):
        assert layouts.layout(result) == OPAQUE, f"not refused: {text_of(layouts.layout(result), traced.graph)}"
        assert [str(d.code) for d in layouts.refusals.values()][:1] == [sample.expect]
        return
    reasons = [f"{d.code} {d.reason}" for d in layouts.refusals.values()]
    assert text_of(layouts.layout(result), traced.graph) == sample.expect, reasons
    assert check_soundness(traced, layouts) > 0


def _name(rule: OpRule) -> str:
    return str(rule.targets[0])


SAMPLES = [
    pytest.param(rule, sample, id=f"{_name(rule)}-{i}") for rule in all_rules() for i, sample in enumerate(rule.samples)
]


@pytest.mark.parametrize(("rule", "sample"), SAMPLES)
def test_sample(rule: OpRule, sample: Sample) -> None:
    check_sample(sample)


@pytest.mark.parametrize(("rule", "sample"), SAMPLES)
def test_sample_uses_its_own_rule(rule: OpRule, sample: Sample) -> None:
    used = {n.target for n in trace(sample).graph.gm.graph.nodes if n.op == "call_function"}
    assert used & set(rule.targets), f"the sample runs {sorted(map(str, used))}"


@pytest.mark.parametrize("name", EXTRA)
def test_extra_sample(name: str) -> None:
    check_sample(EXTRA[name])


@pytest.mark.parametrize("name", FIXED)
def test_fixed(name: str) -> None:
    check_sample(FIXED[name])


def test_rules_without_samples_are_listed() -> None:
    bare = {_name(rule) for rule in all_rules() if not rule.samples}
    assert bare == set(WITHOUT_SAMPLES)
