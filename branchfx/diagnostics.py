"""Declines: why something was not shared, as data with a code, a place, a reason and a hint.

A pass returns a `Decline`; it never warns or raises. Whoever runs the pipeline hands declines to a
`DeclineReporter`, which logs, warns once a reason or raises, as `options={"fallback": ...}` says.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import threading
import types
import warnings
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from branchfx.errors import DeclinedError

logger = logging.getLogger("branchfx.declines")


class Code(enum.StrEnum):
    """The codes of `CODES`, by name. A code's number is never reused."""

    NO_TOKEN_INPUTS = "BFX001"
    TRACE_FAILED = "BFX002"
    SHAPE_NOT_UNIFIED = "BFX003"
    NO_ATTENTION_SITE = "BFX004"
    MUTATION = "BFX005"
    NON_CAUSAL_ATTENTION = "BFX006"
    UNSUPPORTED_MASK = "BFX007"
    RANDOM_OP = "BFX008"
    BATCH_STATISTICS = "BFX009"
    RECURRENCE = "BFX010"
    ROW_REDUCTION = "BFX011"
    UNKNOWN_OPERATOR = "BFX012"
    FLOAT_INPUT_GRAD = "BFX013"
    VERIFICATION_FAILED = "BFX014"
    CODEGEN_FAILED = "BFX015"
    NOTHING_TO_SHARE = "BFX016"
    SHARING_DOES_NOT_PAY = "BFX101"
    ONE_ROW = "BFX102"
    EMPTY_BATCH = "BFX103"
    MASKED_QUERY = "BFX104"
    SHARING_DISABLED = "BFX105"
    BAD_INPUT = "BFX106"
    NO_COMPILER = "BFX201"


Level = Literal["decline", "warning", "info"]


@dataclasses.dataclass(frozen=True, slots=True)
class CodeInfo:
    """What a code means, for every place it can occur.

    Attributes:
        code: The code.
        title: A few words.
        level: `decline`: warned about, or raised with `fallback="error"`. `warning`: warned about, never raised.
            `info`: ordinary for some batches, so only logged and counted.
        explanation: Why branchreplay does not share here.
        hint: What the user can do.
    """

    code: Code
    title: str
    level: Level
    explanation: str
    hint: str


def _table(*infos: CodeInfo) -> Mapping[str, CodeInfo]:
    return types.MappingProxyType({info.code.value: info for info in infos})


CODES: Mapping[str, CodeInfo] = _table(
    CodeInfo(
        Code.NO_TOKEN_INPUTS,
        "no token inputs",
        "decline",
        "The graph has no integer input of shape [B, T], so shared prefixes cannot be seen from its inputs. This "
        "happens when only a part of the model is compiled, or a graph break comes right after the embedding.",
        "compile the whole model or its decoder, so that the graph sees the token ids; or name them with "
        "`with branchfx.rollouts(input_ids, attention_mask):` around the call",
    ),
    CodeInfo(
        Code.TRACE_FAILED,
        "lowering to ATen failed",
        "decline",
        "The captured graph could not be lowered to functional ATen with symbolic shapes; the reason holds the error.",
        "compile a smaller function without the named operation, or report the error if the model is an ordinary one",
    ),
    CodeInfo(
        Code.SHAPE_NOT_UNIFIED,
        "a shape could not be unified with the batch",
        "decline",
        "A number in the graph equals a batch dimension of this capture, and nothing in the graph tells whether it "
        "follows the batch or is a constant of the model.",
        "pass shapes as tensors' own sizes, or compile with `dynamic=True`",
    ),
    CodeInfo(
        Code.NO_ATTENTION_SITE,
        "no attention site",
        "decline",
        "The graph mixes no tokens by causal attention, so nothing ties its outputs to a prefix.",
        "compile the function that calls the model, not only the head or the loss",
    ),
    CodeInfo(
        Code.MUTATION,
        "an input or a buffer is changed in place",
        "decline",
        "The graph writes to one of its inputs or to a module's buffer; run on unique tokens it would write other "
        "values.",
        "turn the cache off (`use_cache=False`), or keep the update out of the compiled function",
    ),
    CodeInfo(
        Code.NON_CAUSAL_ATTENTION,
        "attention is not causal",
        "decline",
        "A query may see keys after its own position, so a shared token's value depends on its row's continuation. "
        "The reason holds the predicate that was read off the mask.",
        "use a causal attention mask; bidirectional and prefix-LM attention are not shared",
    ),
    CodeInfo(
        Code.UNSUPPORTED_MASK,
        "mask or score is not understood",
        "decline",
        "The mask, bias or score of an attention site could not be read as an expression in the query's and the "
        "key's positions and per-token inputs.",
        'build the mask inside the model from positions, or pass a [B, T] mask; `attn_implementation="sdpa"` is '
        "read best",
    ),
    CodeInfo(
        Code.RANDOM_OP,
        "active dropout or another random operation",
        "decline",
        "Rows that share a token draw different random numbers for it, so its value is not shared.",
        "set dropout to 0 (or call `model.eval()`), or draw the random numbers outside the compiled function",
    ),
    CodeInfo(
        Code.BATCH_STATISTICS,
        "statistics over the batch",
        "decline",
        "The operation normalizes by statistics of the whole batch, in which a shared token counts once a row.",
        "use a per-token norm (layer norm, RMS norm), or freeze the statistics with `model.eval()`",
    ),
    CodeInfo(
        Code.RECURRENCE,
        "recurrence or convolution over time",
        "decline",
        "The layer carries a state from token to token other than keys and values; its carry is not supported yet.",
        "only attention layers are shared for now; such a model runs unshared",
    ),
    CodeInfo(
        Code.ROW_REDUCTION,
        "a whole row is reduced before the last attention",
        "decline",
        "The graph reduces, sorts or scans over a row's tokens and feeds the result to tokens of that row, so a "
        "shared token's value depends on what follows it.",
        "move pooling and row-wide statistics after the model",
    ),
    CodeInfo(
        Code.UNKNOWN_OPERATOR,
        "operator without a rule",
        "decline",
        "No rule says how this operator treats rows and positions, so it is not assumed to be token-local.",
        "write the operation with common ATen operators, or add a rule (see CONTRIBUTING.md, adding a rule)",
    ),
    CodeInfo(
        Code.FLOAT_INPUT_GRAD,
        "a float input needs its gradient",
        "decline",
        "A per-token float input requires grad (such as `inputs_embeds`): equal values in two rows are still two "
        "leaves, and each is owed its own gradient.",
        "pass `input_ids`, or compile a function that computes the embeddings from them",
    ),
    CodeInfo(
        Code.VERIFICATION_FAILED,
        "verification failed",
        "decline",
        "A shared call differed from the unshared graph by more than the tolerance, or a rewrite broke an invariant. "
        "This is a bug; the unshared graph is used from now on.",
        'please report it with the folder that `options={"dump": "DIR"}` writes',
    ),
    CodeInfo(
        Code.CODEGEN_FAILED,
        "code generation failed",
        "decline",
        "The inner compiler or a kernel refused the packed graph; the reason holds the error.",
        'try `options={"inner": "aot_eager"}`, and report the error',
    ),
    CodeInfo(
        Code.NOTHING_TO_SHARE,
        "no placement is legal or useful",
        "decline",
        "Between the token inputs and the first operation that must see whole rows there is no work to share.",
        "compile more of the computation together: the model and the per-token log-probabilities",
    ),
    CodeInfo(
        Code.SHARING_DOES_NOT_PAY,
        "sharing does not pay for this batch",
        "info",
        "The rows share too few tokens to repay packing, so the caller's graph ran as it was.",
        'put rollouts of one prompt into one batch; `options={"share": "always"}` shares whatever is legal',
    ),
    CodeInfo(
        Code.ONE_ROW,
        "one row or column",
        "info",
        "A batch of one row shares nothing and one of one column next to nothing, so the caller's graph ran as it was.",
        "nothing to do",
    ),
    CodeInfo(
        Code.EMPTY_BATCH,
        "empty batch",
        "info",
        "The batch has no rows or no tokens, so the caller's graph ran as it was.",
        "nothing to do",
    ),
    CodeInfo(
        Code.MASKED_QUERY,
        "fully masked query under padding=exact",
        "warning",
        "With an additive mask a query that sees no key attends evenly to all keys of its row, later ones too; that "
        "value is not a prefix's, so the call ran unshared.",
        'use `options={"padding": "skip"}` (outputs at padded positions are rarely read), or pad on the right',
    ),
    CodeInfo(
        Code.SHARING_DISABLED,
        "sharing is switched off",
        "info",
        "BRANCHFX_DISABLE=1, the option `disable` or `share=\"never\"` is set, so graphs ran as they were.",
        "unset it to share",
    ),
    CodeInfo(
        Code.BAD_INPUT,
        "the batch is not one the tree can be built from",
        "info",
        "Token ids, mask and positions do not fit together, so the caller's graph ran as it was and gives its own "
        "error or value.",
        "check shapes, devices and ranges of the batch",
    ),
    CodeInfo(
        Code.NO_COMPILER,
        "no C++ compiler for Inductor",
        "warning",
        "Inductor needs a C++ compiler on CPU and none was found, so `aot_eager` is used in its place: exact, slower.",
        'install g++ or clang++ (or set CXX), or choose `options={"inner": "aot_eager"}`',
    ),
)  # fmt: skip


class BranchReplayFallbackWarning(UserWarning):
    """A graph or a call was not shared; given once a reason."""


class TracedNode(Protocol):
    """What a `Decline` reads of a `torch.fx.Node`."""

    @property
    def name(self) -> str:
        """The node's name in its graph."""

    @property
    def stack_trace(self) -> str | None:
        """The frames of the user's code that made the node, innermost last."""


@dataclasses.dataclass(frozen=True, slots=True)
class Decline:
    """One decision not to share. A result, not an error.

    Attributes:
        code: A key of `CODES`.
        node_name: The node of the graph it is about; None when it is about the graph or the batch.
        reason: What was found, in one sentence.
        hint: What the user can do; when left empty, the code's own hint.
        stack_trace: The user's source line, `file:line in function: text`; None when unknown.

    Raises:
        ValueError: The code is not in `CODES`.
    """

    code: str
    node_name: str | None
    reason: str
    hint: str = ""
    stack_trace: str | None = None

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"unknown diagnostic code {self.code!r}; known: {', '.join(CODES)}")
        object.__setattr__(self, "code", str(self.code))
        if not self.hint:
            object.__setattr__(self, "hint", CODES[self.code].hint)

    @classmethod
    def at(cls, code: str, node: TracedNode, reason: str, hint: str = "") -> Decline:
        """Return a decline about a node, with the user's line that made it."""
        return cls(code, node.name, reason, hint, user_line(node.stack_trace))

    @property
    def info(self) -> CodeInfo:
        """The meaning of the code."""
        return CODES[self.code]

    def to_dict(self) -> dict[str, str | None]:
        """Return the fields and the code's title, ready for JSON."""
        return {**dataclasses.asdict(self), "title": self.info.title}

    def __str__(self) -> str:
        return format_decline(self)


def user_line(stack_trace: str | None) -> str | None:
    """Return the innermost frame of a node's stack trace as `file:line in function: text`.

    Args:
        stack_trace: Frames as Python prints them, innermost last.
    """
    lines = [line.strip() for line in (stack_trace or "").splitlines()]
    frames = [i for i, line in enumerate(lines) if line.startswith('File "')]
    if not frames:
        return None
    head, *rest = lines[frames[-1] :]
    path, _, place = head.removeprefix('File "').partition('", line ')
    number, _, function = place.partition(", in ")
    text = next((line for line in rest if line and not set(line) <= set("~^")), "")
    where = f"{path}:{number}" + (f" in {function}" if function else "")
    return f"{where}: {text}" if text else where


def format_decline(decline: Decline) -> str:
    """Return a decline as text of two to four lines: code and title, place, reason, hint."""
    lines = [f"[{decline.code}] {decline.info.title}: {decline.reason}"]
    if decline.node_name:
        lines.append(f"  at node {decline.node_name}")
    if decline.stack_trace:
        lines.append(f"  from {decline.stack_trace}")
    lines.append(f"  hint: {decline.hint}")
    return "\n".join(lines)


def format_codes_markdown(infos: Iterable[CodeInfo] = tuple(CODES.values())) -> str:
    """Return the table of codes as the page `docs/codes.md`."""
    what = {
        "decline": 'warned about once, or raised with `fallback="error"`',
        "warning": "warned about once, never raised",
        "info": "logged on `branchfx.declines` and counted in `branchfx.stats()`",
    }
    parts = [
        "# Diagnostic codes\n\n"
        "Why a graph or a call was not shared; the result is the unmodified model's in every case.\n"
        "Written by `branchfx codes --markdown`.\n"
    ]
    for info in infos:
        parts.append(
            f"## {info.code}: {info.title}\n\n{info.explanation}\n\n"
            f"- What to do: {info.hint}.\n- How it is told: {what[info.level]}.\n"
        )
    return "\n".join(parts)


class DeclineReporter:
    """Tells the user about declines: logs each, then warns once a reason, raises or stays silent.

    Owned by whoever compiles (one a backend call), so it holds no state shared between models.

    Args:
        fallback: `warn`, `error` or `silent`, as in the options.
    """

    def __init__(self, fallback: Literal["warn", "error", "silent"] = "warn") -> None:
        self._fallback = fallback
        self._seen: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def report(self, decline: Decline) -> None:
        """Tell the user about one decline.

        Raises:
            DeclinedError: `fallback="error"` and the code's level is `decline`.
        """
        text = format_decline(decline)
        is_new = self._is_new(decline)
        logger.log(logging.INFO if is_new else logging.DEBUG, "%s", text)
        if decline.info.level == "info" or self._fallback == "silent":
            return
        if self._fallback == "error" and decline.info.level == "decline":
            raise DeclinedError(f'branchreplay declined to share, and fallback="error" is set.\n{text}', decline)
        if is_new:
            warnings.warn(f"{_consequence(decline)}\n{text}", BranchReplayFallbackWarning, stacklevel=3)

    def _is_new(self, decline: Decline) -> bool:
        key = (decline.code, decline.reason)
        with self._lock:
            if key in self._seen:
                return False
            self._seen.add(key)
            return True


def _consequence(decline: Decline) -> str:
    if decline.code == Code.NO_COMPILER:
        return "branchreplay runs without its usual inner compiler."
    return "branchreplay runs this without sharing; results are those of the unmodified model."
