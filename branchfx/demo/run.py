"""The demo, step by step: load, sample, grade, train with each backend, compare."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

import branchfx
from branchfx.demo.arithmetic import grade, make_problems
from branchfx.demo.grpo import GroupBatch, group_advantages, make_batch, unique_tokens
from branchfx.demo.measure import (
    NEGLIGIBLE_SHARE,
    gradient_difference,
    peak_memory,
    take_gradients,
    timed_step,
)
from branchfx.demo.model import DemoModel, load_model
from branchfx.demo.report import ArmResult, BatchSize, format_table, to_json
from branchfx.demo.sampling import sample_rollouts

GRADIENT_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """What the command line asks for.

    Attributes:
        baseline: What branchreplay is timed against; eager is always the reference of the gradients.
        rollouts: G, rollouts a prompt.
        prompts: Prompts, each one forward and backward of the step.
        steps: Interleaved timed steps of each arm.
        max_new_tokens: The longest response.
        budget_seconds: No further timed step starts when it would end after this; each compiled arm gets one.
        seed: Of questions, sampling and the random model.
        json_path: Where the figures are written.
        backend: The backend under test.
        force_random: Use the random model even if the real one is installed.
    """

    baseline: Literal["eager", "inductor", "both"] = "eager"
    rollouts: int = 8
    prompts: int = 2
    steps: int = 3
    max_new_tokens: int = 24
    budget_seconds: float = 210.0
    seed: int = 0
    json_path: pathlib.Path | None = None
    backend: str = "branchreplay"
    force_random: bool = False


def run_demo(settings: DemoSettings) -> int:
    """Run the demo and print its table.

    Returns:
        The exit status: 1 when a gradient differs from eager's by more than `GRADIENT_TOLERANCE`.
    """
    start = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("loading the model ...", flush=True)
    model = load_model(settings.seed, device, settings.force_random)
    print(f"model: {model.description}; {device}, {torch.get_num_threads()} threads", flush=True)
    batches = _sample_batches(model, settings, device)
    size = BatchSize(
        rows=sum(len(b.input_ids) for b in batches),
        tokens=sum(int(b.attention_mask.sum()) for b in batches),
        unique_tokens=sum(unique_tokens(b) for b in batches),
    )
    branchfx.reset_stats()
    arms = _measure(model.module, batches, settings, start + settings.budget_seconds)
    print(f"\n{format_table(size, arms)}\n")
    status = _judge(arms, settings)
    if settings.json_path:
        figures = to_json(size, arms, model=model.description, backend=settings.backend, status=status)
        settings.json_path.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"the demo took {time.perf_counter() - start:.0f} s")
    return status


def _sample_batches(model: DemoModel, settings: DemoSettings, device: torch.device) -> list[GroupBatch]:
    generator = torch.Generator().manual_seed(settings.seed)
    problems = make_problems(settings.prompts, settings.seed)
    batches = []
    with _bar(settings.prompts * settings.max_new_tokens, "sampling", "token") as bar:
        for i, problem in enumerate(problems):
            prompt_ids = model.codec.encode(problem.prompt)
            responses = sample_rollouts(
                model, prompt_ids, settings.rollouts, settings.max_new_tokens, generator, bar.update
            )
            bar.update((i + 1) * settings.max_new_tokens - bar.n)
            rewards = [grade(model.codec.decode(r), problem.answer) for r in responses]
            advantages = group_advantages(rewards)
            note = ""
            if advantages is None:
                advantages = torch.randn(settings.rollouts, generator=generator)
                note = "; all rewards are equal, so random advantages stand in"
            tqdm.write(
                f"prompt {i + 1}: {len(prompt_ids)} tokens, {settings.rollouts} rollouts, "
                f"{sum(rewards):.0f} right{note}; first: {model.codec.decode(responses[0]).strip()!r}",
                file=sys.stdout,
            )
            batches.append(make_batch(prompt_ids, responses, advantages, model.pad_id, device))
    return batches


def _measure(model: Any, batches: list[GroupBatch], settings: DemoSettings, deadline: float) -> list[ArmResult]:
    """Run every arm once for its gradients, then the timed arms in turn."""
    backends = {"eager": None, settings.backend: settings.backend}
    if settings.baseline != "eager":
        backends = {"eager": None, "inductor": "inductor", settings.backend: settings.backend}
    models = {name: _with_backend(model, backend) for name, backend in backends.items()}
    results = {name: ArmResult(name) for name in backends}
    _compare_gradients(models, results, batches)
    if settings.baseline == "inductor":
        del results["eager"]
    timed = dict(results)
    eager = results.get("eager")
    if eager and time.perf_counter() + 2 * eager.first_seconds > deadline:
        # eager compiles nothing, so its first step is as good as a later one
        tqdm.write("little time is left: eager's first step stands for its timed ones", file=sys.stdout)
        eager.seconds.append(eager.first_seconds)
        del timed["eager"]
    with _bar(settings.steps * len(timed), "timed steps, interleaved", "step") as bar:
        for step in range(settings.steps):
            begin = time.perf_counter()
            for name, result in timed.items():
                bar.set_postfix_str(name)
                _timed_run(models[name], batches, result, with_memory=result.peak_bytes is None)
                bar.update()
            if step + 1 < settings.steps and 2 * time.perf_counter() - begin > deadline:
                tqdm.write(f"stopping after {step + 1} of {settings.steps} steps to keep to the time", file=sys.stdout)
                break
    return list(results.values())


def _compare_gradients(models: dict[str, Any], results: dict[str, ArmResult], batches: list[GroupBatch]) -> None:
    """Run the first step of every arm; eager comes first and is the reference."""
    reference: dict[str, Tensor] | None = None
    with _bar(len(models), "first steps, with compilation", "step") as bar:
        for name, result in results.items():
            bar.set_postfix_str(name)
            with peak_memory() as peak:
                result.first_seconds = timed_step(models[name], batches)
            gradients = take_gradients(models[name])
            if reference is None:
                reference, result.peak_bytes = gradients, peak.growth_bytes
            else:
                # what the compiler itself needed is no part of a step, so its memory is measured later
                result.difference = gradient_difference(gradients, reference)
            bar.update()


def _timed_run(model: Any, batches: list[GroupBatch], result: ArmResult, with_memory: bool) -> None:
    if not with_memory:
        result.seconds.append(timed_step(model, batches))
    else:
        with peak_memory() as peak:
            result.seconds.append(timed_step(model, batches))
        result.peak_bytes = peak.growth_bytes
    model.zero_grad(set_to_none=True)


def _with_backend(model: Any, backend: str | None) -> Any:
    """Return a model over the same parameters, so that each arm can be compiled in its own way."""
    shared = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    clone = copy.deepcopy(model, shared)
    if backend is not None:
        clone.compile(backend=backend)
    return clone


def _judge(arms: list[ArmResult], settings: DemoSettings) -> int:
    stats = branchfx.stats()
    if settings.backend == "branchreplay":
        print(f"calls on unique tokens: {stats.calls_shared} of {stats.calls}")
        if stats.calls_shared == 0:
            print("NOTHING WAS SHARED: the warnings above and branchfx.explain(model)(**batch) say why")
    print(
        "gradient difference: the largest |g - g_eager| / |g_eager| over all parameters (L2 norms; a gradient under "
        f"{NEGLIGIBLE_SHARE:g} of the largest one is held against that), at most {GRADIENT_TOLERANCE:g} allowed"
    )
    status = 0
    for arm in arms:
        if arm.difference is None:
            continue
        is_good = arm.difference.value <= GRADIENT_TOLERANCE
        print(f"  {arm.name}: {arm.difference.value:.1e} at {arm.difference.parameter}{'' if is_good else '  DIFFERS'}")
        status |= not is_good
    return int(status)


def _bar(total: int, text: str, unit: str) -> Any:
    return tqdm(total=total, desc=text, unit=unit, file=sys.stderr, dynamic_ncols=True)
