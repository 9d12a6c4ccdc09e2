"""The speed benchmark: `python -m benchmarks.run speed`.

One process, arms interleaved, medians; the peak memory of each arm is taken in a process of its own.
Cases that lose are printed like those that win.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import measure, report
from benchmarks.arms import ARMS, build_model, make_arms
from benchmarks.cases import rollouts
from benchmarks.cases.case import Case
from benchmarks.cases.synthetic import CASES
from benchmarks.flops import padded_work, step_flops, unique_work


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of the benchmark, and return the exit status."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.command == "memory":
        model = build_model(args.layers, args.hidden)
        arms = make_arms(model, _cases(args)[args.cases[0]](), args.arms, _options(args))
        sys.stdout.write(f"{measure.peak_step_bytes(model, arms[args.arms[0]])}\n")
        return 0
    results = [run_case(make(), args) for make in _cases(args).values()]
    settings = {
        **{k: str(v) if isinstance(v, pathlib.Path) else v for k, v in vars(args).items()},
        "torch": torch.__version__,
        "cpu": _cpu(),
    }
    report.write(args.json, report.to_json(results, settings))
    markdown = report.to_markdown(results)
    report.write(args.markdown, markdown)
    sys.stdout.write(markdown)
    return 0


def run_case(case: Case, args: argparse.Namespace) -> report.CaseResult:
    """Run every arm on one case."""
    torch._dynamo.reset()
    model = build_model(args.layers, args.hidden)
    arms = make_arms(model, case, args.arms, _options(args))
    first: dict[str, float] = {}
    errors: dict[str, tuple[float, float]] = {}
    reference: tuple[Any, Any] | None = None
    # a warm cache of compiled graphs would hide what the first call costs
    with torch._inductor.config.patch(force_disable_caches=True):
        for name, arm in arms.items():
            _progress(f"{case.name}: first step of {name}")
            first[name] = measure.seconds_of(lambda arm=arm: measure.train_step(model, arm))  # type: ignore[misc]
            logprobs, grads = measure.train_step(model, arm), measure.gradients(model)
            reference = reference or (logprobs, grads)
            errors[name] = (measure.relative(logprobs, reference[0]), measure.worst(grads, reference[1]))
        _progress(f"{case.name}: {args.repeats} rounds")
        with measure.TreeClock() as clock:
            seconds = measure.interleaved_medians(model, arms, args.repeats)
    padded, unique = padded_work(case), unique_work(case)
    return report.CaseResult(
        name=case.name,
        rows=case.ids.shape[0],
        length=case.ids.shape[1],
        tokens=case.tokens,
        unique_tokens=unique.tokens,
        flop_ratio=step_flops(padded, model.config) / step_flops(unique, model.config),
        useful_flops=step_flops(unique, model.config),
        tree_share=clock.seconds_a_call / seconds["ours"] if "ours" in seconds else None,
        sgemm_rate=measure.sgemm_flops_per_second(),
        arms={
            name: report.ArmResult(seconds[name], first[name], _peak_bytes(case, name, args), *errors[name])
            for name in arms
        },
    )


def _peak_bytes(case: Case, arm: str, args: argparse.Namespace) -> int | None:
    """Return the peak memory of a step in a fresh process."""
    if args.no_memory:
        return None
    _progress(f"{case.name}: memory of {arm}")
    command = [sys.executable, "-m", "benchmarks.run", "memory", "--cases", case.name, "--arms", arm]
    for name in ("threads", "layers", "hidden", "rollouts", "rollout_batches", "max_tokens"):
        if (value := getattr(args, name)) is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    command += [x for option in args.option for x in ("--option", option)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout.split()[-1]) if done.returncode == 0 else None


def _cases(args: argparse.Namespace) -> dict[str, Callable[[], Case]]:
    """Return the cases that were asked for, by name."""
    known: dict[str, Callable[[], Case]] = dict(CASES)
    if args.rollouts:
        for case in rollouts.load(args.rollouts, batches=args.rollout_batches, max_tokens=args.max_tokens):
            known[case.name] = lambda case=case: case  # type: ignore[misc]
    names = args.cases or [name for name in known if name != "tiny"]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"unknown cases {', '.join(unknown)}; known: {', '.join(known)}")
    return {name: known[name] for name in names}


def _options(args: argparse.Namespace) -> dict[str, str]:
    return dict(option.split("=", 1) for option in args.option)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("command", choices=["speed", "memory"], help="memory prints the bytes of one case and arm")
    parser.add_argument("--cases", type=_names, default=[], help=f"of {', '.join(CASES)}, rollouts-0, ...")
    parser.add_argument("--arms", type=_names, default=["eager", "inductor", "prefix_grouper", "hand", "ours"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rollouts", type=pathlib.Path, help="a JSONL file of agent trajectories")
    parser.add_argument("--rollout-batches", type=int, default=1, help="batches of 8 trajectories")
    parser.add_argument("--max-tokens", type=int, default=4096, help="longer trajectories are cut")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--option", action="append", default=[], help="key=value of the backend's options")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    parser.epilog = f"arms: {', '.join(ARMS)}"
    return parser


def _progress(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _cpu() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    raise SystemExit(main())
