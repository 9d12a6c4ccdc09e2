"""Write the graphs of a compilation to a folder and to TORCH_TRACE."""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Callable

from torch import fx
from torch._logging._internal import trace_structured


def observer(folder: str | None) -> Callable[[str, fx.GraphModule], None]:
    """Return the pipeline's observer: graph text to `TORCH_TRACE`, and to a new numbered folder in `folder`."""
    target: pathlib.Path | None = None
    if folder is not None:
        root = pathlib.Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            target = root / f"graph_{number}"
            try:
                target.mkdir()
                break
            except FileExistsError:
                continue

    def see(name: str, gm: fx.GraphModule) -> None:
        # printing a large graph takes a while: only where somebody reads it
        text = functools.cache(lambda: gm.print_readable(print_output=False))
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"branchreplay_{name}", "encoding": "string"},
            payload_fn=text,
        )
        if target is not None:
            (target / f"{name}.py").write_text(text())

    return see
