"""Binds the kernels to the operators that `branchfx.ops` declares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from branchfx import ops
from branchfx.codegen.cpu import attention, gather

_KERNELS: dict[str, Callable[..., Any]] = {
    "tree_attention": attention.tree_attention,
    "tree_attention_backward": attention.tree_attention_backward,
    "unpack": gather.unpack,
    "unpack_backward": gather.unpack_backward,
    "unpack_gather": gather.unpack_gather,
    "unpack_gather_backward": gather.unpack_gather_backward,
}


@functools.cache
def register_kernels() -> None:
    """Bind every kernel to the CPU and CUDA keys of its operator. A second call does nothing."""
    for name, kernel in _KERNELS.items():
        torch.library.impl(f"{ops.NAMESPACE}::{name}", ("CPU", "CUDA"), kernel)
