"""The demo's task: a few-shot arithmetic prompt, seeded questions, and a grader."""

from __future__ import annotations

import dataclasses
import random
import re

_HEADER = (
    "Answer each question about numbers. First say in one short sentence what has to be computed, then write the "
    "computation, and finish with the result. Do not write anything after the result.\n\n"
)
_EXAMPLES = (
    ("A baker made 34 rolls in the morning and 58 rolls in the evening.", "rolls", 34, 58),
    ("A library had 27 visitors before noon and 45 visitors after noon.", "visitors", 27, 45),
    ("A farm has 63 brown hens and 19 white hens in two houses.", "hens", 63, 19),
    ("A bus carried 41 people on the first trip and 36 people on the second.", "people", 41, 36),
    ("A gardener planted 52 tulips by the gate and 29 tulips by the wall.", "tulips", 52, 29),
    ("A museum sold 18 tickets on Monday and 77 tickets on Tuesday.", "tickets", 18, 77),
    ("A sailor counted 25 gulls in the harbour and 38 gulls on the beach.", "gulls", 25, 38),
)
_QUESTION = "A shop sold {a} pears last week and {b} pears this week."


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One prompt and the number that a right response ends with."""

    prompt: str
    answer: int


def make_problems(count: int, seed: int) -> list[Problem]:
    """Return seeded problems whose prompts differ in two numbers only, so they share the few-shot examples."""
    rng = random.Random(seed)
    problems = []
    for _ in range(count):
        a, b = rng.randint(11, 49), rng.randint(11, 49)
        question = _question(_QUESTION.format(a=a, b=b), "pears")
        problems.append(Problem(f"{few_shot_header()}{question}Answer:", a + b))
    return problems


def few_shot_header() -> str:
    """Return what every prompt begins with: the instruction and the solved examples."""
    solved = (f"{_question(t, w)}Answer: We add the {w}. {a} + {b} = {a + b}\n\n" for t, w, a, b in _EXAMPLES)
    return _HEADER + "".join(solved)


def grade(response: str, answer: int) -> float:
    """Return 1.0 when the last number of the response's first line is the answer, else 0.0."""
    numbers = re.findall(r"\d+", response.strip().partition("\n")[0])
    return 1.0 if numbers and int(numbers[-1]) == answer else 0.0


def _question(text: str, what: str) -> str:
    return f"Question: {text} How many {what} are there in total?\n"
