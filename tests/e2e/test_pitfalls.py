"""The faults that other systems for shared prefixes had, each with the small input that shows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import branchfx
from tests import batches, models
from tests.batches import Batch
from tests.exactness import Report, compare, compare_function, compile_for_test, step

LONG_PROMPT_PROGRAM = """
import resource, torch
from tests import batches, models
from tests.exactness import compile_for_test
torch.set_num_threads(2)
model = models.build("llama", attn="eager", layers=1, max_position_embeddings=1 << 20)
compiled = compile_for_test(model, dynamic=True)
def run(prompt):
    batch = batches.group(2, prompt, 4)
    compiled(**batch.kwargs, logits_to_keep=4).logits.square().mean().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(run(64), run(1024), run(12288))
"""


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Forget the graphs and the counters of other tests."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    branchfx.reset_stats()


def label_logprobs(model: Callable[..., Any], ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the log-probability of each token but the first given those before it, `[B, T - 1]`."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(-1)


def compare_compiled(model: nn.Module, function: Callable[..., Tensor], *args: Any, **options: Any) -> Report:
    """Compare `function(model, *args)` with its compiled form."""
    compiled = compile_for_test(lambda *given: function(model, *given), **options)
    return compare_function(model, lambda module: function(module, *args), ours=lambda: compiled(*args))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_branch_point_predicts_several_tokens(inner: str) -> None:
    """1, 3: the last token of [1, 2, 3] has the targets 7 and 9, with every inner compiler."""
    batch = batches.pad([[1, 2, 3, 7, 8], [1, 2, 3, 9]])

    def function(model: Callable[..., Any], ids: Tensor, mask: Tensor) -> Tensor:
        return label_logprobs(model, ids, mask) * mask[:, 1:]

    report = compare_compiled(models.build("llama"), function, batch.ids, batch.attention_mask, inner=inner)
    report.check_shared()
    first, second = report.ours.outputs[:, 2].tolist()
    assert first != second
    assert first < 0
    assert second < 0


def test_loss_on_first_completion_token_only() -> None:
    """2: the gradient of the prompt's last token comes through the labels after it alone, and is not zero."""
    ids = torch.tensor([[1, 2, 3, 7, 8], [1, 2, 3, 9, 8]])
    report = compare_compiled(models.build("llama"), lambda model, x: label_logprobs(model, x)[:, 2], ids)
    report.check_shared()
    assert all(float(g.norm()) > 0 for g in report.ours.grads.values())


def test_deeper_tree() -> None:
    """4: P -> {A -> R0, R1; B -> R2, R3} with runs of one token."""
    compare(models.build("llama"), batches.tree((1, [(1, [1, 1]), (1, [1, 1])])))


def test_labels_do_not_roll_across_branches() -> None:
    """5: the label of a row's last token is not the next row's first."""
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]])

    def rolled(model: Callable[..., Any], x: Tensor) -> Tensor:
        logprobs = model(input_ids=x, use_cache=False).logits.log_softmax(-1)
        return logprobs.gather(2, torch.roll(x, -1, 1)[..., None]).squeeze(-1)

    report = compare_compiled(models.build("llama"), rolled, ids).check_shared()
    assert report.ours.outputs.shape == (2, 4)


def test_loss_of_transformers() -> None:
    """5: the loss that the model makes from `labels`."""
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]])
    labels = ids.masked_fill(ids == 2, -100)
    compare_compiled(models.build("llama"), lambda m, x, y: m(input_ids=x, labels=y, use_cache=False).loss, ids, labels)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_left_padding_without_positions(name: str) -> None:
    """6, 7: rotary, learned and cumulative positions, and ALiBi, under 30 pads before a prompt."""
    rows = [[*range(1, 41), 50, 51], [*range(1, 41), 52, 53], [3, 4, 5, 6, 7, 8, 9, 10, 60, 61, 62, 63]]
    compare(models.build(name), batches.pad(rows, padding="left"))


@pytest.mark.parametrize("padding", ["right", "left", "none"])
def test_pad_id_inside_the_prompt(padding: batches.Padding) -> None:
    """8: the padding id is an ordinary token where the mask says so."""
    rows = [[1, 0, 0, 2, 7, 8], [1, 0, 0, 2, 9], [0, 0, 5, 6]]
    batch = batches.pad(rows, padding=padding)
    report = compare(models.build("llama", pad_token_id=None), batch)
    assert report.unique_tokens == batch.unique_tokens


def test_response_mask_is_not_validity() -> None:
    """9: tokens outside the loss (a tool's output) still are the past of later tokens."""
    ids = torch.tensor([[1, 2, 3, 10, 11, 12, 13, 14], [1, 2, 3, 10, 11, 20, 21, 14]])
    in_loss = torch.tensor([[1, 1, 0, 0, 1], [1, 1, 0, 0, 1]])

    def function(model: Callable[..., Any], x: Tensor, keep: Tensor) -> Tensor:
        return label_logprobs(model, x)[:, 2:] * keep

    report = compare_compiled(models.build("llama"), function, ids, in_loss).check_shared()
    assert report.ours.outputs[0, 4] != report.ours.outputs[1, 4]


def test_group_split_over_micro_batches() -> None:
    """10: 3 + 1 rows of a group of 4 accumulate the gradient of the whole."""
    model, batch = models.build("llama"), batches.group(4, 6, 3)
    compiled = compile_for_test(model, dynamic=True)
    parameters = dict(model.named_parameters())

    def loss(call: Callable[..., Any], ids: Tensor) -> Tensor:
        return label_logprobs(call, ids).square().sum()

    whole = step(lambda: loss(model, batch.ids), parameters)
    parts = step(lambda: loss(compiled, batch.ids[:3]) + loss(compiled, batch.ids[3:]), parameters)
    for name, grad in whole.grads.items():
        torch.testing.assert_close(parts.grads[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()))


def test_rows_of_prompts_interleaved() -> None:
    """11: rows a, b, a, b share as well as a, a, b, b."""
    rows = [[1, 2, 3, 4], [9, 8, 7, 6], [1, 2, 3, 5], [9, 8, 7, 5]]
    report = compare(models.build("llama"), batches.pad(rows))
    assert (report.tokens, report.unique_tokens) == (16, 10)


def test_sharing_is_counted() -> None:
    """13: the counters say how much was shared, so that an option without effect is noticed."""
    batch = batches.tree([(9, [(3, [4, 2]), 7]), (3, [2, 2])], padding="left")
    report = compare(models.build("llama"), batch)
    assert report.tokens == int(batch.valid.sum())
    assert report.unique_tokens == batch.unique_tokens
    assert branchfx.stats().calls_shared == branchfx.stats().calls == 1


@pytest.mark.slow
def test_memory_is_linear_in_tokens() -> None:
    """16: nothing of size N x N or T x T is held: 12k tokens would need 0.6 GB a head in float32."""
    done = subprocess.run(
        [sys.executable, "-c", LONG_PROMPT_PROGRAM], capture_output=True, text=True, check=True, timeout=300
    )
    _, small, large = map(float, done.stdout.split())
    assert large - small < 250, f"{large - small:.0f} MB more for 12k tokens"


def test_lengths_do_not_recompile() -> None:
    """17, 18, 19: 20 lengths take two graphs, and each gives its own numbers."""
    model = models.build("mistral")
    compiled = compile_for_test(model)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for t in range(5, 25):
            compare(model, batches.group(2 + t % 3, t, 1 + t % 5, seed=t), compiled=compiled, float64=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    compiles = branchfx.stats().compiles
    assert compiles.get("packed", 0) <= 2, compiles
    assert compiles.get("capture_grad", 0) <= 2, compiles


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_length_off_a_block(attn: str) -> None:
    """20: a length that no block size divides."""
    compare(models.build("llama", attn=attn, layers=1), batches.group(2, 1020, 5))


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_first_ratio_is_one(name: str) -> None:
    """29, 30: old log-probabilities without gradients, in eval mode, equal the update's bit for bit."""
    model, batch = models.build(name), batches.group(4, 9, 5)
    compiled = compile_for_test(model)
    model.eval()
    with torch.no_grad():
        old = label_logprobs(compiled, batch.ids, batch.attention_mask)
    model.train()
    new = label_logprobs(compiled, batch.ids, batch.attention_mask)
    assert torch.equal((new.detach() - old).exp(), torch.ones_like(old))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_window_counts_positions(attn: str) -> None:
    """35: a window of 4 over P=3 and two branches of 5 is measured along each row."""
    compare(models.build("mistral", attn=attn, sliding_window=4), batches.group(2, 3, 5))


def test_window_of_each_layer() -> None:
    """35: layers with and without a window keep their own."""
    for kinds in (["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]):
        torch._dynamo.reset()
        compare(models.build("gemma3_text", sliding_window=4, layer_types=kinds), batches.group(2, 3, 9))


def test_softcap_of_large_scores() -> None:
    """36: a cap of 5 under scores that reach it."""
    model = models.build("gemma2", attn_logit_softcapping=5.0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(6.0)
    compare(model, batches.group(3, 7, 4))


class OneSink(nn.Module):
    """Causal attention of one head and one channel, with a sink; token 1 has q = k = 1 and v = 2."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Embedding.from_pretrained(torch.tensor([[0.0], [1.0]]), freeze=False)
        self.key = nn.Embedding.from_pretrained(torch.tensor([[0.0], [1.0]]), freeze=False)
        self.value = nn.Embedding.from_pretrained(torch.tensor([[0.0], [2.0]]), freeze=False)
        self.sink = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the attention's output `[B, T, 1]`."""
        b, t = input_ids.shape
        scores = self.query(input_ids) @ self.key(input_ids).transpose(1, 2)
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        scores = torch.cat([scores.masked_fill(future, float("-inf")), self.sink.expand(b, t, 1)], -1)
        return scores.softmax(-1)[..., :-1] @ self.value(input_ids)


def test_sink_by_hand() -> None:
    """37: with q = k = 1, v = 2 and a sink of 0, dq = dk = 0.39322387 a row."""
    module = OneSink()
    compiled = compile_for_test(module, fallback="silent")
    compiled(torch.ones(2, 1, dtype=torch.long)).sum().backward()
    for table in (module.query, module.key):
        assert table.weight.grad is not None
        assert table.weight.grad[1].item() == pytest.approx(2 * 0.39322387, rel=1e-5)


def test_sink_in_a_tree() -> None:
    """37: sinks that take most of the weight, and their gradient."""
    model = models.build("gpt_oss")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(3.0)
    report = compare(model, batches.tree([(5, [(2, [3, 4]), 2])]))
    assert all(float(g.norm()) > 0 for name, g in report.ours.grads.items() if name.endswith("sinks"))


def test_rows_that_agree_again_are_not_shared() -> None:
    """39: after a token that differs (another split of the same text), equal ids are other tokens."""
    batch = Batch(torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6]]))
    assert compare(models.build("llama"), batch).unique_tokens == 10


def test_turns_that_extend_each_other() -> None:
    """40: each row is the one before it and another turn."""
    turns = [[1, 2, 3, 4], [10, 11, 12], [20, 21, 22, 23, 24]]
    rows = [turns[0], turns[0] + turns[1], turns[0] + turns[1] + turns[2]]
    assert compare(models.build("llama"), batches.pad(rows)).unique_tokens == 12
