"""One model of the zoo, in its own process: prints a JSON line `[outcome, detail]`."""

from __future__ import annotations

import copy
import json
import logging
import sys
import warnings
from typing import Any

import torch
import transformers

from benchmarks import measure
from benchmarks.zoo_models import build

_TOLERANCE = 1e-5
_OPTIONS = {"inner": "aot_eager", "share": "always", "min_shared_tokens": 1, "fallback": "silent"}


def examine(name: str, backend: str) -> tuple[str, str]:
    """Return the outcome and its detail."""
    try:
        model = build(name)
    except Exception as error:
        return "not built", _text(error)
    ids = _shared_batch()
    try:
        expected, expected_grads = _step(model, model, ids)
    except Exception as error:
        return "not built", f"the unmodified model fails: {_text(error)}"
    again, again_grads = _step(model, model, ids)
    if measure.relative(again, expected) > 0 or measure.worst(again_grads, expected_grads) > _TOLERANCE:
        return "not built", "the unmodified model gives other numbers each time"
    options: dict[str, Any] = {"options": _OPTIONS} if backend == "branchreplay" else {}
    torch._dynamo.utils.counters.clear()
    try:
        actual, grads = _compiled_step(model, ids, backend, options)
    except Exception as error:
        return "not captured", _text(error)
    distance = max(measure.relative(actual, expected), _worst(grads, expected_grads))
    figure = f"{distance:.1e}"
    if not distance <= _TOLERANCE:
        exact, exact_grads = _float64_step(model, ids)
        own = max(measure.relative(expected.double(), exact), _worst(expected_grads, exact_grads))
        ours = max(measure.relative(actual.double(), exact), _worst(grads, exact_grads))
        figure += f" (from float64: {ours:.1e}, the unmodified model {own:.1e})"
        if not ours <= 2 * own:
            return "WRONG", figure
    graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return _judge(figure, graphs, backend)


def _compiled_step(
    model: Any, ids: torch.Tensor, backend: str, options: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run a step compiled; where AOTAutograd fails on the model's backward, with the graph run as it is."""
    try:
        return _step(model, torch.compile(model, backend=backend, **options), ids)
    except RuntimeError as error:
        if "view size is not compatible" not in str(error) or not options:
            raise
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"options": options["options"] | {"inner": "eager"}}
    return _step(model, torch.compile(model, backend=backend, **options), ids)


def _judge(figure: str, graphs: int, backend: str) -> tuple[str, str]:
    """Return the outcome of a call that ran and is right."""
    if graphs != 1:
        breaks = torch._dynamo.utils.counters["graph_break"]
        return "not captured", f"{graphs} graphs ({figure}): {_line(next(iter(breaks), ''))}"
    if backend != "branchreplay":
        return "shared", f"{figure} ({backend})"
    import branchfx

    stats = branchfx.stats()
    if stats.calls_shared and stats.last.unique_tokens < stats.last.tokens:
        return "shared", figure
    return "declined", "; ".join(_REASONS) or ", ".join(stats.calls_declined) or "no reason"


_REASONS: list[str] = []
"""Codes and reasons of the declines that were reported, in order."""


class _KeepReasons(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        lines = record.getMessage().splitlines()
        if lines[0].startswith("[BFX"):
            _REASONS.append(_line(lines[0]))


def _float64_step(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return what the unmodified model gives in float64."""
    model = copy.deepcopy(model).double()
    return _step(model, model, ids)


def _shared_batch() -> torch.Tensor:
    """Return `[4, 14]`: one prompt of 7, two branches of 3, each with two of 4."""
    generator = torch.Generator().manual_seed(0)
    prompt, middle, leaf = (torch.randint(10, 90, shape, generator=generator) for shape in ((7,), (2, 3), (4, 4)))
    return torch.cat([prompt.expand(4, 7), middle.repeat_interleave(2, 0), leaf], 1)


def _step(model: Any, call: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits and the gradients of a random linear loss."""
    model.zero_grad(set_to_none=True)
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    logits = call(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask == 1]
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    return logits.detach(), measure.gradients(model)


def _worst(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest relative error of a gradient; next to nothing counts against the mean norm."""
    if set(actual) != set(expected):
        return float("inf")
    norms = {name: float(g.norm()) for name, g in expected.items()}
    least = 0.1 * (sum(n * n for n in norms.values()) / max(len(norms), 1)) ** 0.5
    errors = [float((actual[n] - g).norm()) / max(norms[n], least, 1e-30) for n, g in expected.items()]
    return float("nan") if any(e != e for e in errors) else max(errors, default=0.0)


def _text(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return _line(f"{type(error).__name__}: {lines[0] if lines else ''}")


def _line(text: str) -> str:
    return " ".join(str(text).split())[:200]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.getLogger("branchfx").setLevel(logging.INFO)
    logging.getLogger("branchfx").addHandler(_KeepReasons())
    result = examine(sys.argv[1], sys.argv[2])
    sys.stdout.write(f"\n{json.dumps(result)}\n")
