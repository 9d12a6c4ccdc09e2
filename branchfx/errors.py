"""The exceptions that branchfx raises: a caller's mistake, a bug of ours, or a decline made fatal on request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from branchfx.diagnostics import Decline


class BranchFxError(RuntimeError):
    """The base of every exception of this package."""


class OptionError(BranchFxError, ValueError):
    """An option of the backend has an unknown name or a bad value."""


class VerifyError(BranchFxError):
    """A rewrite broke an invariant, or a shared call disagreed with the unshared graph. A bug: please report it."""


class CodegenError(BranchFxError):
    """A kernel or the inner compiler could not be used for a graph that the passes accepted."""


class DeclinedError(BranchFxError):
    """A graph or a call was declined while `fallback="error"`.

    Attributes:
        decline: What was declined, where and why.
    """

    def __init__(self, message: str, decline: Decline) -> None:
        super().__init__(message)
        self.decline = decline
