"""Every causal language model that transformers ships, tiny: shared, declined, or wrong. `python -m benchmarks.zoo`.

Each model runs in a process of its own: a batch of rows that share a prompt, unmodified and compiled. A row of the
table is one of

- shared: the call was shared, and outputs and gradients are those of the unmodified model;
- declined: it ran unshared, with the code and the reason;
- WRONG: it differs from the unmodified model;
- not captured: torch.compile cannot trace the model, or not as one graph, so there is nothing to share;
- not built: no tiny model could be made, or it does not run unmodified.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.zoo_models import NOT_ATTENTION_ONLY

TARGET = 0.9
OUTCOMES = ("shared", "declined", "WRONG", "not captured", "not built")


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one class of models gave.

    Attributes:
        name: The model type.
        architecture: The class.
        outcome: One of `OUTCOMES`.
        detail: The error, the reason, or why not.
        attention_only: Whether only attention mixes tokens, and only backwards.
    """

    name: str
    architecture: str
    outcome: str
    detail: str
    attention_only: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run the zoo; the status is 1 if a model is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.add_argument("--markdown", type=pathlib.Path, help="where the table goes")
    parser.add_argument("--json", type=pathlib.Path, help="where the entries go")
    parser.add_argument("--only", action="append", default=[], help="a model type; may be repeated")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=120, help="seconds a model")
    parser.add_argument("--backend", default="branchreplay", help="another one serves to test the zoo")
    args = parser.parse_args(argv)
    unknown = set(args.only) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if unknown:
        parser.error(f"unknown model types: {', '.join(sorted(unknown))}")
    entries = run(args.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), args.jobs, args.timeout, args.backend)
    table = to_markdown(entries)
    sys.stdout.write(table)
    if args.markdown:
        args.markdown.write_text(table)
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(e) for e in entries], indent=2) + "\n")
    return int(any(e.outcome == "WRONG" for e in entries))


def run(names: Sequence[str], jobs: int, timeout: int, backend: str) -> list[Entry]:
    """Return the entries of the model types, in order; a class that serves several types runs once."""
    by_class: dict[str, str] = {}
    for name in names:
        by_class.setdefault(str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]), name)
    entries = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for entry in pool.map(lambda name: run_one(name, timeout, backend), by_class.values()):
            entries.append(entry)
            sys.stderr.write(f"[{len(entries)}/{len(by_class)}] {entry.name}: {entry.outcome} {entry.detail[:100]}\n")
    return entries


def run_one(name: str, timeout: int, backend: str) -> Entry:
    """Run one model type in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.zoo_worker", name, backend]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
        outcome, detail = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        outcome, detail = "not captured", f"took more than {timeout} s"
    except (IndexError, ValueError):
        outcome, detail = "not built", (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    architecture = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    return Entry(name, architecture, outcome, detail, name not in NOT_ATTENTION_ONLY)


def to_markdown(entries: Sequence[Entry]) -> str:
    """Return the totals and the table."""
    counts = collections.Counter(e.outcome for e in entries)
    built = [e for e in entries if e.outcome != "not built" and e.attention_only]
    shared = sum(e.outcome == "shared" for e in built)
    share = shared / len(built) if built else 0.0
    lines = [
        f"{len(entries)} classes: " + ", ".join(f"{counts[o]} {o}" for o in OUTCOMES) + ".",
        f"Of {len(built)} attention-only ones that build, {shared} are shared ({share:.0%}; the aim is {TARGET:.0%}).",
        "",
        "| model type | class | outcome | detail | other mixing |",
        "|---|---|---|---|---|",
    ]
    for e in sorted(entries, key=lambda e: (OUTCOMES.index(e.outcome), e.name)):
        detail = e.detail.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {e.name} | {e.architecture} | {e.outcome} | {detail} | {NOT_ATTENTION_ONLY.get(e.name, '')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
