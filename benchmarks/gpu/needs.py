"""What the steps import beyond the standard library, and which of it is missing here.

Imports nothing of it itself. Exits with 2 and a list when the engine cannot be imported; what only a step
needs is listed, and that step says that it was skipped. Neither Ray nor anything of HTTP is needed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """An importable `module`, the `package` that has it, and for what."""

    module: str
    package: str
    purpose: str

    @property
    def is_here(self) -> bool:
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # the parent of a dotted name
            return False

    @property
    def version(self) -> str:
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "?"


ENGINE = (
    Need("torch", "torch", "the engine"),
    Need("triton", "triton", "the engine"),
    Need("numpy", "numpy", "the engine"),
    Need("safetensors", "safetensors", "the engine"),
)
HANDOFF = (
    Need("grpc", "grpcio", "the handoff between processes"),
    Need("google.protobuf", "protobuf", "the handoff between processes"),
    Need("xxhash", "xxhash", "the handoff between processes"),
    Need("prometheus_client", "prometheus-client", "the handoff between processes"),
)
KERNEL_TESTS = (
    Need("pytest", "pytest", "the kernels' full tests"),
    Need("hypothesis", "hypothesis", "the kernels' full tests"),
    Need("scipy", "scipy", "the kernels' full tests"),
    Need("transformers", "transformers", "the kernels' full tests"),
)
FASTER_TESTS = (
    Need("xdist", "pytest-xdist", "several tests at a time"),
    Need("pytest_timeout", "pytest-timeout", "a limit for each test"),
)


def missing(needs: tuple[Need, ...]) -> list[str]:
    return [f"{need.package} (for {need.purpose})" for need in needs if not need.is_here]


def handoff_fault() -> str:
    """Why the bridge cannot be imported here; empty if it can."""
    if absent := missing(HANDOFF):
        return "missing: " + ", ".join(absent)
    try:
        importlib.import_module("protos.kv_transfer_pb2")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported: protobuf has its own class
        return f"the generated messages cannot be loaded: {type(error).__name__}: {error}"
    return ""


def main() -> int:
    everything = (*ENGINE, *HANDOFF, *KERNEL_TESTS, *FASTER_TESTS)
    print("python " + sys.version.split()[0], end="")
    print("".join(f", {need.package} {need.version}" for need in everything if need.is_here))
    if absent := missing(ENGINE):
        print("cannot run, missing: " + ", ".join(absent), file=sys.stderr)
        return 2
    for text in missing((*KERNEL_TESTS, *FASTER_TESTS)):
        print(f"goes without {text}")
    if fault := handoff_fault():
        print(f"the handoff will be skipped: {fault}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
