"""The typed edge of Triton: how a kernel is declared.

Triton itself has no types: `tl.pointer_type`, `tl.tensor` (a number or a tile) and `tl.constexpr` in a
kernel's signature are for its reader. Used at import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton


def kernel(*, varying: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Declare a Triton kernel, launched as `name[grid](...)`.

    `varying` names the numbers that change from step to step: the kernel is not compiled anew for a number
    that is 1 or divisible by 16, which would stop a running service for seconds.
    """

    def declare(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(varying))

    return declare


def inlined(function: Callable[..., Any]) -> Any:
    """Declare a function that kernels call."""
    return triton.jit(function)


def is_interpreted(function: Any) -> bool:
    """Whether `function` runs in Triton's interpreter, on tensors of the CPU."""
    return not isinstance(function, triton.JITFunction)
