"""KernelBuild: a kernel as it is shipped for one architecture; all that its compiler needs, no tensors.

Owns the description that each kernel module gives of itself: `builds(arch)` returns what the module launches
on that architecture. `benchmarks/kernel_report.py` finds the modules by that function, compiles what they
return and reports registers, spills and shared memory. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities that kernels are shipped for: Ampere, Hopper, Blackwell."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelBuild:
    """`signature` gives the type of each argument that is not in `constexprs`, in any order.

    Types are Triton's: `*bf16` is a pointer, `i32` a number, `tensordesc<bf16[64,128]>` a tensor descriptor.
    Pointers are taken as aligned to 16 bytes, as torch's are; `aligned` names the numbers that are divisible
    by 16 whenever the kernel is launched. `options` are those of the launch: `num_warps`, `num_stages`.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    aligned: frozenset[str] = frozenset()
    may_spill: bool = False
    uses_wgmma: bool = False
    """Whether the tensor cores of sm_90 must be reached through `wgmma`."""
    is_sample: bool = False
    """Whether `make test` compiles it too; a few of each module, since each takes a second or more."""
