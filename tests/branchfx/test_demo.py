from __future__ import annotations

import json
import pathlib

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from branchfx.demo.arithmetic import few_shot_header, grade, make_problems
from branchfx.demo.grpo import group_advantages, make_batch, policy_loss, unique_tokens
from branchfx.demo.measure import gradient_difference, peak_memory
from branchfx.demo.model import random_llama
from branchfx.demo.run import DemoSettings, run_demo

CPU = torch.device("cpu")


def test_problems_are_seeded_and_share_the_examples() -> None:
    problems = make_problems(4, seed=1)
    assert problems == make_problems(4, seed=1)
    assert len({p.prompt for p in problems}) == 4
    assert all(p.prompt.startswith(few_shot_header()) for p in problems)


@pytest.mark.parametrize(
    ("response", "reward"),
    [(" We add. 3 + 4 = 7\n", 1.0), ("7", 1.0), (" 7 + 1 = 8", 0.0), ("none", 0.0), ("8\n7", 0.0), ("", 0.0)],
)
def test_grade(response: str, reward: float) -> None:
    assert grade(response, 7) == reward


def test_advantages() -> None:
    assert group_advantages([1.0, 1.0, 1.0]) is None
    advantages = group_advantages([1.0, 0.0, 0.0, 0.0])
    assert advantages is not None
    assert advantages.sum().abs() < 1e-6
    assert advantages[0] > 0


def test_unique_tokens_counts_the_trie() -> None:
    # prompt 3, then [7, 8], [7, 9, 5], [7, 8]: 3 + (7) + (8) + (9, 5)
    batch = make_batch([1, 2, 3], [[7, 8], [7, 9, 5], [7, 8]], torch.ones(3), 0, CPU)
    assert batch.input_ids.shape == (3, 6)
    assert int(batch.attention_mask.sum()) == 16
    assert unique_tokens(batch) == 7


def test_loss_reads_response_tokens_only() -> None:
    model = random_llama(0, layers=1, hidden=64)
    batch = make_batch([1, 2, 3], [[7, 8], [7, 9, 5]], torch.tensor([0.5, -2.0]), 0, CPU)
    log_probs = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.log_softmax(-1).detach()
    expected = 0.0
    for row, response in enumerate([[7, 8], [7, 9, 5]]):
        for i, token in enumerate(response):
            expected -= float(batch.advantages[row] * log_probs[row, 2 + i, token])
    assert policy_loss(model, batch).item() == pytest.approx(expected, rel=1e-5)


def test_gradient_difference_finds_what_differs() -> None:
    expected = {"a": torch.ones(4), "tiny": torch.full((4,), 1e-12)}
    assert gradient_difference(expected, expected).value == 0.0
    assert gradient_difference({**expected, "tiny": torch.zeros(4)}, expected).value < 1e-5
    worst = gradient_difference({**expected, "a": torch.tensor([1.0, 1.0, 1.0, 1.5])}, expected)
    assert (worst.parameter, worst.value) == ("a", pytest.approx(0.25))
    assert gradient_difference({"a": expected["a"]}, expected).value == float("inf")
    assert gradient_difference({**expected, "a": torch.full((4,), float("nan"))}, expected).value == float("inf")


@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the allocator there")
def test_peak_memory_sees_what_was_freed_again() -> None:
    with peak_memory() as peak:
        block = torch.ones(64 << 20, dtype=torch.uint8)
        block.add_(1)
        torch.ones(1 << 24).sum()
        del block
    assert peak.growth_bytes is not None
    assert peak.growth_bytes > 60 << 20


@pytest.mark.usefixtures("fresh_dynamo")
def test_demo_runs_and_writes_its_figures(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demo.json"
    settings = DemoSettings(
        prompts=1, rollouts=2, steps=1, max_new_tokens=3, backend="aot_eager", force_random=True, json_path=path
    )
    assert run_demo(settings) == 0
    figures = json.loads(path.read_text())
    assert [arm["name"] for arm in figures["arms"]] == ["eager", "aot_eager"]
    assert figures["arms"][1]["gradient_difference"] < 1e-4
    assert figures["token_ratio"] > 1.9
    assert "random Llama" in capsys.readouterr().out
