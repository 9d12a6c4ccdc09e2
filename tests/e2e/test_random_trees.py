"""Random batches: whatever the tree, the numbers are those of the unmodified model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests import batches, models
from tests.exactness import compare, compile_for_test

pytestmark = pytest.mark.slow

_SETTINGS = settings(
    max_examples=110,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)

_MASKED = batches.batches(paddings=["right", "left", "mixed"], positions=["absent"])

# each another way to see the past: all of it, a window, learned positions, softcap and alternating windows, ALiBi;
# and only one of them with every way to call a model, since each is a graph of its own to Dynamo
_SUBJECTS = {
    "llama-sdpa": ({"name": "llama"}, batches.batches()),
    "mistral-sdpa": ({"name": "mistral", "sliding_window": 4, "num_key_value_heads": 1}, _MASKED),
    "gpt2-eager": (
        {"name": "gpt2", "attn": "eager"},
        batches.batches(paddings=["right", "left"], positions=["tokens"]),
    ),
    "gemma2-eager": ({"name": "gemma2", "sliding_window": 3, "num_key_value_heads": 4}, _MASKED),
    "bloom-eager": ({"name": "bloom"}, _MASKED),
}


@dataclasses.dataclass(frozen=True, repr=False)
class Subject:
    """A model and its compiled form; without a long text, since hypothesis prints its arguments."""

    model: nn.Module
    compiled: Callable[..., Any]
    batches: st.SearchStrategy[batches.Batch]


@pytest.fixture(params=_SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """A subject that is kept over all examples."""
    torch._dynamo.reset()
    spec, strategy = _SUBJECTS[request.param]
    model = models.build(**spec)
    with torch._dynamo.config.patch(recompile_limit=32, fail_on_recompile_limit_hit=True):
        yield Subject(model, compile_for_test(model, dynamic=True), strategy)


@_SETTINGS
@given(data=st.data())
def test_matches_model(subject: Subject, data: st.DataObject) -> None:
    """Outputs and every gradient agree, and what can be shared is shared."""
    compare(subject.model, data.draw(subject.batches), compiled=subject.compiled, float64=False)
