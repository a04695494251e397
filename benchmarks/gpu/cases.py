"""KernelCase: one kernel at one shape, what it is measured against, and the bars it has to pass.

Owns the measuring of a case and its row. Knows no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from benchmarks.gpu.rows import Row
from benchmarks.gpu.timing import Timer

Call = Callable[[], object]


class Rate(Enum):
    """Unit and what one of it is."""

    FLOPS = ("TFLOP/s", 1e12)
    BYTES = ("GB/s", 1e9)


COPY = "copy"
"""A rival that is no call: a copy of the case's bytes."""
BEST = "best"
"""In bars: the best of all rivals."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelCase:
    """`work` FLOP or bytes per call of `ours`. A rival may raise RuntimeError: it cannot do this shape.

    `error` is the largest difference from the twin, relative to its largest value (a share of wrong rows for
    tokens), which must not be above `limit`; None where the twin would take too long. `bars` are the least
    ratios, by rival.
    """

    kernel: str
    shape: str
    work: float
    rate: Rate
    ours: Call
    error: Callable[[], float] | None
    limit: float = 1e-2
    rivals: Mapping[str, Call] = field(default_factory=dict)
    has_copy: bool = False
    bars: Mapping[str, float] = field(default_factory=dict)


def measure(case: KernelCase, timer: Timer, peak_copy: float) -> Row:
    """`peak_copy` is the bandwidth of a large copy: a case with a bar has to reach that of either copy."""
    unit, scale = case.rate.value
    error = case.error() if case.error is not None else 0.0
    value = case.work / timer.seconds(case.ours) / scale
    found: dict[str, float] = {}
    absent = []
    for name, call in case.rivals.items():
        try:
            found[name] = case.work / timer.seconds(call) / scale
        except RuntimeError:
            absent.append(name)
    if case.has_copy:
        own = timer.copy_bandwidth(int(case.work)) / scale
        found[COPY] = max(own, peak_copy / scale) if case.bars else own
    best = max(found, key=lambda name: -math.inf if math.isnan(found[name]) else found[name], default="")
    others = [f"{name} {found[name]:.0f}" for name in found if name != best and not math.isnan(found[name])]
    others += [f"{name} cannot" for name in absent]
    ratios = {**{name: value / other for name, other in found.items()}, BEST: value / found[best]}
    notes = [*others] if error <= case.limit else [f"error {error:.1e} is above {case.limit:.0e}", *others]
    return Row(
        case.kernel,
        case.shape,
        value,
        unit,
        best,
        found[best],
        ", ".join(f"≥ {least:g} × {name}" for name, least in case.bars.items()),
        _verdict(ratios, case.bars),
        error <= case.limit,
        "; ".join(notes),
    )


def _verdict(ratios: Mapping[str, float], bars: Mapping[str, float]) -> str:
    measured = {name: ratios[name] for name in bars if not math.isnan(ratios.get(name, math.nan))}
    if not measured:
        return ""
    return "pass" if all(ratio >= bars[name] for name, ratio in measured.items()) else "fail"
