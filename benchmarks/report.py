"""The comparison as markdown: one table of medians and ratios, and below it how it was made.

Owns the layout only. Pure apart from asking the machine what it is.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measures import Summary, medians, ratio
from benchmarks.servers import ServerSpec
from benchmarks.workloads import Workload

_MISSING = "–"
_MEASURES = (
    *("tok/s (min–max)", "TTFT p50 s", "TPOT p50 ms", "ITL p50 ms", "ITL p99 ms"),
    *("longest gap ms", "longest/p50"),
)


@dataclass(slots=True)
class Results:
    """What the runs of one server gave, by workload: summaries, shares of plans, and what failed."""

    spec: ServerSpec
    version: str = ""
    sample: str = ""
    summaries: dict[Workload, list[Summary]] = field(default_factory=dict)
    plans: dict[Workload, list[Mapping[str, float]]] = field(default_factory=dict)
    failures: dict[Workload | None, list[str]] = field(default_factory=dict)

    def add(self, workload: Workload, summary: Summary, plans: Mapping[str, float]) -> None:
        """One run; `plans` is empty for a server that does not tell."""
        self.summaries.setdefault(workload, []).append(summary)
        if plans:
            self.plans.setdefault(workload, []).append(plans)

    def median(self, workload: Workload) -> Summary | None:
        """None if the workload was not run, or if any of its runs failed."""
        found = self.summaries.get(workload)
        return (
            medians(found) if found and workload not in self.failures and None not in self.failures else None
        )


def table(results: Sequence[Results], workloads: Sequence[Workload]) -> str:
    """One row for each workload and server. For each peer a column of ratios: this server's value in units of
    the peer's, tok/s, then TTFT, then longest gap.
    """
    peers = [result for result in results if result.spec.is_peer]
    heads = ["", "server", "weights", "runs", *_MEASURES, "plans"]
    heads += [f"× {peer.spec.name}: tok/s · TTFT · gap" for peer in peers]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for workload in workloads:
        for result in results:
            if result.spec.runs(workload):
                lines.append("| " + " | ".join(_row(result, workload, peers)) + " |")
    return "\n".join(lines)


def _row(result: Results, workload: Workload, peers: Sequence[Results]) -> Iterator[str]:
    yield from (workload.value, result.spec.name, result.spec.weights)
    found = result.median(workload)
    if found is None:
        yield "failed"
        yield from [_MISSING] * (len(_MEASURES) + 1 + len(peers))
        return
    runs = result.summaries[workload]
    yield str(len(runs))
    yield _rate(found, runs)
    yield _number(found.ttft_p50, 3)
    times = (found.tpot_p50, found.itl_p50, found.itl_p99, found.longest_gap)
    yield from (_number(_ms(value), 1) for value in times)
    yield _number(found.gap_ratio, 1)
    yield _plans(result.plans.get(workload, []))
    for peer in peers:
        other = peer.median(workload)
        yield _MISSING if other is None or peer is result else _ratios(found, other)


def _rate(found: Summary, runs: Sequence[Summary]) -> str:
    rates = [run.tokens_per_s for run in runs if run.tokens_per_s is not None]
    return f"{_number(found.tokens_per_s, 1)} ({min(rates):.1f}–{max(rates):.1f})" if rates else _MISSING


def _ratios(found: Summary, other: Summary) -> str:
    pairs = (
        (found.tokens_per_s, other.tokens_per_s),
        (found.ttft_p50, other.ttft_p50),
        (found.longest_gap, other.longest_gap),
    )
    return " · ".join(_number(ratio(value, base), 2) for value, base in pairs)


def _plans(shares: Sequence[Mapping[str, float]]) -> str:
    names = sorted({name for share in shares for name in share})
    means = {name: sum(share.get(name, 0.0) for share in shares) / len(shares) for name in names}
    return ", ".join(f"{name} {mean:.0%}" for name, mean in means.items()) or _MISSING


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _number(value: float | None, digits: int) -> str:
    return _MISSING if value is None else f"{value:.{digits}f}"


def configuration(results: Sequence[Results], settings: Mapping[str, object]) -> str:
    """Everything that the table depends on, as a markdown list; `settings` are what all servers share.

    Commands are shown as they are written, without the paths of one machine.
    """
    lines = [f"- {name}: {value}" for name, value in settings.items()]
    for result in results:
        version = f" ({result.version})" if result.version else ""
        lines.append(f"- **{result.spec.name}**{version}")
        variables = "".join(f"{setting} " for setting in result.spec.environment)
        lines.append(f"  - `{variables}{result.spec.command.strip()}`")
        lines.append(f"  - greedy sample: {result.sample!r}")
        lines += [
            f"  - FAILED {'at the start' if workload is None else workload.value}: {failure}"
            for workload, failures in result.failures.items()
            for failure in failures
        ]
    return "\n".join(lines)


def machine() -> dict[str, str]:
    """The processor, its vector units, cores, memory, the software under all servers, and this commit."""
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile")
    model, flags = "unknown", frozenset[str]()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() == "flags":
            flags = frozenset(value.split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    vectors = ", ".join(flag for flag in wanted if flag in flags)
    return {
        "processor": f"{model}, {len(os.sched_getaffinity(0))} cores, {vectors}",
        "memory": f"{memory:.0f} GiB",
        "software": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "commit": commit(),
    }


def commit() -> str:
    """The repository's, marked if tracked files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
