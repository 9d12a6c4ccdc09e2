"""The command `branchfx`: demo, explain, doctor, options, codes."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parser().parse_args(arguments)
    status: int = args.run(args)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="branchfx", description="The torch.compile backend `branchreplay`.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_explain(commands)
    doctor = commands.add_parser("doctor", help="versions, compiler, and whether torch finds the backend")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)
    options = commands.add_parser("options", help="the backend's options, their values and defaults")
    options.add_argument("--json", action="store_true", help="print JSON")
    options.set_defaults(run=_options)
    codes = commands.add_parser("codes", help="the diagnostic codes and what to do about each")
    codes.add_argument("code", nargs="?", help="one code only, such as BFX001")
    how = codes.add_mutually_exclusive_group()
    how.add_argument("--markdown", action="store_true", help="print the page docs/codes.md")
    how.add_argument("--json", action="store_true", help="print JSON")
    codes.set_defaults(run=_codes)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="one GRPO step on sampled rollouts, eager against branchreplay")
    demo.add_argument("--baseline", choices=("eager", "inductor", "both"), default="eager", help="timed against this")
    demo.add_argument("--rollouts", type=_positive, default=8, help="rollouts a prompt (default 8)")
    demo.add_argument("--prompts", type=_positive, default=2, help="prompts in the step (default 2)")
    demo.add_argument("--steps", type=_positive, default=3, help="timed steps of each, interleaved (default 3)")
    demo.add_argument("--max-new-tokens", type=_positive, default=24, help="the longest response (default 24)")
    demo.add_argument("--budget", type=float, default=210.0, help="stop timing near this many seconds (default 210)")
    demo.add_argument("--seed", type=int, default=0, help="of questions and sampling (default 0)")
    demo.add_argument("--random-model", action="store_true", help="a small random Llama instead of SmolLM2")
    demo.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write the figures there")
    demo.add_argument("--backend", default="branchreplay", help=argparse.SUPPRESS)
    demo.set_defaults(run=_demo)


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser("explain", help="what would be shared, and why not, for a model and a batch")
    explain.add_argument("--model", help="a folder or name for from_pretrained; without it a small random Llama")
    explain.add_argument("--batch", type=pathlib.Path, help="a torch.save'd dict of the model's keyword arguments")
    explain.add_argument("--rows", type=_positive, default=8, help="rows of the made-up batch (default 8)")
    explain.add_argument("--prompt-tokens", type=_positive, default=64, help="tokens that its rows share (default 64)")
    explain.add_argument("--response-tokens", type=_positive, default=16, help="tokens of each row's own (default 16)")
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.set_defaults(run=_explain)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, is {value}")
    return value


def _demo(args: argparse.Namespace) -> int:
    try:
        from branchfx.demo.run import DemoSettings, run_demo
    except ModuleNotFoundError as error:
        print(f"the demo needs the package {error.name}: pip install 'branchfx[demo]'", file=sys.stderr)
        return 2
    return run_demo(
        DemoSettings(
            baseline=args.baseline,
            rollouts=args.rollouts,
            prompts=args.prompts,
            steps=args.steps,
            max_new_tokens=args.max_new_tokens,
            budget_seconds=args.budget,
            seed=args.seed,
            json_path=args.json,
            backend=args.backend,
            force_random=args.random_model,
        )
    )


def _explain(args: argparse.Namespace) -> int:
    import torch

    from branchfx.api import explain

    try:
        from branchfx.demo.model import random_llama

        model = _pretrained(args.model) if args.model else random_llama(seed=0, layers=2)
    except ModuleNotFoundError as error:
        print(f"explain needs the package {error.name}: pip install 'branchfx[hf]'", file=sys.stderr)
        return 2
    if args.batch:
        batch = torch.load(args.batch, weights_only=True)
    else:
        generator = torch.Generator().manual_seed(0)
        top = int(model.config.vocab_size)
        prompt = torch.randint(1, top, (1, args.prompt_tokens), generator=generator).expand(args.rows, -1)
        response = torch.randint(1, top, (args.rows, args.response_tokens), generator=generator)
        ids = torch.cat([prompt, response], 1)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    report = explain(model)(**batch)
    print(report.to_json() if args.json else report)
    return 0


def _pretrained(name: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).train()


def _doctor(args: argparse.Namespace) -> int:
    from branchfx.doctor import examine, format_findings

    findings = examine()
    print(json.dumps(findings, indent=2) if args.json else format_findings(findings))
    return 1 if findings["problems"] else 0


def _options(args: argparse.Namespace) -> int:
    import dataclasses

    from branchfx.options import list_options

    infos = list_options()
    if args.json:
        print(json.dumps([dataclasses.asdict(info) for info in infos], indent=2))
        return 0
    for info in infos:
        print(f"{info.name}: {info.values}  (default {info.default!r}; environment {info.env_name})")
        print(f"    {info.description}")
    return 0


def _codes(args: argparse.Namespace) -> int:
    import dataclasses

    from branchfx.diagnostics import CODES, format_codes_markdown

    if args.code and args.code.upper() not in CODES:
        print(f"unknown code {args.code}; known: {', '.join(CODES)}", file=sys.stderr)
        return 2
    infos = [CODES[args.code.upper()]] if args.code else list(CODES.values())
    if args.json:
        print(json.dumps([dataclasses.asdict(info) for info in infos], indent=2))
    elif args.markdown:
        print(format_codes_markdown(infos), end="")
    else:
        for info in infos:
            print(f"{info.code}  {info.title} ({info.level})\n    {info.explanation}\n    hint: {info.hint}")
    return 0
