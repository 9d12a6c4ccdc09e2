"""Compares a model compiled by the backend with the same model as it was: outputs, and the gradient of every parameter.

Three runs of one batch and one random loss: the unmodified model, its copy in float64 (really in float64, also
where the model asks for float32), and the compiled model. A tensor is right if it is close to the unmodified
model's, and not much farther from the float64 run than the unmodified model is itself.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import branchfx
from tests.batches import Batch

BACKEND = "branchreplay"
TOLERANCE = 1e-5
OPTIONS: Mapping[str, Any] = {
    "inner": "aot_eager",
    "share": "always",
    "min_shared_tokens": 1,
    "fallback": "error",
}

# a tensor whose true gradient is next to nothing (the bias of a key) is measured against this share of the mean norm
_NEGLIGIBLE = 0.1


class Float64Mode(TorchFunctionMode):
    """Runs in float64 what a model pins to float32: norms, softmax, rotary tables."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func` with float64 wherever it is told float32."""
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        return func(*wide, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


@dataclasses.dataclass(frozen=True)
class Run:
    """One forward and backward.

    Attributes:
        outputs: What the function returned.
        grads: Gradient of every parameter, by name; zeros where there is none.
        missing: Names of the parameters that got no gradient.
    """

    outputs: torch.Tensor
    grads: dict[str, torch.Tensor]
    missing: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one tensor is off, all relative L2.

    Attributes:
        to_model: Ours to the unmodified model's.
        to_float64: Ours to the float64 run's.
        own: The unmodified model's to the float64 run's.
    """

    to_model: float
    to_float64: float
    own: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The differences of one comparison: `outputs`, and the gradient of every parameter.

    Attributes:
        differences: By name.
        tolerance: The bound on `to_model`; None where only the distance to float64 counts.
        floor: A distance to float64 below this one is never wrong.
        missing: Parameters that got a gradient in one run only.
        shared: Whether the backend counted the call as shared.
        tokens: Of the call, as the backend counted them.
        unique_tokens: Likewise.
        ours: What the compiled model gave.
    """

    differences: dict[str, Difference]
    tolerance: float | None
    floor: float
    missing: frozenset[str]
    shared: bool
    tokens: int
    unique_tokens: int
    ours: Run

    @property
    def worst(self) -> tuple[str, Difference]:
        """The tensor that is farthest from the unmodified model's."""
        return max(self.differences.items(), key=lambda item: _nan_is_worst(item[1].to_model))

    def wrong(self) -> dict[str, Difference]:
        """Return the tensors that are not right."""
        return {name: d for name, d in self.differences.items() if not self._is_right(d)}

    def check(self) -> Report:
        """Return itself.

        Raises:
            AssertionError: A tensor is wrong.
        """
        wrong = self.wrong()
        lines = [f"{len(wrong)} of {len(self.differences)} tensors are wrong:"]
        for name, d in list(wrong.items())[:12]:
            lines.append(f"{name}: to model {d.to_model:.2e}, to float64 {d.to_float64:.2e} (own {d.own:.2e})")
        assert not wrong, "\n".join(lines)
        assert not self.missing, f"gradients in one run only: {sorted(self.missing)}"
        return self

    def check_shared(self) -> Report:
        """Return itself.

        Raises:
            AssertionError: The backend ran every token of every row.
        """
        if BACKEND == "branchreplay":
            assert self.shared, f"the call was not shared: {branchfx.stats()}"
            assert self.unique_tokens < self.tokens, f"{self.unique_tokens} of {self.tokens} tokens were run"
        return self

    def _is_right(self, d: Difference) -> bool:
        # written so that NaN is wrong
        close = self.tolerance is None or d.to_model <= self.tolerance
        return close and d.to_float64 <= max(2 * d.own, self.floor)


def compile_for_test(
    function: Callable[..., Any], *, dynamic: bool | None = None, **options: Any
) -> Callable[..., Any]:
    """Compile a model or function with the options of the tests, which share whatever can be shared."""
    if BACKEND != "branchreplay":
        return torch.compile(function, backend=BACKEND, dynamic=dynamic)
    return torch.compile(function, backend=BACKEND, dynamic=dynamic, options={**OPTIONS, **options})


def compare(
    model: nn.Module,
    batch: Batch,
    *,
    backend_options: Mapping[str, Any] | None = None,
    compiled: Callable[..., Any] | None = None,
    **settings: Any,
) -> Report:
    """Compare the compiled model with the model, on the logits at valid positions.

    Args:
        model: Unmodified, in float32 or a narrower type.
        batch: What to run; if it has something to share, the report says that it was shared.
        backend_options: On top of `OPTIONS`.
        compiled: The compiled model, where a caller keeps it over many batches.
        **settings: As for `compare_function`.
    """
    # the truth value of a compiled module is its length, so `or` will not do
    call = compile_for_test(model, **(backend_options or {})) if compiled is None else compiled

    def logits(module: Callable[..., Any]) -> torch.Tensor:
        # padded positions may hold anything finite: nothing of them may reach the loss
        return module(**batch.kwargs).logits[batch.valid]

    report = compare_function(model, logits, ours=lambda: logits(call), **settings)
    return report.check_shared() if batch.shares and settings.get("check", True) else report


def compare_function(
    model: nn.Module,
    function: Callable[..., torch.Tensor],
    *,
    ours: Callable[[], torch.Tensor],
    float64: bool = True,
    check: bool = True,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    seed: int = 0,
) -> Report:
    """Compare a function of a model with its compiled form, under a random linear loss of what it returns.

    Args:
        model: Unmodified.
        function: Called with the model, or with its copy in float64.
        ours: The same with everything compiled; it must use the parameters of `model`.
        float64: Whether to run the copy; without it only the distance to the model counts.
        check: Whether to raise when something is wrong.
        context: Entered around the model's run and ours, but not the float64 run.
        seed: Of the loss.
    """
    parameters = dict(model.named_parameters())
    with context():
        plain = step(lambda: function(model), parameters, seed)
    exact = _step_float64(model, function, seed) if float64 else plain
    before = branchfx.stats()
    with context():
        compiled = step(ours, parameters, seed)
    after = branchfx.stats()
    dtype = plain.outputs.dtype
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    report = Report(
        differences=_differences(compiled, plain, exact),
        tolerance=None if is_narrow and float64 else TOLERANCE,
        floor=(0.5 if is_narrow else 4.0) * torch.finfo(dtype).eps if float64 else TOLERANCE,
        missing=compiled.missing ^ plain.missing,
        shared=after.calls_shared > before.calls_shared,
        tokens=after.last.tokens,
        unique_tokens=after.last.unique_tokens,
        ours=compiled,
    )
    return report.check() if check else report


def step(function: Callable[[], torch.Tensor], parameters: Mapping[str, nn.Parameter], seed: int = 0) -> Run:
    """Run forward and backward under a random linear loss of the outputs, and leave no gradient behind."""
    for p in parameters.values():
        p.grad = None
    outputs = function()
    weight = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(seed))
    (outputs * weight.to(outputs.dtype)).sum().backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
    missing = frozenset(n for n, p in parameters.items() if p.grad is None)
    for p in parameters.values():
        p.grad = None
    return Run(outputs.detach(), grads, missing)


def relative(a: torch.Tensor, b: torch.Tensor, scale: float) -> float:
    """Return the L2 norm of `a - b` over `scale`."""
    return float((a.double() - b.double()).norm()) / scale if a.numel() else 0.0


def _step_float64(model: nn.Module, function: Callable[..., torch.Tensor], seed: int) -> Run:
    """Run a step of a copy of the model in float64."""
    wide = copy.deepcopy(model).double()
    if getattr(getattr(wide, "config", None), "_experts_implementation", None):
        # the grouped product has no float64 kernel; a loop over the experts computes the same
        wide.set_experts_implementation("eager")
    if any(getattr(module, "gradient_checkpointing", False) for module in wide.modules()):
        # a recomputation in the backward is out of the mode's reach
        wide.gradient_checkpointing_disable()
    with Float64Mode():
        return step(lambda: function(wide), dict(wide.named_parameters()), seed)


def _differences(ours: Run, plain: Run, exact: Run) -> dict[str, Difference]:
    norms = {n: float(g.double().norm()) for n, g in exact.grads.items()}
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    least = max(_NEGLIGIBLE * total / max(len(norms), 1) ** 0.5, 1e-30)
    found = {"outputs": _difference(ours.outputs, plain.outputs, exact.outputs, 1e-30)}
    for name in norms:
        found[name] = _difference(ours.grads[name], plain.grads[name], exact.grads[name], least)
    return found


def _difference(ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, least: float) -> Difference:
    scale = max(float(exact.double().norm()), least)
    return Difference(relative(ours, plain, scale), relative(ours, exact, scale), relative(plain, exact, scale))


def _nan_is_worst(x: float) -> float:
    return x if x == x else float("inf")
