"""`branchfx.explain`: what it says of a shared and of a declined model, and that it leaves no trace."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import branchfx
from tests.batches import group, tree
from tests.models import build

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_shared_model() -> None:
    explanation = branchfx.explain(build("llama"))(**group(4, 40, 8).kwargs)
    (graph,) = explanation.graphs
    assert graph.shared
    assert not graph.declines
    assert len(graph.sites) == 2
    assert all(site.rule == "causal" for site in graph.sites)
    assert graph.packed_nodes > 0
    assert any("tree_attention" in name for name in graph.ops_after)
    assert not any("scaled_dot_product" in name for name in graph.ops_after)
    batch = graph.batch
    assert batch is not None
    assert (batch.rows, batch.columns, batch.tokens, batch.padded_tokens) == (4, 48, 192, 192)
    assert (batch.unique_tokens, batch.segments, batch.depth) == (72, 5, 2)
    assert "40 tokens, 4 rows" in batch.drawing
    text = str(explanation)
    assert text.startswith("1 graph captured, 1 shared")
    assert "token ratio 2.67" in text


def test_predicted_work_is_counted_by_hand() -> None:
    (graph,) = branchfx.explain(build("llama"))(**group(4, 40, 8).kwargs).graphs
    batch = graph.batch
    assert batch is not None
    # q 64x64, k and v 64x32, o 64x64, three of 64x80; then the head of 97
    each = 2 * (2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 80) + 64 * 97)
    row_pairs, packed_pairs = 4 * 48 * 49 // 2, 40 * 41 // 2 + 4 * (8 * 40 + 8 * 9 // 2)
    assert batch.before.attention_flops == 2 * 2 * (64 + 64) * row_pairs
    assert batch.after.attention_flops == 2 * 2 * (64 + 64) * packed_pairs
    assert batch.before.token_flops == pytest.approx(each * 192, rel=0.01)
    assert batch.after.token_flops == pytest.approx(each * 72, rel=0.01)
    assert batch.after.bytes_written < batch.before.bytes_written


def test_a_window_limits_the_pairs_and_is_named() -> None:
    (graph,) = branchfx.explain(build("mistral"))(**group(3, 30, 4).kwargs).graphs
    assert {site.rule for site in graph.sites} == {"causal, window 6"}
    assert graph.batch is not None
    row = sum(min(t + 1, 6) for t in range(34))
    assert graph.batch.before.attention_flops == 2 * 2 * 128 * 3 * row


def test_positions_that_nobody_reads_are_not_counted() -> None:
    model, batch = build("llama"), group(4, 40, 8)
    whole = branchfx.explain(model)(**batch.kwargs).graphs[0].batch
    last = branchfx.explain(model)(**batch.kwargs, logits_to_keep=9).graphs[0].batch
    assert whole is not None
    assert last is not None
    assert last.after.attention_flops < whole.after.attention_flops
    assert last.after.token_flops < whole.after.token_flops


def test_active_dropout_is_declined_with_its_line() -> None:
    explanation = branchfx.explain(build("llama", attention_dropout=0.1))(**group(3, 20, 4).kwargs)
    (graph,) = explanation.graphs
    assert not graph.shared
    assert graph.batch is None
    assert {decline.code for decline in graph.declines} == {"BFX008"}
    decline = graph.declines[0]
    assert decline.stack_trace is not None
    assert "scaled_dot_product_attention" in decline.stack_trace
    assert "set dropout to 0" in str(explanation)


def test_json_round_trip() -> None:
    for model in (build("mistral"), build("llama", attention_dropout=0.1)):
        explanation = branchfx.explain(model)(**tree([(20, [5, 3])]).kwargs)
        data = json.loads(explanation.to_json())
        assert data == explanation.to_dict()
        assert data["schema"] == 1
        assert set(data["graphs"][0]) >= {"shared", "ops_before", "ops_after", "sites", "declines", "notes", "batch"}


def test_runs_in_the_callers_grad_mode() -> None:
    seen = []
    model = build("llama")

    def function(**kwargs: object) -> torch.Tensor:
        logits: torch.Tensor = model(**kwargs).logits
        seen.append(logits.requires_grad)
        return logits

    batch = group(3, 20, 4)
    branchfx.explain(function)(**batch.kwargs)
    with torch.no_grad():
        branchfx.explain(function)(**batch.kwargs)
    assert seen == [True, False]


class _Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = build("llama")

    def inner(self, **kwargs: object) -> torch.Tensor:
        logits: torch.Tensor = self.model(**kwargs).logits
        torch._dynamo.graph_break()
        return logits.sum() + 1

    def forward(self, **kwargs: object) -> torch.Tensor:
        return self.inner(**kwargs) * 2


def test_neither_counts_nor_uses_up_the_callers_recompiles() -> None:
    model, batch = _Broken(), group(3, 20, 4)
    limit = torch._dynamo.config.recompile_limit
    counts = {len(branchfx.explain(model)(**batch.kwargs).graphs) for _ in range(limit + 2)}
    assert len(counts) == 1
    assert counts.pop() > 1
    assert branchfx.stats().calls == 0
    captured = []

    def backend(gm: torch.fx.GraphModule, _inputs: object) -> object:
        captured.append(gm)
        return gm.forward

    torch.compile(model, backend=backend)(**batch.kwargs)
    assert captured


def test_a_model_that_is_compiled_already() -> None:
    model, batch = build("llama"), group(3, 20, 4)
    model.compile(backend="branchreplay", options={"inner": "eager"})
    model(**batch.kwargs)
    before = branchfx.stats()
    assert branchfx.explain(model)(**batch.kwargs).graphs[0].shared
    assert branchfx.stats() == before
    model(**batch.kwargs)
    assert branchfx.stats().compiles == before.compiles
