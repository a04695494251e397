"""Compiles every kernel for GPUs that need not be there and reports what the compiler made of it.

python benchmarks/kernel_report.py [--arch 90] [--samples] [--only prefill] [--json]

Registers per thread, spilled bytes, shared memory, the warps that fit on a multiprocessor at once and which
tensor core instructions are used, as one Markdown table. Exits with 1 when a kernel spills that must not, or
does not reach `wgmma` although it must.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before triton is loaded: only real kernels can be compiled

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import engine.kernels
from engine.kernels.build import ARCHITECTURES, KernelBuild

# Of one multiprocessor: CUDA C++ programming guide, technical specifications per compute capability.
_REGISTERS = 65536
_WARPS = 64
_BLOCKS = 32
_SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
_RESERVED_BYTES = 1024  # of shared memory per thread block, by the system

_INSTRUCTIONS = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "cp.async.bulk.tensor", "cp.async.cg")


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one build."""

    name: str
    arch: int
    num_warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    resident_warps: int
    instructions: tuple[str, ...]
    fault: str  # empty when it is as promised

    @property
    def occupancy(self) -> float:
        return self.resident_warps / _WARPS


def all_builds(arch: int) -> Iterator[tuple[str, KernelBuild]]:
    """Module and build, of every kernel module."""
    for info in pkgutil.iter_modules(engine.kernels.__path__, "engine.kernels."):
        module = importlib.import_module(info.name)
        for build in module.builds(arch) if hasattr(module, "builds") else ():
            yield info.name, build


def compile_build(build: KernelBuild, arch: int) -> Row:
    names = build.kernel.arg_names
    given = {**build.signature, **dict.fromkeys(build.constexprs, "constexpr")}
    if missing := set(names) ^ set(given):
        raise ValueError(f"{build.name}: {sorted(missing)} are not both arguments and described")
    signature = {name: given[name] for name in names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in build.aligned
    }
    source = ASTSource(build.kernel, signature, dict(build.constexprs), attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(build.options))
    registers, spilled = _resources(compiled.asm["cubin"])
    # cubin and metadata name 4 warps when more are started for specialised roles
    num_warps = max(compiled.metadata.num_warps, getattr(compiled.metadata, "total_num_warps", None) or 0)
    shared = compiled.metadata.shared
    ptx = compiled.asm["ptx"]
    instructions = tuple(name for name in _INSTRUCTIONS if name in ptx)
    return Row(
        build.name,
        arch,
        num_warps,
        registers,
        spilled,
        shared,
        _resident_warps(arch, num_warps, registers, shared),
        instructions,
        _fault(build, arch, spilled, instructions),
    )


def _fault(build: KernelBuild, arch: int, spilled: int, instructions: tuple[str, ...]) -> str:
    if spilled and not build.may_spill:
        return f"spills {spilled} bytes"
    if arch == 90 and build.uses_wgmma and "wgmma.mma_async" not in instructions:
        return "does not use wgmma"
    return ""


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes that it spills; a stack that no instruction touches is none."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (_cuobjdump(flag, file.name) for flag in ("-res-usage", "-sass"))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of registers: {usage}")
    is_spilled = re.search(r"\b(STL|LDL)\b", code) is not None
    return int(found[1]), int(found[2]) if is_spilled else 0


def _cuobjdump(flag: str, path: str) -> str:
    """The tool that triton brings along."""
    command = [triton.knobs.nvidia.cuobjdump.path, flag, path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _resident_warps(arch: int, num_warps: int, registers: int, shared: int) -> int:
    """Warps that one multiprocessor holds at a time; registers are dealt out in units of 8 per thread."""
    blocks = min(
        _BLOCKS,
        _WARPS // num_warps,
        _REGISTERS // (-(-registers // 8) * 8 * 32 * num_warps),
        _SHARED_BYTES[arch] // (shared + _RESERVED_BYTES),
    )
    return blocks * num_warps


def markdown(rows: list[Row]) -> str:
    lines = [
        "| kernel | sm | warps | registers | spilled bytes | shared KiB | occupancy | instructions | fault |",
        "| --- | --: | --: | --: | --: | --: | --: | --- | --- |",
    ]
    for row in rows:
        numbers = f"{row.num_warps} | {row.registers} | {row.spilled_bytes} | {row.shared_bytes / 1024:.1f}"
        instructions = ", ".join(row.instructions)
        lines.append(
            f"| {row.name} | {row.arch} | {numbers} | {row.occupancy:.0%} | {instructions} | {row.fault} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", type=int, nargs="*", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--samples", action="store_true", help="only the few that `make test` compiles")
    parser.add_argument("--only", default="", help="part of a module's or build's name")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args()
    rows = [
        compile_build(build, arch)
        for arch in options.arch
        for module, build in all_builds(arch)
        if (build.is_sample or not options.samples) and options.only in f"{module} {build.name}"
    ]
    print(markdown(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))
    return 1 if any(row.fault for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
