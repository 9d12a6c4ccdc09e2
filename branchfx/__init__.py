"""branchfx: the torch.compile backend `branchreplay`, which pays for the unique tokens of a batch of rollouts only.

Importing this package imports neither torch nor triton: public names resolve when they are first used, and
`torch.compile(..., backend="branchreplay")` finds the backend through its entry point without any import.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from branchfx.api import explain
    from branchfx.counters import Stats, reset_stats, stats
    from branchfx.diagnostics import BranchReplayFallbackWarning, Decline
    from branchfx.errors import BranchFxError, CodegenError, DeclinedError, OptionError, VerifyError
    from branchfx.named_batch import rollouts
    from branchfx.options import Options, list_options

    __version__: str

_HOME = {
    "explain": "branchfx.api",
    "stats": "branchfx.counters",
    "reset_stats": "branchfx.counters",
    "Stats": "branchfx.counters",
    "Decline": "branchfx.diagnostics",
    "BranchReplayFallbackWarning": "branchfx.diagnostics",
    "BranchFxError": "branchfx.errors",
    "CodegenError": "branchfx.errors",
    "DeclinedError": "branchfx.errors",
    "OptionError": "branchfx.errors",
    "VerifyError": "branchfx.errors",
    "Options": "branchfx.options",
    "list_options": "branchfx.options",
    "rollouts": "branchfx.named_batch",
}

__all__ = [
    "BranchFxError",
    "BranchReplayFallbackWarning",
    "CodegenError",
    "Decline",
    "DeclinedError",
    "OptionError",
    "Options",
    "Stats",
    "VerifyError",
    "__version__",
    "explain",
    "list_options",
    "reset_stats",
    "rollouts",
    "stats",
]


def __getattr__(name: str) -> Any:
    """Resolve a public name at its first use (PEP 562)."""
    if name == "__version__":
        value: Any = _version()
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, resolved or not."""
    return sorted({*globals(), *__all__})


def _version() -> str:
    try:
        return importlib.metadata.version("branchfx")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
